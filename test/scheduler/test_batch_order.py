"""A batch that is all here: the longest answers first, in steps of the size that ends with the longest of them."""

from collections.abc import Sequence

import numpy as np
import pytest
from support.schedulers import make_scheduler
from support.simulated_worker import SimulatedWorker, request

from lightllm.server.core.messages import GenerateRequest, unpack
from lightllm.server.router.batch_order import LEAST_PROMPT, LEAST_STEP, longest_first, spread
from lightllm.server.router.scheduler import Scheduler
from lightllm.server.router.step_limits import StepLimits
from lightllm.server.workloads import sharegpt_like, uniform

LIMITS = StepLimits(total=8192, chunk=8192, mixed_total=2048, mixed_chunk=256, mixed_least=256)


def batch(lengths: Sequence[tuple[int, int]]) -> list[GenerateRequest]:
    """Of requests that nothing but their limit ends: prompt tokens and output tokens."""
    return [request(number, prompt, output) for number, (prompt, output) in enumerate(lengths, start=1)]


def numbers(requests: Sequence[GenerateRequest]) -> list[int]:
    return [request.id >> 3 for request in requests]


@pytest.mark.parametrize(
    "outputs, expected",
    [([5, 9, 7], [2, 3, 1]), ([4, 4, 4], [1, 2, 3]), ([3, 8, 3, 8, 1], [2, 4, 1, 3, 5]), ([], [])],
)
def test_the_longest_go_first_and_equal_ones_as_they_came(outputs, expected) -> None:
    assert numbers(longest_first(batch([(10, output) for output in outputs]))) == expected


def test_open_ended_ones_go_first_as_they_came() -> None:
    """Their limit is what the prompt leaves of the context, which says nothing of their length."""
    asked = [request(1, 5, 50), request(2, 90, 10, open_ended=True), request(3, 5, 95, open_ended=True)]
    assert numbers(longest_first(asked)) == [2, 3, 1]


@pytest.mark.parametrize(
    "lengths, expected",
    [
        ([(500, 100)] * 100, 640),  # 60,000 tokens in 100 steps
        ([(500, 100)] * 90 + [(500, 1000)], LEAST_STEP),
        ([(10, 1000)] * 300, 320),  # 303 a step
        ([(1000, 1)] * 50, 8192),  # as many as a step has at most
    ],
)
def test_a_step_has_its_share_of_the_work(lengths, expected) -> None:
    limits = spread(LIMITS, batch(lengths))
    assert limits == StepLimits(8192, 8192, expected, expected, LEAST_PROMPT)
    assert limits.beside(100) == expected - 100 and limits.beside(8191) == LEAST_PROMPT


def test_samples_are_work_and_share_their_prompt() -> None:
    assert spread(LIMITS, [request(1, 40_000, 100, n=4)]).mixed_total == 448


@pytest.mark.parametrize("wish", [{"stop_token_ids": [3]}, {"stop_sequences": [[1, 2]]}, {"open_ended": True}])
def test_limits_stay_where_an_answer_may_end_early(wish) -> None:
    assert spread(LIMITS, [*batch([(500, 100)] * 5), request(9, 5, 50, **wish)]) is LIMITS
    assert spread(LIMITS, []) is LIMITS


def step_sizes(scheduler: Scheduler, requests: Sequence[GenerateRequest]) -> np.ndarray:
    """Tokens of each step until all requests have ended."""
    for each in requests:
        scheduler.add(each)
    worker = SimulatedWorker(scheduler.pool.size, 8192, 8192, plans_in_flight=2, full_chunks=False)
    sizes = []
    while scheduler.has_work:
        while plan := scheduler.schedule():
            worker.launch(plan)
            sizes.append(unpack(plan.lengths, np.int32).sum())
        scheduler.update(worker.result())
        scheduler.take_output()
    assert scheduler.used_tokens == 0
    return np.array(sizes)


@pytest.mark.parametrize("of", [uniform, sharegpt_like])
def test_the_batch_ends_with_its_longest_answer_and_with_few_lines_to_spare(of) -> None:
    """A step of few tokens costs as much as one of LEAST_STEP: no order and no sizes could do without `bound`."""
    requests = batch([(prompt // 4 + 1, output // 4 + 1) for prompt, output in of()])
    longest = max(request.sampling.max_new_tokens for request in requests)
    tokens = sum(len(request.prompt_ids) // 4 + request.sampling.max_new_tokens - 1 for request in requests)
    bound, costs = max(tokens, longest * LEAST_STEP), []
    for ordered in (requests, longest_first(requests)):
        scheduler = make_scheduler(10**6, rows=1024, budget=8192, chunk=8192, longest=4096, mixed_prefill_size=256)
        if ordered is not requests:
            scheduler.limits = spread(scheduler.limits, requests)
        sizes = step_sizes(scheduler, ordered)
        assert sizes.sum() == tokens
        costs.append(np.maximum(sizes, LEAST_STEP).sum() / bound)
    assert len(sizes) == longest
    as_they_came, spread_out = costs
    assert spread_out < 1.2 and as_they_came > 1.4
