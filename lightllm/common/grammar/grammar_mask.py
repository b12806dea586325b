"""GrammarMask: masks the tokens that a row's grammar does not allow next."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from lightllm.common.grammar.backend import Backend, Matcher
from lightllm.common.grammar.deep_stack import on_deep_stack
from lightllm.common.grammar.forms import DEAD_END, decode
from lightllm.common.sampling.logits_processor import Line, LogitsProcessor
from lightllm.common.sampling.sampling_batch import RowSampling, RowStart
from lightllm.common.sampling.transfer import to_device
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)

COMPILE_PATIENCE = 30.0  # seconds for a grammar; a library cannot be stopped
PATIENCE = 0.5  # seconds of the processor for one token; usual ones take 25 us, objects of many keys milliseconds
SMALLEST = -1e30  # what an allowed token keeps that every other processor forbids


class GrammarMask(LogitsProcessor):
    """The last of the logits processors. It costs rows without a grammar nothing.

    Grammars are compiled in threads, best before their row starts (`compile`), and once for all who have them at the
    same time. The tokens that a step samples are read when the next step is about to be sampled: its forward has been
    launched by then, so that the device computes while matchers advance and masks are filled.

    backend: the library. tokenizer_json: path of the checkpoint's tokenizer.json; without it, or without the library,
    every row with a grammar fails. vocab_size: of the model. eos_token_ids: end a text.
    """

    def __init__(self, backend: type[Backend], tokenizer_json: Path, vocab_size: int, eos_token_ids: Sequence[int]):
        self._failures: dict[int, str] = {}
        self._vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._compiled: WeakValueDictionary[str, Future[Matcher]] = WeakValueDictionary()
        self._kept: dict[int, Future[Matcher]] = {}  # by key
        self._of_rows: dict[int, Future[Matcher]] = {}
        self._matchers: dict[int, Matcher] = {}
        self._starting: dict[int, list[int]] = {}  # the output of each row that has no matcher yet
        self._sampled: tuple[list[int], Tensor, torch.cuda.Event | None] | None = None
        eos = [id for id in eos_token_ids if id < vocab_size]
        self._backend: Future[Backend] = self._threads.submit(backend, tokenizer_json, vocab_size, eos)

    def asked_by(self, settings: RowSampling) -> bool:
        return settings.grammar != ""

    def take_failures(self) -> dict[int, str]:
        """Rows of the last step whose grammar cannot go on, and why; told once."""
        failures, self._failures = self._failures, {}
        return failures

    def start(self, starts: Sequence[RowStart]) -> None:
        for start in starts:
            self._starting.pop(start.row, None)
            if self._sampled is not None and start.row in self._sampled[0]:
                self._read_sampled()
            self._matchers.pop(start.row, None)
            self._failures.pop(start.row, None)
            if grammar := start.sampling.grammar:
                self._of_rows[start.row] = self._compile(grammar)
                self._starting[start.row] = start.token_ids[start.prompt_len :].tolist()
            else:
                self._of_rows.pop(start.row, None)

    def compile(self, key: int, grammar: str, done: Callable[[str], None]) -> None:
        """Compiles it before a row wants it, and keeps it until `forget(key)`; `done` is told, by some thread, why it
        cannot be used, "" if it can.

        What takes longer than COMPILE_PATIENCE is told as a failure, and again when it is done after all.
        """
        late = threading.Timer(
            COMPILE_PATIENCE, done, [f"the grammar takes longer than {COMPILE_PATIENCE:g} s to compile"]
        )
        late.daemon = True

        def tell(ended: Future[Matcher]) -> None:
            late.cancel()
            if not ended.cancelled():
                problem = ended.exception()
                done(f"the grammar cannot be used: {problem}" if problem else "")

        self._kept[key] = self._compile(grammar, late.start)
        self._kept[key].add_done_callback(tell)

    def forget(self, key: int) -> None:
        """What has not begun to be compiled will not be, and is not told."""
        self._kept.pop(key).cancel()

    def _compile(self, grammar: str, begun: Callable[[], None] = lambda: None) -> Future[Matcher]:
        """A matcher in its first state, to be copied. begun: is called when its compilation has begun."""
        future = self._compiled.get(grammar)
        if future is None or future.cancelled():
            future = self._compiled[grammar] = self._threads.submit(self._first_matcher, grammar, begun)
        elif not future.done():
            begun()
        return future

    def _first_matcher(self, grammar: str, begun: Callable[[], None]) -> Matcher:
        begun()
        matcher = on_deep_stack(lambda: self._backend.result().first(decode(grammar)))
        if failure := self._fill(matcher, np.empty((self._vocab_size + 31) // 32, dtype=np.int32)):
            raise ValueError(failure)
        return matcher

    def _fill(self, matcher: Matcher, mask: np.ndarray) -> str:
        """Sets the bits of the tokens that may come next; gives why none may, "" if one may."""
        mask[:] = 0
        if not matcher.failure:
            self._backend.result().fill(matcher, mask)
        return matcher.failure or ("" if mask.any() else DEAD_END)

    def __call__(self, logits: Tensor, lines: Sequence[Line]) -> None:
        self._read_sampled()
        rows = [line.row for line in lines]
        self._failures = {row: self._failures[row] for row in rows if row in self._failures}  # others may have ended
        for row in rows:
            self._begin(row)
        allowed = self._allowed(lines, logits.device)
        where = to_device(np.array([line.at for line in lines], dtype=np.int64), logits.device)
        chosen = logits.index_select(0, where)
        # a token that the grammar allows stays possible, so that no row is left without any
        logits.index_copy_(0, where, chosen.clamp_(min=SMALLEST).masked_fill_(~allowed, -torch.inf))

    def _begin(self, row: int) -> None:
        if row not in self._starting:
            return
        output = self._starting.pop(row)
        try:
            matcher = self._of_rows[row].result().fork()
        except Exception as error:
            self._failures[row] = f"the grammar cannot be used: {error}"
            return
        for token in output:
            matcher.accept(token)
        self._matchers[row] = matcher

    def _allowed(self, lines: Sequence[Line], device: torch.device) -> Tensor:
        """bool [lines, V]. Rows whose grammar failed may sample anything: their sequences end with the failure."""
        masks = np.full((len(lines), (self._vocab_size + 31) // 32), -1, dtype=np.int32)
        for mask, (_, row, _, sampling) in zip(masks, lines):
            matcher = self._matchers.get(row)
            if matcher is None:
                continue
            with self._patience(row):
                failure = self._fill(matcher, mask)
            if failure:
                self._failures.setdefault(row, f"the grammar cannot go on: {failure}")
                # what ran into a limit is shared by its copies: the next request begins anew
                self._compiled.pop(sampling.grammar, None)
                mask[:] = -1
        if device.type == "cpu":
            bits_of = np.unpackbits(masks.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
            return torch.from_numpy(bits_of.view(bool))
        bits = to_device(masks, device)
        shifts = torch.arange(32, dtype=torch.int32, device=device)
        return ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : self._vocab_size]

    def observe(self, tokens: Tensor, lines: Sequence[Line]) -> None:
        """The tokens are read from the device later."""
        self._read_sampled()
        where = to_device(np.array([line.at for line in lines], dtype=np.int64), tokens.device)
        mine = tokens.index_select(0, where).to("cpu", non_blocking=True)
        copied = None
        if tokens.is_cuda:
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        self._sampled = ([line.row for line in lines], mine, copied)

    def _read_sampled(self) -> None:
        """Advances the matchers by the tokens of the last step, once the device has sampled them."""
        if self._sampled is None:
            return
        rows, tokens, copied = self._sampled
        self._sampled = None
        if copied is not None:
            copied.synchronize()
        for row, token in zip(rows, tokens.tolist()):
            if row in self._matchers:
                with self._patience(row):
                    self._matchers[row].accept(token)

    @contextmanager
    def _patience(self, row: int) -> Iterator[None]:
        """Within, the row's matcher works while everybody waits; if it takes too long the row fails."""
        began = time.thread_time()
        yield
        if (seconds := time.thread_time() - began) > PATIENCE:
            # its mask still holds: other ranks, which may have been faster, sample the same
            told = f"the grammar is too ambiguous: {seconds:.2f} s for one token, at most {PATIENCE} s"
            self._failures.setdefault(row, told)
