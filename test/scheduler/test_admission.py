"""The future peak against brute force: never below it, equal to it where no prompt is being computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from lightllm.server.router.admission import Demand, future_peak, prompt_plans

CASES = 2_000  # of each kind, for each `late`


@dataclass
class Run:
    """What a plan-by-plan run of some requests used."""

    peak: int
    computed_after: np.ndarray  # plans until each prompt was computed


@dataclass
class Case:
    """Requests as the scheduler has them; the last `len(remaining)` of them still compute their prompts."""

    held: np.ndarray  # slots, a prompt counts whole
    growth: np.ndarray
    remaining: np.ndarray  # prompt tokens
    chunk: int
    budget: int
    late: int

    @classmethod
    def draw(cls, rng: np.random.Generator, late: int, prompts: int) -> Case:
        n = int(rng.integers(1, 9))
        prompts = min(prompts, n)
        held = rng.integers(1, int(rng.choice([3, 12, 40])), n)
        growth = rng.integers(0, int(rng.choice([2, 8, 30])), n)
        remaining = np.array([rng.integers(1, h + 1) for h in held[n - prompts :]], np.int64)
        budget = int(rng.choice([n, n + 1, n + 5, 64]))
        return cls(held, growth, remaining, min(int(rng.choice([1, 3, 7, 10**6])), budget), budget, late)

    def estimate(self) -> int:
        earliest, latest = self.prompt_plans()
        now = np.zeros(len(self.held) - len(self.remaining), np.int64)
        demand = Demand(self.held, self.growth, np.concatenate((now, earliest)), np.concatenate((now, latest)))
        return future_peak(demand, self.late)

    def prompt_plans(self) -> tuple[np.ndarray, np.ndarray]:
        return prompt_plans(self.remaining, self.chunk, self.budget, len(self.held))

    def run(self, early_ends: dict[int, int] | None = None) -> Run:
        """Plan by plan: every row that can decodes, then prompts in order share what the budget leaves.

        A row gives its slots back `late` plans after its last one. early_ends: {request: plan before which it ends}.
        """
        held, growth, n = self.held.tolist(), self.growth.tolist(), len(self.held)
        missing = [0] * (n - len(self.remaining)) + self.remaining.tolist()
        grown, ended_at, computed_after = [0] * n, [-1] * n, [0] * n
        peak, plan = sum(held), 0
        while True:
            for i in range(n):
                over = missing[i] == 0 and grown[i] == growth[i]
                if ended_at[i] < 0 and (over or (early_ends or {}).get(i) == plan):
                    ended_at[i] = plan
            running = [i for i in range(n) if ended_at[i] < 0]
            if not running:
                return Run(peak, np.array(computed_after[n - len(self.remaining) :]))
            plan += 1
            decoding = [i for i in running if missing[i] == 0]
            left = self.budget - len(decoding)
            for i in running:
                if missing[i]:
                    taken = min(missing[i], self.chunk, left)
                    missing[i] -= taken
                    left -= taken
                    computed_after[i] = plan
            for i in decoding:
                grown[i] += 1
            holding = [i for i in range(n) if ended_at[i] < 0 or ended_at[i] + self.late >= plan]
            peak = max(peak, sum(held[i] + grown[i] for i in holding))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_exact_where_no_prompt_is_computed(late: int) -> None:
    rng = np.random.default_rng(late)
    for _ in range(CASES):
        case = Case.draw(rng, late, prompts=0)
        assert case.estimate() == case.run().peak, case


@pytest.mark.parametrize("late", [0, 1, 2])
def test_never_below_with_prompts(late: int) -> None:
    rng = np.random.default_rng(100 + late)
    ratios = []
    for _ in range(CASES):
        case = Case.draw(rng, late, prompts=int(rng.integers(1, 9)))
        estimate, run = case.estimate(), case.run()
        assert estimate >= run.peak, case
        earliest, latest = case.prompt_plans()
        assert (earliest <= run.computed_after).all() and (run.computed_after <= latest).all(), case
        ratios.append(estimate / run.peak)
    print(f"estimate / brute force: mean {np.mean(ratios):.3f}, 99 % below {np.quantile(ratios, 0.99):.3f}")
    assert np.mean(ratios) < 1.1, "the bound is of little use"


@pytest.mark.parametrize("late", [0, 1, 2])
def test_early_ends_never_exceed_it(late: int) -> None:
    """Rows that stop before their length let prompts through sooner, which the estimate must have foreseen."""
    rng = np.random.default_rng(200 + late)
    for _ in range(CASES):
        case = Case.draw(rng, late, prompts=int(rng.integers(0, 9)))
        n = len(case.held)
        ends = {int(i): int(rng.integers(0, 60)) for i in rng.choice(n, int(rng.integers(1, n + 1)), replace=False)}
        assert case.estimate() >= case.run(ends).peak, (case, ends)


def test_the_first_prompt_alone_is_exact() -> None:
    rng = np.random.default_rng(3)
    for _ in range(1000):
        case = Case.draw(rng, 1, prompts=1)
        case.held, case.growth = case.held[-1:], case.growth[-1:]
        earliest, latest = case.prompt_plans()
        assert earliest == latest == case.run().computed_after
        assert case.estimate() == case.run().peak == case.held + case.growth


def test_many_short_prompts_are_known_to_be_computed_soon() -> None:
    """64 prompts of 100 tokens fit into one plan of 8192 although a chunk is 7 tokens: 15 plans, not 914."""
    _, latest = prompt_plans(np.full(64, 100), chunk=7, budget=8192, rows=64)
    assert latest.max() == 15


def test_no_requests() -> None:
    none = np.empty(0, np.int64)
    assert future_peak(Demand(none, none, none, none), late=1) == 0
