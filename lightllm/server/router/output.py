"""Output: what the router has for the detokenizer, gathered until it is taken as one batch."""

import msgspec
import numpy as np

from lightllm.server.core.messages import (
    Ended,
    NewSequence,
    PromptLogprobs,
    Started,
    StepResult,
    TokenBatch,
    TopLogprobs,
    unpack,
)


class Output:
    """Columns of tokens and, beside them, what begins and ends."""

    def __init__(self) -> None:
        self._start_anew()

    def _start_anew(self) -> None:
        self.new: list[NewSequence] = []
        self.started: list[Started] = []
        self.ended: list[Ended] = []
        self._at = 0.0
        self._steps: list[tuple[StepResult, np.ndarray, np.ndarray, np.ndarray]] = []
        self._prompt: list[PromptLogprobs] = []

    def add_tokens(
        self, result: StepResult, kept: np.ndarray, sequence_ids: np.ndarray, finishes: np.ndarray, now: float
    ) -> None:
        """The rows of a result where `kept`, bool [rows]; `sequence_ids` int64 [rows], `finishes` uint8 [kept rows]."""
        self._at = now
        if len(finishes):
            self._steps.append((result, kept, sequence_ids, finishes))

    def add_prompt(self, parts: list[PromptLogprobs], alive: np.ndarray, sequence_ids: np.ndarray) -> None:
        """Prompt logprobs of rows, handed on as those of sequences; both columns are by row."""
        self._prompt += [
            msgspec.structs.replace(part, owner=int(sequence_ids[part.owner])) for part in parts if alive[part.owner]
        ]

    def take(self) -> TokenBatch | None:
        """Everything gathered, and starts anew; None if there is nothing."""
        if not (self._steps or self.new or self.ended or self._prompt):
            return None
        columns = [(np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8))]
        top: list[TopLogprobs] = []
        num_tokens = 0
        for result, kept, ids, ends in self._steps:
            tokens, logprobs = unpack(result.tokens, np.int32)[kept], unpack(result.logprobs, np.float32)[kept]
            columns.append((ids[kept], tokens, logprobs, ends))
            if result.top:
                place = num_tokens + np.cumsum(kept) - 1
                top += [msgspec.structs.replace(t, index=int(place[t.index])) for t in result.top if kept[t.index]]
            num_tokens += len(ends)
        sequence_ids, tokens, logprobs, finishes = map(np.concatenate, zip(*columns))
        batch = TokenBatch(
            sequence_ids=sequence_ids.tobytes(),
            tokens=tokens.tobytes(),
            logprobs=logprobs.tobytes(),
            finishes=finishes.tobytes(),
            top=top,
            prompt=self._prompt,
            new=self.new,
            started=self.started,
            ended=self.ended,
            at=self._at,
        )
        self._start_anew()
        return batch
