"""A worker that computes nothing and checks every plan: rows, positions, slots, budgets, and what steps in flight name.

The token that it samples depends on the sequence and the place alone, so what a sequence must give is known beforehand.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from lightllm.server.core.messages import (
    Finish,
    GenerateRequest,
    NewRow,
    PromptLogprobs,
    StepPlan,
    StepResult,
    TopLogprobs,
    pack,
    unpack,
)
from lightllm.server.core.sampling_params import SamplingParams

VOCAB = 12  # few ids, so that stops happen


def request(number: int, prompt_len: int, max_new_tokens: int, **parameters) -> GenerateRequest:
    """A resolved request; `number` gives its id."""
    sampling = SamplingParams(**(dict(n=1, logprobs=0) | parameters), max_new_tokens=max_new_tokens)
    return GenerateRequest(number << 3, pack(np.arange(prompt_len) + number, np.int32), sampling, False)


def token_at(sequence_id: int, index: int) -> int:
    """Output token `index` of a sequence."""
    return zlib.crc32(b"%d %d" % (sequence_id, index)) % VOCAB


def expected_output(sequence_id: int, sampling: SamplingParams) -> tuple[list[int], Finish]:
    """The tokens of a sequence that nobody interrupts, and why it ends."""
    tokens: list[int] = []
    while True:
        tokens.append(token_at(sequence_id, len(tokens)))
        sequences = [stop for stop in sampling.stop_sequences if isinstance(stop, list)]
        stopped = tokens[-1] in sampling.stop_token_ids or any(tokens[-len(stop) :] == stop for stop in sequences)
        if stopped and len(tokens) >= sampling.min_new_tokens:
            return tokens, Finish.STOP
        if len(tokens) == sampling.max_new_tokens:
            return tokens, Finish.LENGTH


@dataclass
class WorkerRow:
    """What the worker has of a sequence."""

    new: NewRow
    slots: list[int] = field(default_factory=list)  # by position
    sampled: int = 0

    @property
    def prompt_computed(self) -> bool:
        return len(self.slots) >= self.new.prompt_len

    @property
    def can_compute(self) -> bool:
        return not self.prompt_computed or self.sampled < self.new.sampling.max_new_tokens


@dataclass
class Flying:
    """A step in flight: its answer, and all that it reads or writes."""

    result: StepResult
    rows: set[int]
    slots: set[int]


class SimulatedWorker:
    """`launch` checks a plan and computes its result, `result` gives the oldest one.

    failing: steps whose rows all fail. plans_in_flight: at most, or an assertion fails.
    """

    def __init__(
        self, num_slots: int, batch_max_tokens: int, chunk: int, plans_in_flight: int, failing: Collection[int] = ()
    ):
        self.flying: deque[Flying] = deque()
        self.rows: dict[int, WorkerRow] = {}
        self.started: list[int] = []  # sequence ids in the order in which they got a row
        self.idle: set[int] = set()  # sequences that the last plan had tokens for and left out
        self._owner = np.full(num_slots, -1)
        self._budget = batch_max_tokens
        self._chunk = chunk
        self._plans_in_flight = plans_in_flight
        self._failing = failing
        self._step: int | None = None

    def launch(self, plan: StepPlan) -> None:
        assert self._step is None or plan.step == self._step + 1
        self._step = plan.step
        assert len(self.flying) < self._plans_in_flight, "too many plans in flight"
        self._change_rows(plan)
        rows, starts, lengths = (unpack(column, np.int32).tolist() for column in (plan.rows, plan.starts, plan.lengths))
        samples, slots = unpack(plan.samples, np.uint8).tolist(), unpack(plan.slots, np.int32).tolist()
        assert rows and len(rows) == len(starts) == len(lengths) == len(samples) == len(set(rows))
        assert sum(lengths) == len(slots) <= self._budget
        full = sum(lengths) == self._budget
        self.idle = {
            state.new.sequence_id
            for row, state in self.rows.items()
            if row not in rows and state.can_compute and (state.prompt_computed or not full)
        }
        self._check_order(plan.num_decode, rows, lengths, full)
        self._write(rows, lengths, slots)
        for i, (row, start, length, sample) in enumerate(zip(rows, starts, lengths, samples)):
            self._compute(row, start, length, sample, decode=i < plan.num_decode)
        named = {slot for row in rows for slot in self.rows[row].slots}
        self.flying.append(Flying(self._answer(plan, rows, starts, lengths, samples), set(rows), named))

    def result(self) -> StepResult:
        return self.flying.popleft().result

    def _change_rows(self, plan: StepPlan) -> None:
        named = set().union(*(step.rows for step in self.flying))
        for row in unpack(plan.ended, np.int32).tolist():
            assert row not in named, "a row is given up while a step in flight names it"
            self._owner[self.rows.pop(row).slots] = -1
        for new in plan.new_rows:
            assert new.row not in self.rows, "a row is in use"
            assert new.prompt_len == len(new.token_ids) // 4
            self.rows[new.row] = WorkerRow(new)
            self.started.append(new.sequence_id)

    def _check_order(self, num_decode: int, rows: list[int], lengths: list[int], full: bool) -> None:
        """Chunks are in the order of arrival, and as long as they can be unless the budget ends."""
        chunks = [self.rows[row] for row in rows[num_decode:]]
        order = [self.started.index(state.new.sequence_id) for state in chunks]
        assert order == sorted(order), "a prompt has passed another"
        for i, (state, length) in enumerate(zip(chunks, lengths[num_decode:]), start=1):
            assert length > 0
            whole = length == min(state.new.prompt_len - len(state.slots), self._chunk)
            assert whole or (full and i == len(chunks)), "a chunk is too short"

    def _write(self, rows: list[int], lengths: list[int], slots: list[int]) -> None:
        named = set().union(*(step.slots for step in self.flying))
        assert not named & set(slots), "a slot is reused while a step in flight names it"
        assert (self._owner[slots] == -1).all() and len(set(slots)) == len(slots), "a slot has two writers"
        self._owner[slots] = np.repeat(rows, lengths)
        taken = iter(slots)
        for row, length in zip(rows, lengths):
            self.rows[row].slots += [next(taken) for _ in range(length)]

    def _compute(self, row: int, start: int, length: int, sample: int, decode: bool) -> None:
        state = self.rows[row]
        assert start == len(state.slots) - length, "a position is skipped or computed twice"
        assert decode == (start >= state.new.prompt_len), "decode rows come first, chunks after them"
        assert length == 1 if decode else start + length <= state.new.prompt_len
        assert decode or length <= self._chunk
        assert bool(sample) == state.prompt_computed
        state.sampled += bool(sample)
        assert state.sampled <= state.new.sampling.max_new_tokens, "a row is planned past its end"

    def _answer(
        self, plan: StepPlan, rows: list[int], starts: list[int], lengths: list[int], samples: list[int]
    ) -> StepResult:
        if plan.step in self._failing:
            return StepResult(plan.step, b"", b"", b"", [], [], [(row, "it broke") for row in rows])
        sampled = [self.rows[row] for row, sample in zip(rows, samples) if sample]
        tokens = [token_at(state.new.sequence_id, state.sampled - 1) for state in sampled]
        return StepResult(
            step=plan.step,
            rows=pack([state.new.row for state in sampled], np.int32),
            tokens=pack(tokens, np.int32),
            logprobs=pack([-state.sampled for state in sampled], np.float32),
            top=[
                TopLogprobs(i, pack([token], np.int32), pack([-state.sampled], np.float32))
                for i, (state, token) in enumerate(zip(sampled, tokens))
                if state.new.sampling.logprobs
            ],
            prompt=[
                PromptLogprobs(row, start + 1, pack(np.arange(start + 1, end), np.float32), b"", b"")
                for row, start, length in zip(rows, starts, lengths)
                if self.rows[row].new.sampling.prompt_logprobs is not None
                and (end := min(start + length + 1, self.rows[row].new.prompt_len)) > start + 1
            ],
            failed=[],
        )
