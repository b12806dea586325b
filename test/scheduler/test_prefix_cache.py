"""The prefix cache as requests see it: what is computed, what is found, who shares, and what a failure leaves."""

from collections.abc import Collection
from unittest import mock

import numpy as np
import pytest
from support.simulated_worker import request
from support.trace import Trace

from lightllm.server.core.messages import Finish
from lightllm.server.router.admission import Conservative

LENGTH = 100
P = list(range(5000, 5000 + LENGTH))
OTHERS = [5900, 5901, 5902, 5903, 5904]


def make(
    pool: int = 1000, plans: int = 2, chunk: int = 16, failing: Collection[int] = (), policy="conservative", **more
):
    return Trace(pool, rows=16, budget=64, chunk=chunk, plans=plans, failing=failing, policy=policy, **more)


@pytest.fixture(params=[(1, 16), (2, 16), (2, 7), (2, 1000)], ids=lambda p: f"plans{p[0]}-chunk{p[1]}")
def trace(request: pytest.FixtureRequest) -> Trace:
    plans, chunk = request.param
    return make(plans=plans, chunk=chunk)


class Asked:
    """What one request, run to its end alone, computed of its prompt and found in the cache."""

    def __init__(self, trace: Trace, ids: list[int], max_new_tokens: int = 3, **parameters):
        number = len(trace.requests) + 1
        before = trace.worker.computed
        trace.add(request(number, len(ids), max_new_tokens, ids, **parameters))
        trace.run_to_end()
        self.computed = trace.worker.computed - before
        self.cached = trace.cached.get(number << 3, 0)
        self.tokens = trace.tokens[number << 3]


# ---- one after the other


def test_a_known_prompt_computes_its_last_token_only(trace: Trace) -> None:
    first, second, third = (Asked(trace, P) for _ in range(3))
    assert (first.computed, first.cached) == (LENGTH, 0)
    assert (second.computed, second.cached) == (third.computed, third.cached) == (1, LENGTH - 1)


@pytest.mark.parametrize(
    ("ids", "cached"),
    [
        (P + OTHERS, LENGTH),
        (P[:-1], LENGTH - 2),
        (P[:17] + OTHERS, 17),
        (P[:1] + OTHERS, 1),
        (OTHERS + P, 0),
        (P[1:], 0),
        (P[:1], 0),
        (P[:2], 1),
    ],
    ids=["longer", "shorter", "parts at 17", "parts at 1", "other", "shifted", "one", "two"],
)
def test_a_match_is_exact_to_the_token(trace: Trace, ids: list[int], cached: int) -> None:
    Asked(trace, P)
    asked = Asked(trace, ids)
    assert (asked.cached, asked.computed) == (cached, len(ids) - cached)


@pytest.mark.parametrize("ending", [dict(), dict(stop_token_ids=list(range(12)), min_new_tokens=9)])
def test_the_next_turn_finds_prompt_and_answer(trace: Trace, ending: dict) -> None:
    """All but the answer's last token, which need not have been computed."""
    ids, known = P, 0
    for _ in range(4):
        asked = Asked(trace, ids, max_new_tokens=12, **ending)
        assert max(0, known - 1) <= asked.cached <= known
        known = len(ids) + len(asked.tokens)
        ids = ids + asked.tokens + OTHERS


def test_branches_of_one_conversation(trace: Trace) -> None:
    for at in (90, 50, 51, 10):
        assert Asked(trace, P[:at] + OTHERS).cached == {90: 0, 50: 50, 51: 51, 10: 10}[at]
    assert Asked(trace, P[:90] + OTHERS).cached == 94
    assert Asked(trace, P).cached == 90


# ---- at the same time


@pytest.mark.parametrize("n", [2, 4, 8])
def test_samples_compute_their_prompt_once(trace: Trace, n: int) -> None:
    Asked(trace, P, n=n)
    assert trace.worker.computed == LENGTH + n - 1
    assert trace.cached == {8 | sample: LENGTH - 1 for sample in range(1, n)}


@pytest.mark.parametrize("short", [1, 2, 15])
def test_samples_of_a_short_prompt_compute_it_once(trace: Trace, short: int) -> None:
    Asked(trace, P[:short], n=4)
    assert trace.worker.computed == short + 3


@pytest.mark.parametrize("gap", [0, 1, 3])
@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("chunk", [16, 48, 1000])
def test_a_new_prefix_of_several_requests_is_computed_once(chunk: int, plans: int, gap: int) -> None:
    """It is whole chunks here: for less than one nobody waits."""
    trace = make(plans=plans, chunk=chunk)
    shared = list(range(7000, 7192))
    for number in range(1, 5):
        trace.add(request(number, 197, 3, shared + [8000 + number] * 5))
        for _ in range(gap):
            trace.step()
    trace.run_to_end()
    assert trace.worker.computed == 192 + 4 * 5


@pytest.mark.parametrize("length", [65, 100, 111, 112, 113])
def test_equal_prompts_at_once(trace: Trace, length: int) -> None:
    """Less than a chunk may be computed by each."""
    ids = list(range(7000, 7000 + length))
    for number in range(1, 5):
        trace.add(request(number, length, 3, ids))
    trace.run_to_end()
    assert length + 3 <= trace.worker.computed <= length + 3 * trace.scheduler.limits.chunk


def test_a_twin_waits_for_no_more_than_it_needs() -> None:
    """Of two prompts that part after 32 tokens the second starts once these are planned; a third shares nothing."""
    trace = make(chunk=16, plans=1)
    trace.add(request(1, 232, 3, P[:32] + [1] * 200))
    trace.add(request(2, 232, 3, P[:32] + [2] * 200))
    trace.add(request(3, 20, 3))
    starts = []
    for _ in range(3):
        starts.append(set(trace.worker.started))
        trace.step()
    assert starts == [set(), {8, 24}, {8, 24}] and trace.worker.started == [8, 24, 16]
    trace.run_to_end()
    assert trace.cached == {16: 32}


def test_a_shared_prefix_is_held_and_counted_once() -> None:
    """Four of 100 + 10 tokens would need 436 slots; with 150 they run together, the prefix being one."""
    trace = make(pool=150)
    Asked(trace, P)
    for number in range(2, 6):
        trace.add(request(number, LENGTH, 11, P))
    trace.step()
    load = trace.scheduler.load()
    assert load.running == 4 and LENGTH <= load.used_tokens <= LENGTH + 4 * 3
    assert load.predicted_peak == LENGTH - 1 + 4 * 11
    trace.run_to_end()


def test_chunks_that_the_same_requests_use_are_one_prefix() -> None:
    """The policy looks at each prefix: a document computed in a hundred chunks must not be a hundred of them."""
    trace = make(chunk=7)
    Asked(trace, P)
    seen = []
    with mock.patch.object(Conservative, "admits", lambda policy, demand: seen.append(demand) or True):
        for number, ids in enumerate(([*P, 1], [*P, 2], P[:40] + OTHERS), start=2):
            trace.add(request(number, len(ids), 3, ids))
        trace.step()
    assert sorted((length, len(holders)) for length, holders in seen[-1].shared) == [(40, 3), (60, 2)]
    assert seen[-1].now == LENGTH + 1 + 1 + len(OTHERS)
    trace.run_to_end()


# ---- who does not take part


@pytest.mark.parametrize("n", [1, 2])
def test_disable_prompt_cache_neither_finds_nor_leaves_anything(trace: Trace, n: int) -> None:
    assert Asked(trace, P, disable_prompt_cache=True, n=n).computed == n * LENGTH
    assert trace.scheduler.load().cached_tokens == 0
    assert Asked(trace, P).cached == 0
    assert Asked(trace, P, disable_prompt_cache=True, n=n).computed == n * LENGTH
    assert Asked(trace, P).cached == LENGTH - 1


@pytest.mark.parametrize("plans", [1, 2])
def test_without_a_cache_everything_is_computed(plans: int) -> None:
    trace = make(plans=plans, prompt_cache=False)
    for _ in range(2):
        assert Asked(trace, P, n=3).computed == 3 * LENGTH
    load = trace.scheduler.load()
    assert load.cached_tokens == load.cached_prompt_tokens_total == 0
    assert trace.scheduler.pool.free_count == trace.scheduler.pool.size


def test_prompt_logprobs_compute_the_prompt_whole_and_leave_it_known(trace: Trace) -> None:
    """Trace checks that they are complete."""
    assert Asked(trace, P, prompt_logprobs=0).computed == LENGTH
    assert Asked(trace, P, prompt_logprobs=0).computed == LENGTH
    assert Asked(trace, P + OTHERS, prompt_logprobs=0).computed == LENGTH + len(OTHERS)
    assert Asked(trace, P + OTHERS).cached == LENGTH + len(OTHERS) - 1


@pytest.mark.parametrize("known", [0, LENGTH])
def test_prompt_logprobs_are_those_of_sample_0_alone(trace: Trace, known: int) -> None:
    """The others use what it computes, or what was known before."""
    if known:
        Asked(trace, P[:known])
    assert Asked(trace, P, prompt_logprobs=0, n=3).computed == LENGTH + 2


@pytest.mark.parametrize("known", [1, 17])
def test_samples_beside_one_that_scores_a_prompt_known_in_part_compute_the_rest(trace: Trace, known: int) -> None:
    """What it computes beside a known part is its own: a slot of the cache has one writer."""
    Asked(trace, P[:known])
    assert Asked(trace, P, prompt_logprobs=0, n=3).computed <= LENGTH + 2 * (LENGTH - known)


# ---- memory


def test_the_longest_unused_is_evicted_when_slots_are_needed() -> None:
    """200 slots: of three prompts that hold 61 each, a fourth takes from the first alone."""
    trace = make(pool=200)
    prompts = [list(range(start, start + 60)) for start in range(1000, 1400, 100)]
    for ids in prompts:
        assert Asked(trace, ids, max_new_tokens=2).cached == 0
    assert [Asked(trace, ids, max_new_tokens=1).cached for ids in (*prompts[3:0:-1],)] == [59, 59, 59]
    assert 0 < Asked(trace, prompts[0], max_new_tokens=1).cached <= 200 - 3 * 61
    assert Asked(trace, prompts[0], max_new_tokens=1).cached == 59


def test_hits_after_many_other_prompts() -> None:
    trace = make(pool=300)
    Asked(trace, P)
    for start in range(10_000, 20_000, 100):
        Asked(trace, list(range(start, start + 50)))
    assert trace.scheduler.load().cached_tokens > 200
    assert Asked(trace, P).cached == 0
    assert Asked(trace, P).cached == LENGTH - 1


def test_what_is_used_again_and_again_stays() -> None:
    trace = make(pool=300)
    Asked(trace, P)
    for start in range(10_000, 20_000, 100):
        Asked(trace, list(range(start, start + 50)))
        assert Asked(trace, P).cached == LENGTH - 1


def test_cached_tokens_never_keep_a_request_waiting() -> None:
    trace = make(pool=200)
    Asked(trace, P)
    Asked(trace, P[::-1][:80])
    trace.add(request(9, 150, 51))
    trace.step()
    assert trace.scheduler.load().running == 1
    trace.run_to_end()


# ---- failures and aborts


@pytest.mark.parametrize("plans", [1, 2])
def test_a_failed_chunk_is_found_by_nobody(plans: int) -> None:
    trace = make(plans=plans, failing={3})
    trace.add(request(1, LENGTH, 3, P))
    trace.run_to_end()
    assert trace.finish == {8: Finish.ERROR}
    assert Asked(trace, P).cached == 32, "what two steps computed before is good"
    assert Asked(trace, P).cached == LENGTH - 1


def test_those_that_were_to_read_a_failed_chunk_end_with_it() -> None:
    """The second starts behind the chunk that step 2 computes, while that is in flight; the third shares nothing."""
    trace = make(plans=2, failing={2})
    trace.add(request(1, 40, 9, P[:32] + [1] * 8))
    trace.add(request(2, 40, 9, P[:32] + [2] * 8))
    trace.plan()
    trace.plan()
    trace.result()
    trace.plan()
    assert trace.worker.started == [8, 16] and trace.worker.cached == 32
    trace.add(request(3, 5, 9))
    trace.run_to_end()
    assert trace.finish == {8: Finish.ERROR, 16: Finish.ERROR, 24: Finish.LENGTH}
    assert Asked(trace, P[:32] + [2] * 8).cached == 16


@pytest.mark.parametrize("plans", [1, 2])
def test_a_failed_decode_step_leaves_nothing_behind(plans: int) -> None:
    """The prompt takes steps 1 to 7, and five tokens are out when step 12 is to compute the fifth."""
    trace = make(plans=plans, failing={12})
    trace.add(request(1, LENGTH, 20, P))
    trace.run_to_end()
    assert trace.finish == {8: Finish.ERROR} and len(trace.tokens[8]) == 5
    assert LENGTH <= Asked(trace, P + trace.tokens[8] + OTHERS).cached <= LENGTH + 4


@pytest.mark.parametrize("failing", range(1, 12))
def test_samples_whose_prompt_fails(failing: int) -> None:
    trace = make(plans=2, failing={failing})
    trace.add(request(1, LENGTH, 6, P, n=4))
    trace.run_to_end()
    assert Finish.ERROR in trace.finish.values()
    Asked(trace, P)
    assert Asked(trace, P).cached == LENGTH - 1


@pytest.mark.parametrize("plans", [1, 2])
def test_a_prompt_that_is_given_up_stays_known_as_far_as_it_was_computed(plans: int) -> None:
    trace = make(plans=plans)
    trace.add(request(1, LENGTH, 3, P))
    for _ in range(3):
        trace.plan()
        trace.result()
    trace.abort(8)
    trace.run_to_end()
    assert Asked(trace, P).cached == 48


def test_whoever_computes_for_others_may_be_given_up() -> None:
    """The first of four equal prompts is aborted in the middle; the next goes on where it was."""
    trace = make(plans=2)
    for number in range(1, 5):
        trace.add(request(number, LENGTH, 3, P))
    trace.step()
    trace.step()
    trace.abort(8)
    trace.run_to_end()
    assert trace.finish == {8: Finish.ABORT, 16: Finish.LENGTH, 24: Finish.LENGTH, 32: Finish.LENGTH}
    assert trace.worker.computed <= LENGTH + 2 * 16


# ---- what is told


def test_the_totals_tell_what_was_found() -> None:
    trace = make()
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LENGTH, 30).tolist()
    for number, length in enumerate(lengths, start=1):
        trace.add(request(number, length, 3, P[:length], n=int(rng.integers(1, 4))))
        trace.step()
    trace.run_to_end()
    load = trace.scheduler.load()
    assert load.admitted_total == len(trace.requests)
    assert load.prompt_tokens_total == sum(len(new.prompt_ids) // 4 for new in trace.requests.values())
    assert load.cached_prompt_tokens_total == sum(trace.cached.values()) == trace.worker.cached
    assert load.prompt_tokens_total - load.cached_prompt_tokens_total == trace.worker.computed
