"""The scheduler on random traces: whatever arrives, aborts, stops or fails, every sequence ends once and exactly."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.simulated_worker import VOCAB, request
from support.trace import Trace

from lightllm.server.core.messages import GenerateRequest
from lightllm.server.router.admission import POLICIES
from lightllm.server.router.candidates import MAX_PASSED


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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("plans", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 7, 16, 10**6])
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
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
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_nobody_is_passed_for_ever(seed: int, plans: int) -> None:
    """Each is started before all but a bounded number of those that came later, whatever it needs."""
    rng = np.random.default_rng(seed)
    pool = int(rng.choice([60, 200]))
    trace = Trace(pool, rows=8, budget=64, chunk=16, plans=plans)
    requests = []
    for number in range(1, 80):
        if rng.random() < 0.1:
            size = int(rng.integers(pool // 2, pool))
            longest = pool - size + 1
        else:  # short, so that many of them would pass a large one
            size, longest = int(rng.integers(1, 6)), 40
        requests.append(request(number, size, int(rng.integers(1, longest + 1))))
    run(trace, requests, rng, interrupted=False)
    place = {sequence_id: place for place, sequence_id in enumerate(trace.worker.started)}
    for sequence_id, started in place.items():
        earlier = trace.worker.started[:started]
        assert sum(other > sequence_id for other in earlier) <= MAX_PASSED
