"""A worker that computes nothing and checks every plan: rows, positions, slots, budgets, and what steps in flight name.

The token that it samples depends on the sequence and the place alone, so what a sequence must give is known beforehand.
What a slot holds is a hash of all ids up to its position: a cached prefix must hold that of the ids it is used for.
"""

import zlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

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
    sample_of,
    unpack,
)
from lightllm.server.core.sampling_params import SamplingParams

VOCAB = 12  # few ids, so that stops happen


def request(
    number: int,
    prompt_len: int,
    max_new_tokens: int,
    ids: Sequence[int] | None = None,
    client: str = "",
    priority: int = 0,
    open_ended: bool = False,
    **parameters,
) -> GenerateRequest:
    """A resolved request; `number` gives its id and, without `ids`, a prompt that shares nothing with others'."""
    sampling = SamplingParams(**(dict(n=1, logprobs=0) | parameters), max_new_tokens=max_new_tokens)
    prompt = np.arange(prompt_len) + 1000 * number if ids is None else ids
    return GenerateRequest(number << 3, pack(prompt, np.int32), sampling, open_ended, client, priority)


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
    order: int  # of its start
    ids: list[int]
    slots: list[int]  # by position
    prefixes: list[int]  # by position: hashes of the ids up to there
    sampled: int  # output tokens

    @property
    def known(self) -> int:
        return len(self.new.token_ids) // 4

    @property
    def prompt_computed(self) -> bool:
        return len(self.slots) >= self.known

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

    failing: steps whose rows all fail. plans_in_flight: at most, or an assertion fails. full_chunks: chunks are as long
    as chunk size and budget allow; else the pool may be short. `computed`: tokens of prompts so far; `cached`: those
    that a start found in the cache.
    """

    def __init__(
        self,
        num_slots: int,
        batch_max_tokens: int,
        chunk: int,
        plans_in_flight: int,
        failing: Collection[int] = (),
        full_chunks: bool = True,
    ):
        self.computed = self.cached = 0
        self.flying: deque[Flying] = deque()
        self.rows: dict[int, WorkerRow] = {}
        self.started: list[int] = []  # sequence ids in the order in which they got a row
        self.idle: set[int] = set()  # sequences that the last plan had tokens for and left out
        self._holds = [0] * num_slots  # by slot: the hash of the ids that it holds
        self._spoiled: set[int] = set()  # slots that a failed step was to write, or that were computed from them
        self._budget = batch_max_tokens
        self._chunk = chunk
        self._plans_in_flight = plans_in_flight
        self._failing = failing
        self._full_chunks = full_chunks
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
        result = self.flying.popleft().result
        if result.failed:  # before, nobody could know
            for slot in self._spoiled:
                self._holds[slot] = 0
        return result

    def _change_rows(self, plan: StepPlan) -> None:
        named = set().union(*(step.rows for step in self.flying))
        for row in unpack(plan.ended, np.int32).tolist():
            assert row not in named, "a row is given up while a step in flight names it"
            del self.rows[row]
        for new in plan.new_rows:
            assert new.row not in self.rows, "a row is in use"
            self.rows[new.row] = self._start(new)
            self.started.append(new.sequence_id)

    def _start(self, new: NewRow) -> WorkerRow:
        ids, slots = unpack(new.token_ids, np.int32).tolist(), unpack(new.cached, np.int32).tolist()
        generated = len(ids) - new.prompt_len
        assert ids[new.prompt_len :] == [token_at(new.sequence_id, index) for index in range(generated)]
        assert len(slots) < len(ids), "the last id is computed in any case"
        prefixes: list[int] = []
        for id, slot in zip(ids, slots):
            prefixes.append(hash((prefixes[-1] if prefixes else 0, id)))
            assert self._holds[slot] == prefixes[-1], "a cached slot holds something else"
        self.cached += len(slots)
        return WorkerRow(new, len(self.started), ids, slots, prefixes, generated)

    def _check_order(self, num_decode: int, rows: list[int], lengths: list[int], full: bool) -> None:
        """Chunks are in the order of arrival, and as long as they can be unless the budget ends."""
        chunks = [self.rows[row] for row in rows[num_decode:]]
        order = [state.order for state in chunks]
        assert order == sorted(order), "a prompt has passed another"
        for i, (state, length) in enumerate(zip(chunks, lengths[num_decode:]), start=1):
            assert length > 0
            whole = length == min(state.known - len(state.slots), self._chunk)
            assert whole or not self._full_chunks or (full and i == len(chunks)), "a chunk is too short"

    def _write(self, rows: list[int], lengths: list[int], slots: list[int]) -> None:
        named = set().union(*(step.slots for step in self.flying), *(state.slots for state in self.rows.values()))
        assert not named & set(slots), "a slot is reused while a row or a step in flight names it"
        assert len(set(slots)) == len(slots), "a slot has two writers"
        taken = iter(slots)
        for row, length in zip(rows, lengths):
            state = self.rows[row]
            for _ in range(length):
                id, slot = state.ids[len(state.slots)], next(taken)
                state.prefixes.append(hash((state.prefixes[-1] if state.prefixes else 0, id)))
                self._holds[slot] = state.prefixes[-1]
                self._spoiled.discard(slot)
                if self._step in self._failing or not self._spoiled.isdisjoint(state.slots):
                    self._spoiled.add(slot)
                state.slots.append(slot)

    def _compute(self, row: int, start: int, length: int, sample: int, decode: bool) -> None:
        state = self.rows[row]
        assert start == len(state.slots) - length, "a position is skipped or computed twice"
        assert decode == (start >= state.known), "decode rows come first, chunks after them"
        assert length == 1 if decode else start + length <= state.known
        self.computed += 0 if decode else length
        assert decode or length <= self._chunk
        assert bool(sample) == state.prompt_computed
        if sample:
            state.ids.append(token_at(state.new.sequence_id, state.sampled))
            state.sampled += 1
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
                and self.rows[row].known == self.rows[row].new.prompt_len
                and sample_of(self.rows[row].new.sequence_id) == 0
                and (end := min(start + length + 1, self.rows[row].new.prompt_len)) > start + 1
            ],
            failed=[],
        )
