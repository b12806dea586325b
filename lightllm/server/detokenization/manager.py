"""The detokenizer process: token batches of the router become text batches of the fronts."""

import msgspec
import numpy as np

from lightllm.server.core.channel import Inbox, Outbox, wait
from lightllm.server.core.messages import (
    FINISHES,
    FRONT_SHIFT,
    Ended,
    Finish,
    PromptLogprobs,
    StopRequest,
    TextBatch,
    TokenBatch,
    front_of,
    unpack,
)
from lightllm.server.detokenization.incremental import IncrementalDetokenizer, failure
from lightllm.server.tokenizer import Tokenizer, load_tokenizer
from lightllm.utils.log_utils import init_logger, set_log_level
from lightllm.utils.process_utils import Child

logger = init_logger(__name__)

# The router may still name a sequence that ended here until it has read the StopRequest, a few steps later. Remembering
# more sequences than can end in those steps is enough.
NUM_REMEMBERED = 16384


def main(child: Child) -> None:
    """Runs until the launcher says stop."""
    args, socket_dir = child.config["args"], child.config["socket_dir"]
    set_log_level(args["log_level"])
    inbox = Inbox(socket_dir, "detok", [TokenBatch])
    router = Outbox(socket_dir, "router")
    fronts = [Outbox(socket_dir, f"front{index}") for index in range(args["httpserver_workers"])]
    manager = DetokenizationManager(load_tokenizer(args["model_dir"], args["trust_remote_code"]))
    while True:
        ready = wait(inbox, child.control_fd)
        for batch in inbox.receive():
            assert isinstance(batch, TokenBatch)
            texts, stops = manager.process(batch)
            for stop in stops:
                router.send(stop)
            for front, text in texts.items():
                fronts[front].send(text)
        if child.control_fd in ready:
            command = child.receive()
            if "stop" in command:
                return
            if "engine" in command:
                child.ready()


class DetokenizationManager:
    """Holds an IncrementalDetokenizer for each running sequence."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._running: dict[int, IncrementalDetokenizer] = {}
        self._ended_here: dict[int, None] = {}  # a set in order of arrival

    def process(self, batch: TokenBatch) -> tuple[dict[int, TextBatch], list[StopRequest]]:
        """One text batch for each front that has something in it, and what the router must be told to stop.

        Rows of sequences that have already ended here are dropped. If the text of a sequence fails, that sequence ends
        with an error.
        """
        shown: list[tuple[int, str, Finish]] = []  # row, text, finish
        ended: list[Ended] = []
        stops: list[StopRequest] = []

        def fail(sequence_id: int, kept: int, error: Exception) -> None:
            logger.exception("no text for sequence %d", sequence_id)
            ended.append(Ended(sequence_id, Finish.ERROR, 500, failure(error)))
            stops.append(StopRequest(sequence_id, kept))
            self._end_here(sequence_id)

        for new in batch.new:
            try:
                self._running[new.sequence_id] = IncrementalDetokenizer.of(self._tokenizer, new)
            except Exception as error:
                fail(new.sequence_id, 0, error)
        sequence_ids = unpack(batch.sequence_ids, np.int64).tolist()
        tokens = unpack(batch.tokens, np.int32).tolist()
        for row, (sequence_id, token, decided) in enumerate(zip(sequence_ids, tokens, batch.finishes, strict=True)):
            detokenizer = self._running.get(sequence_id)
            if detokenizer is None:
                continue
            try:
                text, finish = detokenizer.push(token, FINISHES[decided])
            except Exception as error:
                fail(sequence_id, detokenizer.num_tokens - 1, error)
                continue
            shown.append((row, text, finish))
            if finish and decided:
                del self._running[sequence_id]
            elif finish:
                stops.append(StopRequest(sequence_id, detokenizer.num_tokens))
                self._end_here(sequence_id)
        for end in batch.ended:
            self._running.pop(end.sequence_id, None)
            if end.finish != Finish.ABORT and end.sequence_id not in self._ended_here:
                ended.append(end)
        prompt = [part for part in batch.prompt if part.owner not in self._ended_here]
        return _by_front(batch, shown, prompt, ended), stops

    def _end_here(self, sequence_id: int) -> None:
        self._running.pop(sequence_id, None)
        self._ended_here[sequence_id] = None
        if len(self._ended_here) > NUM_REMEMBERED:
            del self._ended_here[next(iter(self._ended_here))]


def _by_front(
    batch: TokenBatch, shown: list[tuple[int, str, Finish]], prompt: list[PromptLogprobs], ended: list[Ended]
) -> dict[int, TextBatch]:
    """The shown rows of a batch as one text batch per front."""
    sequence_ids, tokens = unpack(batch.sequence_ids, np.int64), unpack(batch.tokens, np.int32)
    logprobs = unpack(batch.logprobs, np.float32)
    shown_fronts = sequence_ids[[row for row, _, _ in shown]] >> FRONT_SHIFT if shown else np.empty(0, np.int64)
    fronts = {*shown_fronts.tolist(), *(front_of(part.owner) for part in prompt)}
    fronts |= {front_of(end.sequence_id) for end in ended} | {front_of(start.sequence_id) for start in batch.started}
    batches = {}
    for front in sorted(fronts):
        own = [entry for entry, of in zip(shown, shown_fronts.tolist(), strict=True) if of == front]
        rows = np.array([row for row, _, _ in own], np.int64)
        place = {row: index for index, row in enumerate(rows.tolist())}
        batches[front] = TextBatch(
            sequence_ids=sequence_ids[rows].tobytes(),
            tokens=tokens[rows].tobytes(),
            logprobs=logprobs[rows].tobytes(),
            finishes=bytes(finish for _, _, finish in own),
            texts=[text for _, text, _ in own],
            top=[msgspec.structs.replace(top, index=place[top.index]) for top in batch.top if top.index in place],
            prompt=[part for part in prompt if front_of(part.owner) == front],
            started=[start for start in batch.started if front_of(start.sequence_id) == front],
            ended=[end for end in ended if front_of(end.sequence_id) == front],
            at=batch.at,
        )
    return batches
