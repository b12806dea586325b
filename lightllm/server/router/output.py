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
        self._columns: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self._num_tokens = 0
        self._top: list[TopLogprobs] = []
        self._prompt: list[PromptLogprobs] = []

    def add_tokens(
        self, result: StepResult, kept: np.ndarray, sequence_ids: np.ndarray, finishes: np.ndarray, now: float
    ) -> None:
        """The rows of a result where `kept`, bool [rows]; `sequence_ids` int64 [rows], `finishes` uint8 [kept rows]."""
        self._at = now
        tokens, logprobs = unpack(result.tokens, np.int32), unpack(result.logprobs, np.float32)
        self._columns.append((sequence_ids[kept], tokens[kept], logprobs[kept], finishes))
        place = self._num_tokens + np.cumsum(kept) - 1
        self._top += [
            msgspec.structs.replace(top, index=int(place[top.index])) for top in result.top if kept[top.index]
        ]
        self._num_tokens += len(finishes)

    def add_prompt(self, parts: list[PromptLogprobs], alive: np.ndarray, sequence_ids: np.ndarray) -> None:
        """Prompt logprobs of rows, handed on as those of sequences; both columns are by row."""
        self._prompt += [
            msgspec.structs.replace(part, owner=int(sequence_ids[part.owner])) for part in parts if alive[part.owner]
        ]

    def take(self) -> TokenBatch | None:
        """Everything gathered, and starts anew; None if there is nothing."""
        if not (self._num_tokens or self.new or self.ended or self._prompt):
            return None
        empty = (np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8))
        sequence_ids, tokens, logprobs, finishes = (np.concatenate(c) for c in zip(empty, *self._columns))
        batch = TokenBatch(
            sequence_ids=sequence_ids.tobytes(),
            tokens=tokens.tobytes(),
            logprobs=logprobs.tobytes(),
            finishes=finishes.tobytes(),
            top=self._top,
            prompt=self._prompt,
            new=self.new,
            started=self.started,
            ended=self.ended,
            at=self._at,
        )
        self._start_anew()
        return batch
