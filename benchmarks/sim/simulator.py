"""A discrete-event simulation of the server around its own Scheduler; the GPU is a model of its time."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from sim.traces import EOS, VOCAB, WORD, SimulatedRequest

from lightllm.server.core.messages import Finish, GenerateRequest, Load, StepPlan, StepResult, pack, unpack
from lightllm.server.core.sampling_params import RequestLimits, SamplingParams
from lightllm.server.router.admission import Conservative
from lightllm.server.router.demand import Demand, future_peak
from lightllm.server.router.request import Request
from lightllm.server.router.scheduler import Scheduler

LIMITS = RequestLimits(max_total_tokens=10**6, vocab_size=VOCAB)
TTFT_SLO, GAP_SLO = 10.0, 1.5  # seconds: to the first token, and between two at most


class StepModel(NamedTuple):
    """Seconds that a step takes; the defaults are an 8B model's on one GPU."""

    base: float = 3.5e-3
    per_row: float = 8e-6
    per_kv_token: float = 0.029e-6
    per_prompt_token: float = 1 / 45_000
    mixed: float = 0.0  # more, whatever their number, if there are prompt tokens

    def seconds(self, decoding: int, kv_tokens: int, prompt_tokens: int) -> float:
        rows = self.base + self.per_row * decoding + self.per_kv_token * kv_tokens
        return rows + self.per_prompt_token * prompt_tokens + self.mixed * (prompt_tokens > 0)


class Oracle(Conservative):
    """Knows the true lengths: what any admission could reach without pausing."""

    hint_width = 1

    def __init__(self, pool_size: int, late: int, outputs: dict[int, int]):
        super().__init__(pool_size, late)
        self._outputs = outputs  # by sequence id

    def hint(self, request: Request) -> np.ndarray:
        return np.array([self._outputs[request.sequence_id]], float)

    def peak(self, demand: Demand) -> int:
        lengths = demand.hints[:, 0].astype(np.int64)
        return future_peak(demand._replace(growth=demand.if_outputs_are(lengths, self._late)), self._late)


class Reserved(Conservative):
    """Keeps room for every request at its full length at once, as servers do that know no future peak."""

    def peak(self, demand: Demand) -> int:
        return demand.now + int(demand.growth.sum())


@dataclass(frozen=True)
class Outcome:
    """goodput: output tokens per second of the requests that met both times. attainment: their share.

    paused_share: pauses per request. memory_use: time average of held rows / pool. p99_tbt_s: between tokens.
    """

    goodput: float
    attainment: float
    paused_share: float
    memory_use: float
    p99_tbt_s: float
    refused: int
    seconds: float
    load: Load


class Simulation:
    """Runs requests through a scheduler with two plans in flight, as the server does."""

    def __init__(self, scheduler: Scheduler, model: StepModel, outputs: dict[int, int]):
        self._scheduler = scheduler
        self._model = model
        self._outputs = outputs
        self._requests: list[SimulatedRequest] = []
        self._arrivals: list[tuple[float, int]] = []  # heap: time, request
        self._flying: deque[tuple[float, StepPlan]] = deque()  # time of the result
        self._busy_until = 0.0
        self._sequence_at: dict[int, int] = {}  # request by row
        self._count: list[int] = []  # output tokens, by request
        self._first: list[float] = []  # time of the first token
        self._last: list[float] = []
        self._longest_gap: list[float] = []
        self._ended: list[bool] = []
        self._gaps: list[np.ndarray] = []
        self._held_seconds = 0.0
        self._refused = 0

    def run(self, requests: Sequence[SimulatedRequest]) -> Outcome:
        for request in requests:
            self._arrive(request, request.arrival)
        now = 0.0
        while self._arrivals or self._flying:
            now, plan = self._next()
            if plan is None:
                self._add(heapq.heappop(self._arrivals)[1], now)
            else:
                self._scheduler.update(self._result(plan, now), now)
            while plan := self._scheduler.schedule(now):
                self._launch(plan, now)
            self._read(now)
        assert not self._scheduler.has_work and self._scheduler.used_tokens == 0, "slots were lost"
        return self._outcome(now)

    def _next(self) -> tuple[float, StepPlan | None]:
        """When something happens next, and the plan whose result comes then; None: a request arrives."""
        if self._arrivals and (not self._flying or self._arrivals[0][0] <= self._flying[0][0]):
            return self._arrivals[0][0], None
        return self._flying.popleft()

    def _arrive(self, request: SimulatedRequest, at: float) -> None:
        index = len(self._requests)
        self._requests.append(request)
        self._count.append(0)
        self._ended.append(False)
        for column in (self._first, self._last, self._longest_gap):
            column.append(0.0)
        self._outputs[(index + 1) << 3] = request.output
        heapq.heappush(self._arrivals, (at, index))

    def _add(self, index: int, now: float) -> None:
        request = self._requests[index]
        self._requests[index].arrival = now
        asked = SamplingParams(do_sample=False, max_new_tokens=request.limit, stop_token_ids=[EOS])
        sampling = asked.resolve(LIMITS, len(request.prompt))
        ids = pack(request.prompt, np.int32)
        self._scheduler.add(GenerateRequest((index + 1) << 3, ids, sampling, open_ended=False), now)

    def _launch(self, plan: StepPlan, now: float) -> None:
        for new in plan.new_rows:
            self._sequence_at[new.row] = (new.sequence_id >> 3) - 1
        starts, lengths = unpack(plan.starts, np.int32), unpack(plan.lengths, np.int32)
        kv_tokens = int(starts[: plan.num_decode].sum()) + plan.num_decode
        seconds = self._model.seconds(plan.num_decode, kv_tokens, int(lengths[plan.num_decode :].sum()))
        self._busy_until = max(now, self._busy_until) + seconds
        self._hold(seconds)
        self._flying.append((self._busy_until, plan))

    def _hold(self, seconds: float) -> None:
        """What is held now was held for so long."""
        self._held_seconds += seconds * self._scheduler.used_tokens / self._scheduler.pool.size

    def _result(self, plan: StepPlan, now: float) -> StepResult:
        rows = unpack(plan.rows, np.int32)[unpack(plan.samples, np.uint8) == 1]
        tokens = np.full(len(rows), WORD, np.int32)
        gaps = []
        for i, row in enumerate(rows.tolist()):
            index = self._sequence_at[row]
            if self._ended[index]:
                continue
            self._count[index] += 1
            if self._count[index] == 1:
                self._first[index] = now
            else:
                gap = now - self._last[index]
                gaps.append(gap)
                if gap > self._longest_gap[index]:
                    self._longest_gap[index] = gap
            self._last[index] = now
            if self._count[index] == self._requests[index].output:
                tokens[i] = EOS
                self._ended[index] = True
        self._gaps.append(np.array(gaps))
        return StepResult(plan.step, rows.tobytes(), tokens.tobytes(), bytes(4 * len(rows)), [], [], [])

    def _read(self, now: float) -> None:
        batch = self._scheduler.take_output()
        if batch is None:
            return
        self._refused += len(batch.ended)
        for sequence_id, finish in zip(unpack(batch.sequence_ids, np.int64).tolist(), batch.finishes):
            if finish != Finish.NONE:
                request = self._requests[(sequence_id >> 3) - 1]
                if request.follow_up:
                    self._arrive(request.follow_up.with_history(request), now + request.follow_up.arrival)

    def _outcome(self, end: float) -> Outcome:
        met = [
            ended and first - request.arrival <= TTFT_SLO and gap <= GAP_SLO
            for request, ended, first, gap in zip(self._requests, self._ended, self._first, self._longest_gap)
        ]
        good = sum(request.output for request, ok in zip(self._requests, met) if ok)
        load = self._scheduler.load()
        seconds = end - min(request.arrival for request in self._requests)
        return Outcome(
            goodput=good / seconds,
            attainment=sum(met) / len(met),
            paused_share=load.pauses_total / len(met),
            memory_use=self._held_seconds / seconds,
            p99_tbt_s=float(np.quantile(np.concatenate(self._gaps), 0.99)),
            refused=self._refused,
            seconds=seconds,
            load=load,
        )
