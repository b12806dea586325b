"""Scheduler: lets the computed tokens of every sequence catch up with its length, within the pool and a step's budget.

There is no prefill or decode phase. Each plan takes one token of every row that decodes, then chunks of prompts in the
order of arrival. Plans are made ahead: the next one does not wait for the last result, because a decoding row's input
is on the device. What is decided from lengths is therefore decided when a plan is made (`planned`, `sampled`), what
depends on tokens when the result comes (`received`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from lightllm.common.kv_cache_mem_manager.token_pool import TokenPool
from lightllm.server.core.messages import (
    Ended,
    Finish,
    GenerateRequest,
    Load,
    NewRow,
    NewSequence,
    StepPlan,
    StepResult,
    StopRequest,
    TokenBatch,
    pack,
    unpack,
)
from lightllm.server.router.admission import AdmissionPolicy, Conservative, Demand, prompt_plans
from lightllm.server.router.output import Output
from lightllm.server.router.request import WAITING, Request

PROMPT_TAIL = 16  # prompt ids that the detokenizer gets as context
MIN_STOP_IDS = 4  # columns of the table of stop ids; it widens when a request brings more


class Scheduler:
    """Owns the KV slots and the rows. Not thread-safe; makes no system call."""

    def __init__(
        self,
        max_total_token_num: int,
        running_max_req_size: int,
        batch_max_tokens: int,
        chunked_prefill_size: int,
        max_queue: int,
        max_req_total_len: int,
        plans_in_flight: int = 2,
    ):
        # Every decoding row has its token in every plan, so there are no more rows than tokens.
        rows = min(running_max_req_size, batch_max_tokens)
        self.pool = TokenPool(max_total_token_num)
        self.in_flight = 0
        self._policy: AdmissionPolicy = Conservative(max_total_token_num, late=plans_in_flight - 1)
        self._plans_in_flight = plans_in_flight
        self._batch_max_tokens = batch_max_tokens
        self._chunk = min(chunked_prefill_size, batch_max_tokens)
        self._max_queue = max_queue
        self._max_req_total_len = max_req_total_len

        self._requests: dict[int, Request] = {}  # by sequence id: waiting and running
        self._waiting: OrderedDict[int, Request] = OrderedDict()  # by sequence id, in the order of arrival
        self._prefilling: dict[int, Request] = {}  # by row, in the order of admission
        self._at_row: dict[int, Request] = {}
        self._watched: dict[int, Request] = {}  # rows with token sequences that stop them
        self._free_rows = list(range(rows - 1, -1, -1))
        self._leaving: list[int] = []  # ended rows that a step in flight may still name
        self._output = Output()
        self._new_rows: dict[int, NewRow] = {}  # by row, for the next plan
        self._ended_rows: list[int] = []
        self._step = 0  # the last plan made
        self._completed = 0  # the last plan whose result has come

        # Columns, one entry per row.
        self._sequence_ids = np.zeros(rows, np.int64)
        self._alive = np.zeros(rows, bool)
        self._prompt_len = np.zeros(rows, np.int64)
        self._limit = np.zeros(rows, np.int64)  # output tokens at most
        self._min_new = np.zeros(rows, np.int64)
        self._planned = np.zeros(rows, np.int64)  # positions computed or in flight: the slots held
        self._sampled = np.zeros(rows, np.int64)  # output tokens sampled or in flight
        self._received = np.zeros(rows, np.int64)  # output tokens whose ids are known here
        self._last_step = np.zeros(rows, np.int64)  # the last plan that names the row
        self._stop_ids = np.full((rows, MIN_STOP_IDS), -1, np.int32)
        self._slots = np.empty((rows, min(max_req_total_len, max_total_token_num)), np.int32)  # by position

    # ---- what comes in

    def add(self, request: GenerateRequest) -> None:
        """Queues the sequences of a request, or ends them at once: 400 can never fit, 429 the queue is full."""
        sequences = Request.sequences_of(request)
        if refusal := self._refusal(sequences):
            status, reason = refusal
            for sequence in sequences:
                self._output.ended.append(Ended(sequence.sequence_id, Finish.ERROR, status, reason))
            return
        for sequence in sequences:
            self._requests[sequence.sequence_id] = sequence
            self._waiting[sequence.sequence_id] = sequence
            tail = sequence.prompt_ids[-4 * PROMPT_TAIL :]
            self._output.new.append(NewSequence(sequence.sequence_id, tail, sequence.sampling))

    def _refusal(self, sequences: list[Request]) -> tuple[int, str] | None:
        first = sequences[0]
        total = first.prompt_len + first.limit
        what = f"{first.prompt_len} prompt tokens and max_new_tokens {first.limit}"
        if total > self._max_req_total_len:
            return 400, f"max_new_tokens: {what} exceed the limit of {self._max_req_total_len} tokens of one request"
        if total - 1 > self.pool.size:
            return 400, f"max_new_tokens: {what} exceed the KV cache of {self.pool.size} tokens"
        if self._queue_is_full(len(sequences)):
            self._admit()  # what can run now does not wait
            if self._queue_is_full(len(sequences)):
                waiting = len(self._waiting)
                return 429, f"{waiting} sequences are waiting; the queue holds {self._max_queue} (--max_queue)"
        return None

    def _queue_is_full(self, arriving: int) -> bool:
        # Where nothing waits, a request is taken whatever its n: later it would be refused as well.
        return bool(self._waiting) and len(self._waiting) + arriving > self._max_queue

    def abort(self, request_id: int) -> None:
        """Ends all sequences of a request; nothing happens if they have ended."""
        for sample in range(8):
            if request := self._requests.get(request_id | sample):
                self._drop(request)
                self._output.ended.append(Ended(request.sequence_id, Finish.ABORT, 0, "the client has gone"))
        if not self.in_flight:
            self._release()

    def stop(self, stop: StopRequest) -> None:
        """Ends a sequence whose last text the detokenizer has already sent."""
        if request := self._requests.get(stop.sequence_id):
            self._drop(request)
        if not self.in_flight:
            self._release()

    def update(self, result: StepResult) -> None:
        """Takes the result of the oldest plan in flight."""
        assert result.step == self._completed + 1, f"result of step {result.step} after step {self._completed}"
        self._completed = result.step
        self.in_flight -= 1
        for row, reason in result.failed:
            if self._alive[row]:
                request = self._at_row[row]
                self._drop(request)
                self._output.ended.append(Ended(request.sequence_id, Finish.ERROR, 500, reason))
        self._output.add_prompt(result.prompt, self._alive, self._sequence_ids)
        rows, tokens = unpack(result.rows, np.int32), unpack(result.tokens, np.int32)
        alive = self._alive[rows]
        finishes = self._receive(rows[alive], tokens[alive])
        self._output.add_tokens(result, alive, self._sequence_ids[rows], finishes)
        for row in rows[alive][finishes != Finish.NONE].tolist():
            self._drop(self._at_row[row])
        self._release()

    def _receive(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Counts one more output token on each row; gives what each row finishes with, uint8 [rows]."""
        self._received[rows] += 1
        received = self._received[rows]
        stopped = (self._stop_ids[rows] == tokens[:, None]).any(axis=1)
        if self._watched:
            for at, row in enumerate(rows.tolist()):
                if request := self._watched.get(row):
                    stopped[at] |= request.stops_with(int(tokens[at]))
        finishes = np.where(received >= self._limit[rows], Finish.LENGTH, Finish.NONE).astype(np.uint8)
        finishes[stopped & (received >= self._min_new[rows])] = Finish.STOP
        return finishes

    # ---- what goes out

    def schedule(self) -> StepPlan | None:
        """The next plan; None while enough plans are in flight or nothing can be computed."""
        if self.in_flight >= self._plans_in_flight:
            return None
        self._admit()
        decoding = np.flatnonzero(self._alive & (self._planned >= self._prompt_len) & (self._sampled < self._limit))
        chunk_rows, chunk_lengths = self._chunks(self._batch_max_tokens - len(decoding))
        rows = np.concatenate((decoding, np.array(chunk_rows, np.int64)))
        if len(rows) == 0:
            return None
        lengths = np.ones(len(rows), np.int64)
        lengths[len(decoding) :] = chunk_lengths
        starts = self._planned[rows]
        slots = self._take_slots(rows, starts, lengths)
        self._planned[rows] += lengths
        samples = self._planned[rows] >= self._prompt_len[rows]
        self._sampled[rows] += samples
        for row in rows[len(decoding) :][samples[len(decoding) :]].tolist():
            del self._prefilling[row]
        self._step += 1
        self._last_step[rows] = self._step
        self.in_flight += 1
        plan = StepPlan(
            step=self._step,
            num_decode=len(decoding),
            rows=pack(rows, np.int32),
            starts=pack(starts, np.int32),
            lengths=pack(lengths, np.int32),
            samples=pack(samples, np.uint8),
            slots=slots.tobytes(),
            ended=pack(self._ended_rows, np.int32),
            new_rows=list(self._new_rows.values()),
        )
        self._ended_rows, self._new_rows = [], {}
        return plan

    def take_output(self) -> TokenBatch | None:
        """Everything for the detokenizer since the last call; None if there is nothing."""
        return self._output.take()

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._requests)

    def load(self) -> Load:
        return Load(
            used_tokens=self.pool.size - self.pool.free_count,
            predicted_peak=self._policy.peak(self._demand()),
            running=len(self._at_row),
            waiting=len(self._waiting),
        )

    # ---- inside

    def _admit(self) -> None:
        """Moves sequences from the head of the queue to rows as long as the future peak fits."""
        self._release()
        for _ in range(self._admissible()):
            _, request = self._waiting.popitem(last=False)
            row = request.row = self._free_rows.pop()
            self._at_row[row] = self._prefilling[row] = request
            if request.stops:
                self._watched[row] = request
            self._sequence_ids[row] = request.sequence_id
            self._alive[row] = True
            self._prompt_len[row] = request.prompt_len
            self._limit[row] = request.limit
            self._min_new[row] = request.sampling.min_new_tokens
            self._planned[row] = self._sampled[row] = self._received[row] = 0
            self._set_stop_ids(row, request.sampling.stop_token_ids)
            self._new_rows[row] = NewRow(
                row, request.sequence_id, request.prompt_ids, request.prompt_len, request.sampling
            )

    def _admissible(self) -> int:
        """How many from the head of the queue fit. One more never lowers the peak, so few counts need a look."""
        head = list(islice(self._waiting.values(), len(self._free_rows)))

        def too_many(count: int) -> bool:
            return count > len(head) or not self._policy.admits(self._demand(head[:count]))

        if not head or too_many(1):
            return 0
        fits = 1
        while not too_many(2 * fits):
            fits *= 2
        return bisect_left(range(2 * fits), True, lo=fits + 1, key=too_many) - 1

    def _set_stop_ids(self, row: int, ids: list[int]) -> None:
        missing = len(ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_ids[row] = -1
        self._stop_ids[row, : len(ids)] = ids

    def _demand(self, candidates: Sequence[Request] = ()) -> Demand:
        """What the running rows, those leaving, and the candidates hold and will hold."""
        prefilling = list(self._prefilling)
        asked = np.array([(candidate.prompt_len, candidate.limit - 1) for candidate in candidates], np.int64)
        asked_prompt, asked_growth = asked.reshape(-1, 2).T
        settled = self._alive.copy()
        settled[prefilling] = False
        decoding = np.flatnonzero(settled)
        leaving = self._planned[self._leaving]
        growing = self._limit[decoding] - self._sampled[decoding]
        remaining = np.concatenate((self._prompt_len[prefilling] - self._planned[prefilling], asked_prompt))
        rows = len(self._at_row) + len(candidates)
        earliest, latest = prompt_plans(remaining, self._chunk, self._batch_max_tokens, rows)
        now = np.zeros(len(decoding) + len(leaving), np.int64)
        return Demand(
            held=np.concatenate((self._planned[decoding], leaving, self._prompt_len[prefilling], asked_prompt)),
            growth=np.concatenate((growing, np.zeros_like(leaving), self._limit[prefilling] - 1, asked_growth)),
            earliest=np.concatenate((now, earliest)),
            latest=np.concatenate((now, latest)),
        )

    def _chunks(self, budget: int) -> tuple[list[int], list[int]]:
        """Rows and lengths of the prompt chunks of one plan, first admitted first."""
        rows, lengths = [], []
        for row, request in self._prefilling.items():
            if budget == 0:
                break
            length = min(request.prompt_len - int(self._planned[row]), self._chunk, budget)
            rows.append(row)
            lengths.append(length)
            budget -= length
        return rows, lengths

    def _take_slots(self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        slots = self.pool.alloc(int(lengths.sum()))
        assert slots is not None, "admission let the KV pool run out"
        token_rows = np.repeat(rows, lengths)
        offsets = np.arange(len(slots)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self._slots[token_rows, np.repeat(starts, lengths) + offsets] = slots
        return slots

    def _drop(self, request: Request) -> None:
        """Forgets a sequence that has ended; its row and slots are free once no step in flight names them."""
        del self._requests[request.sequence_id]
        if request.row == WAITING:
            del self._waiting[request.sequence_id]
            return
        del self._at_row[request.row]
        self._watched.pop(request.row, None)
        self._prefilling.pop(request.row, None)
        self._alive[request.row] = False
        self._leaving.append(request.row)

    def _release(self) -> None:
        """Frees the rows of ended sequences, and their slots, that no step in flight names."""
        if not self._leaving:
            return
        leaving = np.array(self._leaving)
        named = self._last_step[leaving] > self._completed
        self._leaving = leaving[named].tolist()
        free = leaving[~named].tolist()
        if free:
            self.pool.free(np.concatenate([self._slots[row, : self._planned[row]] for row in free]))
        for row in free:
            self._free_rows.append(row)
            if not self._new_rows.pop(row, None):  # else the worker was never told of it
                self._ended_rows.append(row)

    def check_invariants(self) -> None:
        """Raises AssertionError unless every slot is free or held by exactly one row, and every row is free or used."""
        held = [self._slots[row, : self._planned[row]] for row in (*self._at_row, *self._leaving)]
        taken = np.concatenate(held) if held else np.empty(0, np.int32)
        assert len(np.unique(taken)) == len(taken), "a slot has two owners"
        assert self.pool.free_count + len(taken) == self.pool.size, "slots were lost"
        rows = sorted((*self._free_rows, *self._at_row, *self._leaving))
        assert rows == list(range(len(self._alive))), "rows were lost"
        assert len(self._requests) == len(self._at_row) + len(self._waiting), (
            "a sequence is neither waiting nor running"
        )
