"""The scheduler on random traces: whatever arrives, aborts, stops or fails, every sequence ends once and exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.simulated_worker import VOCAB, SimulatedWorker, expected_output, request

from lightllm.server.core.messages import Finish, GenerateRequest, StopRequest, TokenBatch, sample_of, unpack
from lightllm.server.router.admission import POLICIES
from lightllm.server.router.candidates import MAX_PASSED
from lightllm.server.router.scheduler import Scheduler


class Trace:
    """A scheduler, its worker, and what has come out for each sequence."""

    def __init__(
        self,
        pool: int,
        rows: int,
        budget: int,
        chunk: int,
        plans: int,
        failing: Collection[int] = (),
        policy: str = "conservative",
        **scheduling,
    ):
        self.pauses = policy != "conservative"
        self.scheduler = Scheduler(
            max_total_token_num=pool,
            running_max_req_size=rows,
            batch_max_tokens=budget,
            chunked_prefill_size=chunk,
            max_queue=10**6,
            max_req_total_len=2048,
            plans_in_flight=plans,
            policy=POLICIES[policy](pool, plans - 1),
            **scheduling,
        )
        self.worker = SimulatedWorker(pool, budget, min(chunk, budget), plans, failing, full_chunks=not self.pauses)
        self.requests: dict[int, GenerateRequest] = {}  # by sequence id
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finish: dict[int, Finish] = {}
        self.stopped: set[int] = set()
        self.announced: set[int] = set()
        self.cached: dict[int, int] = {}
        self.prompt_logprobs: dict[int, list[float]] = defaultdict(list)

    def add(self, new: GenerateRequest) -> None:
        for sample in range(new.sampling.n):
            self.requests[new.id | sample] = new
        self.scheduler.add(new)
        self.read()

    def abort(self, request_id: int) -> None:
        self.scheduler.abort(request_id)
        self.read()

    def stop(self, sequence_id: int) -> None:
        if sequence_id not in self.finish:
            self.stopped.add(sequence_id)
        self.scheduler.stop(StopRequest(sequence_id, len(self.tokens[sequence_id])))
        self.read()

    def plan(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.worker.launch(plan)
        if not self.pauses:
            assert self.worker.idle <= self.finish.keys() | self.stopped, "a row that could decode was left out"
        self.scheduler.check_invariants()
        return True

    def result(self) -> None:
        self.scheduler.update(self.worker.result())
        self.read()
        self.scheduler.check_invariants()

    def read(self) -> None:
        if batch := self.scheduler.take_output():
            self._read(batch)
        assert self.scheduler.take_output() is None

    def _read(self, batch: TokenBatch) -> None:
        for new in batch.new:
            assert new.sequence_id not in self.announced
            self.announced.add(new.sequence_id)
            assert new.prompt_tail == self.requests[new.sequence_id].prompt_ids[-64:]
        for sequence_id, cached in batch.cached:
            assert sequence_id not in self.cached and not self.tokens[sequence_id]
            self.cached[sequence_id] = cached
        ids = unpack(batch.sequence_ids, np.int64).tolist()
        columns = unpack(batch.tokens, np.int32).tolist(), unpack(batch.logprobs, np.float32).tolist(), batch.finishes
        tops = {top.index: top for top in batch.top}
        for index, (sequence_id, token, logprob, finish) in enumerate(zip(ids, *columns, strict=True)):
            assert sequence_id in self.announced
            assert sequence_id not in self.finish and sequence_id not in self.stopped, "a token after the end"
            self.tokens[sequence_id].append(token)
            assert logprob == -len(self.tokens[sequence_id])
            if self.requests[sequence_id].sampling.logprobs:
                top = tops.pop(index)
                assert unpack(top.ids, np.int32).tolist() == [token]
                assert unpack(top.logprobs, np.float32).tolist() == [logprob]
            if finish:
                self.finish[sequence_id] = Finish(finish)
        assert not tops
        for part in batch.prompt:
            places = unpack(part.logprobs, np.float32).tolist()
            self.prompt_logprobs[part.owner] += places
            assert places[0] == part.start
        for ended in batch.ended:
            assert ended.sequence_id not in self.finish and ended.sequence_id not in self.stopped, "a second end"
            self.finish[ended.sequence_id] = Finish(ended.finish)

    def check_end(self) -> None:
        """Everything has ended exactly once, exactly as expected unless it was interrupted, and everything is free."""
        assert self.requests.keys() == self.finish.keys() | self.stopped
        assert not self.finish.keys() & self.stopped
        for sequence_id, new in self.requests.items():
            tokens, finish = expected_output(sequence_id, new.sampling)
            got = self.tokens[sequence_id]
            if sequence_id in self.stopped or self.finish[sequence_id] in (Finish.ABORT, Finish.ERROR):
                assert got == tokens[: len(got)] and len(got) < len(tokens)
            else:
                assert (got, self.finish[sequence_id]) == (tokens, finish)
                if new.sampling.prompt_logprobs is not None and sample_of(sequence_id) == 0:
                    assert self.prompt_logprobs[sequence_id] == list(range(1, len(new.prompt_ids) // 4))
        load = self.scheduler.load()
        assert (load.used_tokens, load.running, load.waiting, load.paused) == (0, 0, 0, 0)
        assert self.scheduler.pool.free_count + load.cached_tokens == self.scheduler.pool.size
        assert self.pauses or not load.pauses_total, "a conservative scheduler pauses nobody"
        self.scheduler.check_invariants()


def random_request(number: int, rng: np.random.Generator, pool: int, open_ended: float = 0.0) -> GenerateRequest:
    prompt_len = int(rng.integers(1, pool + 1)) if rng.random() < 0.2 else int(rng.integers(1, min(pool, 40) + 1))
    room = pool - prompt_len + 1
    stops: list = []
    if rng.random() < 0.3:
        stops = [rng.integers(VOCAB, size=rng.integers(1, 4)).tolist() for _ in range(rng.integers(1, 3))] + ["text"]
    limit = int(rng.integers(1, min(room, 40) + 1))
    return request(
        number,
        prompt_len,
        limit,
        ids=random_prompt(rng, prompt_len) if rng.random() < 0.7 else None,
        priority=int(rng.integers(-1, 2)) if rng.random() < 0.1 else 0,
        client=str(rng.integers(3)),
        open_ended=rng.random() < open_ended,
        n=int(rng.integers(1, 9)) if rng.random() < 0.1 else 1,
        stop_token_ids=rng.integers(VOCAB, size=rng.integers(0, 7)).tolist() if rng.random() < 0.5 else [],
        stop_sequences=stops,
        min_new_tokens=int(rng.integers(1, limit + 1)) if rng.random() < 0.3 else 1,
        logprobs=int(rng.random() < 0.3),
        prompt_logprobs=0 if rng.random() < 0.2 else None,
        disable_prompt_cache=rng.random() < 0.1,
    )


def random_prompt(rng: np.random.Generator, length: int) -> list[int]:
    """One of few: a number of equal ids, then others, so that prompts share prefixes of any length."""
    shared = min(length, int(rng.integers(0, 60)))
    rest = rng.integers(0, 2, length - shared).tolist() if rng.random() < 0.5 else [7] * (length - shared)
    return [int(rng.integers(100, 102))] * shared + rest


def run(trace: Trace, requests: list[GenerateRequest], rng: np.random.Generator, interrupted: bool = True) -> None:
    """Everything arrives, runs and ends, in an order that `rng` makes up; now and then something is interrupted."""
    to_come, pace = requests[::-1], 3 * rng.random()
    while to_come or trace.scheduler.has_work or trace.worker.flying:
        for _ in range(min(len(to_come), rng.poisson(pace))):
            trace.add(to_come.pop())
        if interrupted and rng.random() < 0.1:
            trace.abort(requests[rng.integers(len(requests))].id)
        running = [sequence_id for sequence_id in trace.tokens if sequence_id not in trace.finish]
        if interrupted and running and rng.random() < 0.05:
            trace.stop(running[rng.integers(len(running))])
        while rng.random() < 0.9 and trace.plan():
            pass
        if trace.worker.flying and rng.random() < 0.9:
            trace.result()
        else:
            assert trace.plan() or trace.worker.flying or not trace.scheduler.has_work, "work waits and nothing runs"
    trace.check_end()


@pytest.mark.parametrize("policy", ["conservative", "past_future", "aggressive"])
@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 16, 10**6])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_random_traces(seed: int, plans: int, chunk: int, policy: str) -> None:
    rng = np.random.default_rng(seed)
    pool = int(rng.choice([1, 2, 5, 20, 60, 200, 1000]))
    trace = Trace(
        pool,
        rows=int(rng.choice([1, 2, 8, 64])),
        budget=int(rng.choice([1, 2, 9, 64, 8192])),
        chunk=chunk,
        plans=plans,
        failing=rng.integers(1, 100, size=2).tolist() if rng.random() < 0.2 else (),
        policy=policy,
        prompt_cache=rng.random() < 0.8,
        fair_share=rng.random() < 0.2,
    )
    open_ended = 0.2 * (policy != "conservative")
    count = int(rng.integers(2, 40))
    run(trace, [random_request(number, rng, pool, open_ended) for number in range(1, count)], rng)


@pytest.mark.parametrize("plans", [1, 2])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_nobody_is_passed_for_ever(seed: int, plans: int) -> None:
    """Each is started before all but a bounded number of those that came later, whatever it needs."""
    rng = np.random.default_rng(seed)
    pool = int(rng.choice([60, 200]))
    trace = Trace(pool, rows=8, budget=64, chunk=16, plans=plans)
    requests = []
    for number in range(1, 80):
        size = int(rng.integers(pool // 2, pool)) if rng.random() < 0.1 else int(rng.integers(1, 6))
        requests.append(request(number, size, int(rng.integers(1, pool - size + 2))))
    run(trace, requests, rng, interrupted=False)
    place = {sequence_id: place for place, sequence_id in enumerate(trace.worker.started)}
    for sequence_id, started in place.items():
        earlier = trace.worker.started[:started]
        assert sum(other > sequence_id for other in earlier) <= MAX_PASSED
