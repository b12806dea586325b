"""Pause and resume: the pool runs out, somebody steps back, and nobody can tell from what comes out."""

from collections.abc import Iterable

import numpy as np
import pytest
from support.invariants import check_scheduler
from support.simulated_worker import VOCAB, request, token_at
from support.trace import Trace

from lightllm.server.core.messages import Finish, GenerateRequest

PAUSING = ("past_future", "aggressive")


def make(
    pool: int = 120, policy: str = "aggressive", plans: int = 2, rows: int = 16, budget: int = 64, **more
) -> Trace:
    trace = Trace(pool, rows, budget, chunk=16, plans=plans, policy=policy, **more)
    if policy == "past_future":
        expect_short_outputs(trace)
    return trace


def expect_short_outputs(trace: Trace) -> None:
    """The past had short outputs, so that what comes now is admitted too freely."""
    lengths = trace.scheduler._policy._lengths
    for kind in (0, 64, *range(1, 12)):
        for _ in range(512):
            lengths.end(kind, lengths.admit(kind), 2)


def paused(trace: Trace) -> set[int]:
    """Sequences that wait to be resumed."""
    return {request.sequence_id for request in trace.scheduler._queue if request.paused}


def paused_first(trace: Trace, until: int = 100) -> set[int]:
    """Those that are the first to be paused."""
    for _ in range(until):
        trace.step()
        if waiting := paused(trace):
            return waiting
    raise AssertionError("nobody was paused")


def add_all(trace: Trace, requests: Iterable[GenerateRequest]) -> None:
    for new in requests:
        trace.add(new)


def greedy(count: int = 6, prompt_len: int = 15, output: int = 60, **parameters) -> list[GenerateRequest]:
    """Requests that together outgrow the pool; a stop that never happens makes their lengths unknown beforehand."""
    stop = dict(stop_sequences=[[VOCAB]])
    return [request(number, prompt_len, output, **(stop | parameters)) for number in range(1, count + 1)]


# ---- that it happens, and that nobody notices


@pytest.mark.parametrize("policy", PAUSING)
@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("prompt_cache", [True, False])
def test_everything_ends_exactly(policy: str, plans: int, prompt_cache: bool) -> None:
    trace = make(policy=policy, plans=plans, prompt_cache=prompt_cache)
    add_all(trace, greedy())
    trace.run_to_end()
    assert trace.scheduler.load().pauses_total > 0


@pytest.mark.parametrize("policy", PAUSING)
@pytest.mark.parametrize(
    "parameters",
    [
        dict(stop_token_ids=[3], min_new_tokens=25),
        dict(stop_token_ids=[3, 4, 5, 6], min_new_tokens=40),
        dict(logprobs=1),
        dict(prompt_logprobs=0, logprobs=1),
        dict(n=3),
        dict(n=2, prompt_logprobs=0, stop_token_ids=[1], min_new_tokens=50),
        dict(disable_prompt_cache=True),
    ],
    ids=str,
)
def test_whatever_was_asked_for(policy: str, parameters: dict) -> None:
    trace = make(policy=policy)
    add_all(trace, greedy(**parameters))
    trace.run_to_end()
    assert trace.scheduler.load().pauses_total > 0


@pytest.mark.parametrize("policy", PAUSING)
def test_a_stop_sequence_spans_a_pause(policy: str) -> None:
    """Each of them, whatever was sampled before the pause and what after it."""
    trace = make(policy=policy)
    for number in range(1, 7):
        tokens = [token_at(number << 3, index) for index in range(60)]
        trace.add(request(number, 15, 60, stop_sequences=[tokens[12:52]]))
    trace.run_to_end()
    assert trace.scheduler.load().pauses_total > 0
    assert {len(tokens) for tokens in trace.tokens.values()} == {52}
    assert set(trace.finish.values()) == {Finish.STOP}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", PAUSING)
def test_random_small_pools(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = int(rng.choice([40, 80, 150]))
    trace = make(pool, policy, plans=int(rng.integers(1, 3)), budget=int(rng.choice([4, 64])), fair_share=seed % 3 == 0)
    to_come = []
    for number in range(1, 16):
        prompt_len = int(rng.integers(1, pool // 3))
        ids = [7] * (prompt_len - 1) + [8] if rng.random() < 0.5 else None
        to_come.append(
            request(
                number,
                prompt_len,
                int(rng.integers(1, pool - prompt_len + 2)),
                ids,
                client=str(number % 2),
                priority=int(rng.integers(3)) if rng.random() < 0.3 else 0,
                open_ended=rng.random() < 0.3,
                n=int(rng.integers(1, 4)),
                stop_token_ids=[1] if rng.random() < 0.3 else [],
                min_new_tokens=1,
                prompt_logprobs=0 if rng.random() < 0.2 else None,
                disable_prompt_cache=rng.random() < 0.1,
            )
        )
    while to_come or trace.scheduler.has_work or trace.worker.flying:
        if to_come and rng.random() < 0.4:
            trace.add(to_come.pop())
        if rng.random() < 0.03:
            trace.abort(int(rng.integers(1, 16)) << 3)
        while rng.random() < 0.9 and trace.plan():
            pass
        if trace.worker.flying:
            trace.result()
        else:
            assert trace.plan() or not trace.scheduler.has_work, "something waits and nothing runs"
    trace.check_end()


def test_a_resumed_sequence_computes_its_last_token_only() -> None:
    """What it had computed stays in the cache as long as nobody needs the room."""
    trace = make(pool=120)
    add_all(trace, greedy(count=4, output=20))
    (victim,) = paused_first(trace)
    for sequence_id in set(trace.requests) - {victim}:
        trace.abort(sequence_id)
    before = trace.worker.computed
    had = len(trace.tokens[victim])
    trace.run_to_end()
    assert had > 0 and trace.worker.computed - before == 1


@pytest.mark.parametrize("policy", PAUSING)
def test_cached_tokens_are_told_once(policy: str) -> None:
    """A resumed sequence finds itself in the cache; that is none of the prompt tokens that its client saved."""
    trace = make(policy=policy)
    add_all(trace, greedy())
    trace.run_to_end()
    assert not trace.cached
    load = trace.scheduler.load()
    assert load.pauses_total > 0 and load.cached_prompt_tokens_total == 0
    assert (load.admitted_total, load.prompt_tokens_total) == (6, 90)
    assert load.output_tokens_total == load.ended_output_tokens_total == 360


# ---- who


@pytest.mark.parametrize("plans", [1, 2])
def test_the_one_whose_pause_frees_most_is_paused_first(plans: int) -> None:
    """Neither the newest, which holds little, nor one that ends soon, which holds most."""
    trace = make(pool=130, plans=plans)
    stop = dict(stop_sequences=[[VOCAB]])
    add_all(trace, [request(1, 60, 34, **stop), request(2, 20, 90, **stop), request(3, 10, 20, **stop)])
    assert paused_first(trace) == {16}


@pytest.mark.parametrize("plans", [1, 2])
def test_of_equals_the_newest_is_paused(plans: int) -> None:
    trace = make(plans=plans, budget=1024, rows=5)
    add_all(trace, greedy(count=5, prompt_len=12))
    assert paused_first(trace) == {max(trace.worker.started)}


def test_of_the_paused_the_oldest_are_resumed_first() -> None:
    trace = make()
    add_all(trace, greedy())
    started = 0

    def check() -> None:
        nonlocal started
        waiting = paused(trace)
        for sequence_id in trace.worker.started[started:]:
            if trace.tokens[sequence_id] and waiting:
                assert sequence_id < min(waiting)
        started = len(trace.worker.started)

    trace.run_to_end(check)


def test_lower_priority_is_paused_before_newer() -> None:
    trace = make()
    low = 2
    for new in greedy(count=4):
        number = new.id >> 3
        trace.add(request(number, 15, 60, stop_sequences=[[VOCAB]], priority=0 if number == low else 1))
    assert paused_first(trace) == {low << 3}
    trace.run_to_end()


@pytest.mark.parametrize("policy", PAUSING)
@pytest.mark.parametrize("priority", [0, 5])
def test_new_requests_never_overtake_a_paused_one(policy: str, priority: int) -> None:
    """However small they are and whatever their priority."""
    trace = make(policy=policy, plans=2)
    add_all(trace, greedy())
    number = 100
    started = 0
    overtaken = set()
    while trace.scheduler.has_work or trace.worker.flying:
        if number < 160:
            trace.add(request(number, 1, 2, priority=priority))
            number += 1
        while True:
            waiting = paused(trace)
            if not trace.plan():
                break
            new = set(trace.worker.started[started:]) - set(trace.worker.started[:started])
            started = len(trace.worker.started)
            if new:
                overtaken |= waiting & paused(trace)
        trace.result()
    trace.check_end()
    assert trace.scheduler.load().pauses_total > 0
    assert not overtaken


def test_a_prompt_whose_logprobs_are_told_is_not_paused_while_it_is_computed() -> None:
    """It would have to be computed anew; after its first token it is paused like any other."""
    trace = make(pool=200, budget=8)
    add_all(trace, greedy(count=3, prompt_len=30, output=100))
    for _ in range(30):
        trace.step()
    trace.add(request(9, 60, 30, prompt_logprobs=0))
    while trace.worker.started[-1] != 72:
        trace.step()
    while not trace.tokens[72]:
        assert 72 not in paused(trace)
        trace.step()
    trace.run_to_end()
    assert trace.worker.started.count(72) >= 1
    assert trace.scheduler.load().pauses_total > 0


# ---- ends


@pytest.mark.parametrize("how", ["abort", "stop"])
@pytest.mark.parametrize("when", ["pausing", "paused"])
def test_an_end_while_it_steps_back(how: str, when: str) -> None:
    trace = make(plans=2)
    add_all(trace, greedy())
    for _ in range(100):
        while trace.plan():
            pass
        rows = trace.scheduler._rows
        victims = [rows.at[row].sequence_id for row in np.flatnonzero(rows.pausing).tolist()]
        victims = sorted(paused(trace)) if when == "paused" else victims
        if victims:
            break
        trace.result()
    (victim, *_) = victims
    before = trace.scheduler.load().pauses_total
    if how == "abort":
        trace.abort(victim)
        assert trace.finish[victim] == Finish.ABORT
    else:
        trace.stop(victim)
    assert victim not in paused(trace)
    check_scheduler(trace.scheduler)
    if when == "pausing":
        trace.result()
        assert trace.scheduler.load().pauses_total == before, "what has ended does not wait"
    trace.run_to_end()


def test_a_sequence_that_comes_to_its_end_while_it_steps_back_is_not_resumed() -> None:
    """Its last token may be in flight: 35 tokens for each of five, of which the pool holds three."""
    for output in range(2, 30):
        trace = make(pool=60, plans=2)
        add_all(trace, greedy(count=5, prompt_len=6, output=output))
        trace.run_to_end()
        for sequence_id in trace.requests:
            assert len(trace.tokens[sequence_id]) == output


@pytest.mark.parametrize("failing", range(12, 40, 3))
def test_a_failure_while_somebody_steps_back(failing: int) -> None:
    trace = make(plans=2, failing={failing})
    add_all(trace, greedy())
    trace.run_to_end()


# ---- how many


def test_no_more_are_paused_than_needed() -> None:
    """Two always fit, so that four of six are paused at most; and not again and again."""
    trace = make(pool=160, plans=2)
    add_all(trace, greedy())

    def check() -> None:
        assert len(paused(trace)) <= 4

    trace.run_to_end(check)
    assert trace.scheduler.load().pauses_total <= 12


def test_samples_that_share_their_prompt_are_paused_one_at_a_time() -> None:
    """The slots of the prompt are not freed by one of them; 3 slots are needed, and one sequence gives many."""
    trace = make(pool=150, plans=2)
    trace.add(request(1, 20, 70, stop_sequences=[[VOCAB]]))
    for new in greedy(count=4)[2:]:
        trace.add(new)
    trace.add(request(9, 40, 60, stop_sequences=[[VOCAB]], n=2))
    assert len(paused_first(trace)) == 1
    trace.run_to_end()


@pytest.mark.parametrize("seed", range(12))
def test_conservative_never_pauses(seed: int) -> None:
    """Trace checks it, and that no row that could decode is left out."""
    rng = np.random.default_rng(seed)
    pool = int(rng.choice([20, 60, 200]))
    trace = make(pool, "conservative", plans=int(rng.integers(1, 3)), budget=int(rng.choice([2, 9, 64])))
    for number in range(1, 16):
        prompt_len = int(rng.integers(1, pool + 1))
        limit = int(rng.integers(1, min(40, pool - prompt_len + 1) + 1))
        ids = [7] * prompt_len if rng.random() < 0.5 else None
        trace.add(request(number, prompt_len, limit, ids, n=int(rng.integers(1, 3)), priority=int(rng.integers(2))))
        for _ in range(rng.poisson(1)):
            if trace.scheduler.has_work:
                trace.step()
    trace.run_to_end()


@pytest.mark.parametrize("policy", ["conservative", *PAUSING])
def test_open_ended_requests_may_be_paused_under_every_policy(policy: str) -> None:
    """They are expected to give 512 tokens; these give 900 each."""
    trace = make(pool=2000, policy=policy, budget=64)
    trace.pauses = True
    trace.worker._full_chunks = False
    add_all(trace, [request(number, 10, 900, open_ended=True) for number in range(1, 5)])
    trace.run_to_end()
    assert trace.scheduler.load().pauses_total > 0
