"""Scheduler: lets the computed tokens of every sequence catch up with its length, within the pool and a step's budget.

There is no prefill or decode phase. Each plan takes one token of every row that decodes, then chunks of prompts in the
order of admission. Plans are made ahead: the next one does not wait for the last result, because a decoding row's input
is on the device. What is decided from lengths is therefore decided when a plan is made (`planned`, `sampled`), what
depends on tokens when the result comes (`received`).
"""

from collections import Counter, deque

import numpy as np

from lightllm.common.kv_cache_mem_manager.radix_cache import RadixCache
from lightllm.common.kv_cache_mem_manager.token_pool import TokenPool
from lightllm.server.core.messages import (
    Ended,
    EngineInfo,
    Finish,
    GenerateRequest,
    Load,
    NewRow,
    NewSequence,
    Started,
    StepPlan,
    StepResult,
    StopRequest,
    TokenBatch,
    pack,
    unpack,
)
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router.admission import POLICIES, AdmissionPolicy
from lightllm.server.router.candidates import Candidate, Candidates
from lightllm.server.router.output import Output
from lightllm.server.router.pace import Pace
from lightllm.server.router.request import WAITING, Request
from lightllm.server.router.row_table import RowTable
from lightllm.server.router.step_limits import StepLimits
from lightllm.server.router.waiting_queue import WaitingQueue

PROMPT_TAIL = 16  # prompt ids that the detokenizer gets as context
SHORT_STEP = 1.5e-3  # seconds of the device, which would wait for the host if two plans were in flight


class Scheduler:
    """Owns the KV slots and the rows. Not thread-safe; makes no system call: `now` is seconds of the caller's clock."""

    def __init__(
        self,
        args: ServerArgs,
        engine: EngineInfo,
        plans_in_flight: int,
        policy: AdmissionPolicy | None = None,
        plans_of_short_steps: int = 0,
    ):
        """policy: instead of the one that `args` name. plans_of_short_steps: as many are in flight, if that is more,
        while the device needs less than SHORT_STEP for one."""
        self.pool = TokenPool(engine.max_total_token_num)
        make_policy = POLICIES[args.schedule_policy]
        most_in_flight = max(plans_in_flight, plans_of_short_steps)
        self._policy = policy or make_policy(engine.max_total_token_num, most_in_flight - 1)
        self._plans_in_flight, self._most_in_flight = plans_in_flight, most_in_flight
        self._steps_are_short = False
        self._max_queue = args.max_queue
        self._max_req_total_len = engine.max_req_total_len
        self._prompt_cache = engine.prefix_reusable and not args.disable_dynamic_prompt_cache
        self._ttft_slo = args.ttft_slo

        self._requests: dict[int, Request] = {}  # by sequence id: waiting and running
        self._queue = WaitingQueue(args.fair_share)
        # Every decoding row has its token in every plan, so there are no more rows than tokens.
        self._rows = RowTable(
            num_rows=min(engine.running_max_req_size, args.batch_max_tokens),
            max_len=engine.limits().max_total_tokens,
            pool=self.pool,
            cache=RadixCache(self.pool),
            hint_width=self._policy.hint_width,
        )
        self._watched: dict[int, Request] = {}  # rows with token sequences that stop them
        self._pace = Pace(args.batch_max_tokens, args.tpot_slo)
        self._candidates = Candidates(self._queue, self._rows, StepLimits.of(args, engine))
        self._output = Output()
        self._new_rows: dict[int, NewRow] = {}  # by row, for the next plan
        self._step = 0  # the last plan made
        self._completed = 0  # the last plan whose result has come
        self._flying: deque[tuple[float, int, int]] = deque()  # plans in flight: launch, prompt tokens, decoding rows
        self._last_result = 0.0
        self._arrivals = 0
        self._looked_early: tuple[int, int, int] | None = None  # at which `_events` who fits got a row
        self._used_peak = 0
        self._totals: Counter[str] = Counter()
        self._device_seconds = 0.0

    @property
    def limits(self) -> StepLimits:
        """Of the steps to come; may be changed between plans."""
        return self._candidates.limits

    @limits.setter
    def limits(self, limits: StepLimits) -> None:
        self._candidates.limits = limits

    # ---- what comes in

    def add(self, request: GenerateRequest, now: float = 0.0) -> None:
        """Queues the sequences of a request, or ends them at once: 400 can never fit, 429 the queue is full."""
        sequences = Request.sequences_of(request, self._arrivals, self._prompt_cache)
        if refusal := self._refusal(sequences, now):
            self.refuse(request, *refusal)
            return
        self._arrivals += len(sequences)
        for sequence in sequences:
            sequence.hint = self._policy.hint(sequence)
            if self._ttft_slo is not None:
                sequence.due = now + self._ttft_slo - self._prompt_time(sequence)
            self._requests[sequence.sequence_id] = sequence
            self._queue.add(sequence)
            tail = sequence.ids[-PROMPT_TAIL:].tobytes()
            self._output.new.append(NewSequence(sequence.sequence_id, tail, sequence.sampling))

    def refuse(self, request: GenerateRequest, status: int, reason: str) -> None:
        """Ends the sequences of a request that is not queued."""
        for sample in range(request.sampling.n or 1):
            self._output.ended.append(Ended(request.id | sample, Finish.ERROR, status, reason))

    def _refusal(self, sequences: list[Request], now: float) -> tuple[int, str] | None:
        first = sequences[0]
        total = first.prompt_len + first.limit
        what = f"{first.prompt_len} prompt tokens and max_new_tokens {first.limit}"
        if total > self._max_req_total_len:
            return 400, f"max_new_tokens: {what} exceed the limit of {self._max_req_total_len} tokens of one request"
        if total - 1 > self.pool.size:
            return 400, f"max_new_tokens: {what} exceed the KV cache of {self.pool.size} tokens"
        if self._queue_is_full(len(sequences)):
            if self._looked_early != self._events:
                self._admit(now, early=True)  # who fits does not wait in the queue
                self._looked_early = self._events
            if self._queue_is_full(len(sequences)):
                return 429, f"{len(self._queue)} sequences are waiting; the queue holds {self._max_queue} (--max_queue)"
        if self._ttft_slo is not None and len(self._queue):
            wait = self._pace.queue_time(len(self._queue)) + self._prompt_time(first)
            if wait > self._ttft_slo:
                return 429, f"the first token would come in {wait:.1f} s, later than {self._ttft_slo:g} s (--ttft_slo)"
        return None

    @property
    def _events(self) -> tuple[int, int, int]:
        """Another as soon as a result has come, or a sequence has come or ended."""
        return self._completed, self._arrivals, len(self._requests)

    def _prompt_time(self, request: Request) -> float:
        """Seconds to compute what the cache does not know of its prompt."""
        return self._pace.prompt_time(len(request.ids) - self._candidates.match(request).cached)

    def _queue_is_full(self, arriving: int) -> bool:
        # Where nothing waits, a request is taken whatever its n: later it would be refused as well.
        return bool(self._queue) and len(self._queue) + arriving > self._max_queue

    def abort(self, request_id: int) -> None:
        """Ends all sequences of a request; nothing happens if they have ended."""
        for sample in range(8):
            if request := self._requests.get(request_id | sample):
                self._drop(request)
                self._output.ended.append(Ended(request.sequence_id, Finish.ABORT, 0, "the client has gone"))
        if not self._flying:
            self._rows.release(self._completed)

    def stop(self, stop: StopRequest) -> None:
        """Ends a sequence whose last text the detokenizer has already sent."""
        if request := self._requests.get(stop.sequence_id):
            self._count_end(request, stop.kept)
            self._drop(request)
        if not self._flying:
            self._rows.release(self._completed)

    def update(self, result: StepResult, now: float = 0.0) -> None:
        """Takes the result of the oldest plan in flight."""
        assert result.step == self._completed + 1, f"result of step {result.step} after step {self._completed}"
        rows = self._rows
        self._completed = result.step
        launched, prompt_tokens, decoding = self._flying.popleft()
        self._pace.step_took(now - max(launched, self._last_result), prompt_tokens, decoding)
        self._last_result = now
        self._device_seconds += result.device_seconds
        self._steps_are_short = 0 < result.device_seconds < SHORT_STEP
        self._fail(result)
        self._output.add_prompt(result.prompt, rows.alive, rows.sequence_ids)
        sampled, tokens = unpack(result.rows, np.int32), unpack(result.tokens, np.int32)
        alive = rows.alive[sampled]
        running = sampled[alive]
        finishes = self._receive(running, tokens[alive])
        self._output.add_tokens(result, alive, rows.sequence_ids[sampled], finishes, now)
        for row in running[finishes != Finish.NONE].tolist():
            self._count_end(rows.at[row], int(rows.received[row]))
            self._drop(rows.at[row])
        for row in (rows.pausing & (rows.last_step <= self._completed)).nonzero()[0].tolist():
            self._pause(row)
        rows.release(self._completed)

    def _fail(self, result: StepResult) -> None:
        """Ends the rows that failed or are refused, and those that were to read from the cache what is not there."""
        reasons = dict(result.failed)
        spoilt = self._rows.cache.finish(result.step, set(reasons))
        if not (result.failed or result.refused):
            return
        for row in spoilt - set(reasons):
            reasons[row] = f"a prefix shared with another request failed: {result.failed[0][1]}"
        self._rows.spoil(list(reasons))
        for status, rows in ((500, reasons), (400, dict(result.refused))):
            for row, reason in rows.items():
                if request := self._rows.at.get(row):
                    self._drop(request)
                    self._output.ended.append(Ended(request.sequence_id, Finish.ERROR, status, reason))

    def _receive(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Counts one more output token on each row; gives what each row finishes with, uint8 [rows]."""
        table = self._rows
        received = table.receive(rows, tokens)
        self._totals["output_tokens_total"] += len(rows)
        for row in rows.tolist() if self._queue.fair else ():
            self._queue.served(table.at[row], output_tokens=1)
        stopped = (table.stop_ids[rows] == tokens[:, None]).any(axis=1)
        if self._watched:
            for at, row in enumerate(rows.tolist()):
                if request := self._watched.get(row):
                    stopped[at] |= request.stops_with(int(tokens[at]))
        finishes = np.zeros(len(rows), np.uint8)
        finishes[received >= table.limit[rows]] = Finish.LENGTH
        finishes[stopped & (received >= table.min_new[rows])] = Finish.STOP
        return finishes

    # ---- what goes out

    @property
    def oldest_launch(self) -> float | None:
        """When the oldest plan in flight was made; None if there is none."""
        return self._flying[0][0] if self._flying else None

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next plan; None while enough plans are in flight or nothing can be computed."""
        if len(self._flying) >= (self._most_in_flight if self._steps_are_short else self._plans_in_flight):
            return None
        self._admit(now)
        decoding, chunk_rows, chunk_lengths = self._tokens_of_step()
        while not (len(decoding) or chunk_rows):
            if self._flying or not self._make_room(1):
                return None
            decoding, chunk_rows, chunk_lengths = self._tokens_of_step()
        table = self._rows
        self._step += 1
        rows = np.concatenate((decoding, np.array(chunk_rows, np.int64)))
        lengths = np.ones(len(rows), np.int64)
        lengths[len(decoding) :] = chunk_lengths
        starts = table.planned[rows]
        slots = table.take_slots(rows, starts, lengths, len(decoding))
        table.extend_tree(chunk_rows, self._step)
        samples = table.planned[rows] >= table.known[rows]
        table.sampled[rows] += samples
        for row in rows[len(decoding) :][samples[len(decoding) :]].tolist():
            del table.prefilling[row]
        table.last_step[rows] = self._step
        self._flying.append((now, sum(chunk_lengths), len(decoding)))
        plan = StepPlan(
            step=self._step,
            num_decode=len(decoding),
            rows=pack(rows, np.int32),
            starts=pack(starts, np.int32),
            lengths=pack(lengths, np.int32),
            samples=pack(samples, np.uint8),
            slots=slots.tobytes(),
            ended=pack(table.ended, np.int32),
            new_rows=list(self._new_rows.values()),
        )
        table.told(self._new_rows)
        table.ended, self._new_rows = [], {}
        self._used_peak = max(self._used_peak, self.used_tokens)
        return plan

    def take_output(self) -> TokenBatch | None:
        """Everything for the detokenizer since the last call; None if there is nothing."""
        return self._output.take()

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._requests)

    def grammars(self) -> set[str]:
        """Of all sequences that have not ended."""
        return {request.sampling.guided_grammar or "" for request in self._requests.values()}

    @property
    def used_tokens(self) -> int:
        """KV slots that sequences hold."""
        return self.pool.size - self._rows.available

    def load(self) -> Load:
        running = len(self._rows.at)
        return Load(
            used_tokens=self.used_tokens,
            cached_tokens=self._rows.cache.evictable,
            used_peak=self._used_peak,
            predicted_peak=self._policy.peak(self._candidates.demand()),
            running=running,
            waiting=len(self._requests) - running,
            paused=sum(request.paused for request in self._requests.values() if request.row == WAITING),
            **self._totals,
            device_seconds_total=self._device_seconds,
            steps_total=self._completed,
        )

    # ---- admission

    def _admit(self, now: float, early: bool = False) -> None:
        """Moves sequences from the queue to rows as long as the future peak fits, and their prompts into the next steps
        unless `early`."""
        self._rows.release(self._completed)
        if not self._rows.at:
            self._used_peak = 0
        for late in self._queue.overdue(now):
            self._drop(late)
            reason = f"no first token was possible within {self._ttft_slo:g} s (--ttft_slo)"
            self._output.ended.append(Ended(late.sequence_id, Finish.ERROR, 429, reason))
        if not len(self._queue) or not self._rows.free_count:
            return
        admitted = self._candidates.admissible(self._policy, early)
        for candidate in admitted:
            self._start(candidate, now)
        if admitted:
            self._pace.admitted(len(admitted), now, queued=bool(len(self._queue)))

    def _start(self, candidate: Candidate, now: float) -> None:
        request = candidate.request
        self._queue.remove(request)
        row = self._rows.start(request, candidate.node, candidate.cached)
        self._new_rows[row] = NewRow(
            row=row,
            sequence_id=request.sequence_id,
            token_ids=request.ids.tobytes(),
            prompt_len=request.prompt_len,
            sampling=request.sampling,
            cached=self._rows.cached_slots(row),
        )
        if request.stops:
            self._watched[row] = request
        self._queue.served(request, prompt_tokens=len(request.ids) - candidate.cached)
        if request.paused:
            request.paused = False
            return
        self._policy.admitted(request)
        self._totals["admitted_total"] += 1
        self._totals["prompt_tokens_total"] += request.prompt_len
        self._totals["cached_prompt_tokens_total"] += candidate.cached
        self._output.started.append(Started(request.sequence_id, candidate.cached, now))

    # ---- room for a step

    def _tokens_of_step(self) -> tuple[np.ndarray, list[int], list[int]]:
        """The rows that decode; rows and lengths of prompt chunks, first admitted first."""
        table = self._rows
        ready = table.alive & ~table.pausing & (table.planned >= table.known) & (table.sampled < table.limit)
        decoding = ready.nonzero()[0]
        if len(decoding) > table.available:
            self._make_room(len(decoding))
            decoding = decoding[~table.pausing[decoding] & table.alive[decoding]]
            oldest = np.argsort(table.arrival[decoding], kind="stable")[: table.available]
            decoding = decoding[np.sort(oldest)]
        limits = self.limits
        budget, chunk = min(limits.total, table.available) - len(decoding), limits.chunk
        if len(decoding):
            budget = min(budget, limits.beside(len(decoding)), self._pace.prompt_tokens)
            chunk = limits.mixed_chunk
        rows, lengths = [], []
        for row in table.prefilling:
            if budget <= 0:
                break
            if table.pausing[row]:
                continue
            length = min(int(table.known[row] - table.planned[row]), chunk, budget)
            rows.append(row)
            lengths.append(length)
            budget -= length
        return decoding, rows, lengths

    def _make_room(self, needed: int) -> bool:
        """Pauses rows until the slots that are free or will soon be suffice; whether any was paused."""
        table = self._rows
        paused = False
        while table.available + table.promised < needed and (row := table.best_to_pause()) is not None:
            paused = True
            if table.last_step[row] > self._completed:
                table.pausing[row] = True
            else:
                self._pause(row)
                table.release(self._completed)
        return paused

    def _pause(self, row: int) -> None:
        """Sends a row that no step in flight names back to the queue; what it has computed stays in the cache."""
        table = self._rows
        request = table.at[row]
        request.generated = int(table.received[row])
        request.ids = table.ids(row, 0, request.prompt_len + request.generated).copy()
        request.paused = True
        self._totals["pauses_total"] += 1
        self._leave(request)
        self._queue.add(request)

    # ---- ends

    def _count_end(self, request: Request, output_tokens: int) -> None:
        """A sequence comes to its natural end."""
        self._policy.ended(request, output_tokens)
        self._totals["ended_output_tokens_total"] += output_tokens
        self._totals["predicted_output_tokens_total"] += request.expected

    def _drop(self, request: Request) -> None:
        """Forgets a sequence that has ended; its row and slots are free once no step in flight names them."""
        del self._requests[request.sequence_id]
        if request.row == WAITING:
            self._queue.remove(request)
        else:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        row = request.row
        self._watched.pop(row, None)
        self._new_rows.pop(row, None)
        self._rows.leave(request)
