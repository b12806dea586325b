"""The scheduler on random traces: whatever arrives, aborts, stops or fails, every sequence ends once and exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.simulated_worker import VOCAB, SimulatedWorker, expected_output, request

from lightllm.server.core.messages import Finish, GenerateRequest, StopRequest, TokenBatch, unpack
from lightllm.server.router.scheduler import Scheduler


class Trace:
    """A scheduler, its worker, and what has come out for each sequence."""

    def __init__(self, pool: int, rows: int, budget: int, chunk: int, plans: int, failing: Collection[int]):
        self.scheduler = Scheduler(
            max_total_token_num=pool,
            running_max_req_size=rows,
            batch_max_tokens=budget,
            chunked_prefill_size=chunk,
            max_queue=10**6,
            max_req_total_len=2048,
            plans_in_flight=plans,
        )
        self.worker = SimulatedWorker(pool, budget, min(chunk, budget), plans, failing)
        self.requests: dict[int, GenerateRequest] = {}  # by sequence id
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finish: dict[int, Finish] = {}
        self.stopped: set[int] = set()
        self.announced: set[int] = set()
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
                if new.sampling.prompt_logprobs is not None:
                    assert self.prompt_logprobs[sequence_id] == list(range(1, len(new.prompt_ids) // 4))
        assert self.scheduler.load().used_tokens == 0
        assert self.scheduler.pool.free_count == self.scheduler.pool.size
        self.scheduler.check_invariants()


def random_request(number: int, rng: np.random.Generator, pool: int) -> GenerateRequest:
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
        n=int(rng.integers(1, 9)) if rng.random() < 0.1 else 1,
        stop_token_ids=rng.integers(VOCAB, size=rng.integers(0, 7)).tolist() if rng.random() < 0.5 else [],
        stop_sequences=stops,
        min_new_tokens=int(rng.integers(1, limit + 1)) if rng.random() < 0.3 else 1,
        logprobs=int(rng.random() < 0.3),
        prompt_logprobs=0 if rng.random() < 0.2 else None,
    )


@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 16, 10**6])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_random_traces(seed: int, plans: int, chunk: int) -> None:
    rng = np.random.default_rng(seed)
    pool = int(rng.choice([1, 2, 5, 20, 60, 200, 1000]))
    trace = Trace(
        pool,
        rows=int(rng.choice([1, 2, 8, 64])),
        budget=int(rng.choice([1, 2, 9, 64, 8192])),
        chunk=chunk,
        plans=plans,
        failing=rng.integers(1, 100, size=2).tolist() if rng.random() < 0.2 else (),
    )
    requests = [random_request(number, rng, pool) for number in range(1, int(rng.integers(2, 40)))]
    to_come, pace = requests[::-1], 3 * rng.random()
    while to_come or trace.scheduler.has_work or trace.worker.flying:
        for _ in range(min(len(to_come), rng.poisson(pace))):
            trace.add(to_come.pop())
        if rng.random() < 0.1:
            trace.abort(requests[rng.integers(len(requests))].id)
        running = [sequence_id for sequence_id in trace.tokens if sequence_id not in trace.finish]
        if running and rng.random() < 0.05:
            trace.stop(running[rng.integers(len(running))])
        while rng.random() < 0.9 and trace.plan():
            pass
        if trace.worker.flying and rng.random() < 0.9:
            trace.result()
        else:
            assert trace.plan() or trace.worker.flying or not trace.scheduler.has_work, "work waits and nothing runs"
    trace.check_end()
    started = trace.worker.started
    assert started == [sequence_id for sequence_id in trace.requests if sequence_id in started], "out of order"
