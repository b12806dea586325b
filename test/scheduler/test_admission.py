"""The future peak against brute force: never below it, equal to it where no prompt is being computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import pytest
from support.simulated_worker import request

from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router.admission import POLICIES, SCENARIOS, Conservative, PastFuture
from lightllm.server.router.demand import Demand, future_peak, scenario_peaks
from lightllm.server.router.output_lengths import WINDOW, OutputLengths
from lightllm.server.router.request import Request
from lightllm.server.router.step_limits import StepLimits, prompt_plans

CASES = 2_000  # of each kind, for each `late`


def demand(
    held: np.ndarray,
    growth: np.ndarray,
    earliest: np.ndarray | None = None,
    latest: np.ndarray | None = None,
    shared: Sequence[tuple[int, np.ndarray]] = (),
) -> Demand:
    """Of requests whose limit is all they will give."""
    none = np.zeros_like(held)
    earliest, latest = (none if column is None else column for column in (earliest, latest))
    return Demand(held, growth, earliest, latest, shared, none, growth, none, np.zeros((len(held), 0)))


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
    beside: int  # chunk beside decoding rows
    most_beside: int  # tokens of a step with decoding rows
    least_beside: int  # prompt tokens of such a step, however many rows decode
    shared: list[tuple[int, np.ndarray]] = field(default_factory=list)  # rows besides `held`, indices of their holders

    @classmethod
    def draw(cls, rng: np.random.Generator, late: int, prompts: int) -> Case:
        n = int(rng.integers(1, 9))
        prompts = min(prompts, n)
        held = rng.integers(1, int(rng.choice([3, 12, 40])), n)
        growth = rng.integers(0, int(rng.choice([2, 8, 30])), n)
        remaining = np.array([rng.integers(1, h + 1) for h in held[n - prompts :]], np.int64)
        budget = int(rng.choice([n, n + 1, n + 5, 64]))
        chunk, beside = min(int(rng.choice([1, 3, 7, 10**6])), budget), int(rng.choice([1, 2, 5, 64]))
        most_beside, least_beside = int(rng.choice([1, 3, 8, 64])), int(rng.choice([1, 2, 5, 64]))
        return cls(held, growth, remaining, chunk, budget, late, beside, most_beside, least_beside)

    def as_demand(self) -> Demand:
        now = np.zeros(len(self.held) - len(self.remaining), np.int64)
        earliest, latest = (np.concatenate((now, plans)) for plans in self.prompt_plans())
        return demand(self.held, self.growth, earliest, latest, self.shared)

    def estimate(self) -> int:
        return future_peak(self.as_demand(), self.late)

    def share(self, rng: np.random.Generator) -> Case:
        """The same with nested prefixes: each is of some of those that share the one before, or of others."""
        holders = np.arange(len(self.held))
        for _ in range(int(rng.integers(1, 5))):
            if len(holders) < 2 or rng.random() < 0.3:
                holders = np.arange(len(self.held))
            holders = rng.permutation(holders)[: int(rng.integers(1, len(holders) + 1))]
            self.shared.append((int(rng.integers(1, 30)), holders))
        return self

    def prompt_plans(self) -> tuple[np.ndarray, np.ndarray]:
        limits = StepLimits(self.budget, self.chunk, self.most_beside, self.beside, self.least_beside)
        return prompt_plans(self.remaining, limits, len(self.held))

    def run(self, early_ends: dict[int, int] | None = None) -> Run:
        """Plan by plan: every row that can decodes, then prompts in order share what the budget leaves.

        A row gives its slots back `late` plans after its last one. early_ends: {request: plan before which it ends}.
        """
        held, growth, n = self.held.tolist(), self.growth.tolist(), len(self.held)
        missing = [0] * (n - len(self.remaining)) + self.remaining.tolist()
        grown, ended_at, computed_after = [0] * n, [-1] * n, [0] * n
        peak, plan = sum(held) + sum(length for length, _ in self.shared), 0
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
            chunk = self.chunk
            if decoding:
                room = max(self.most_beside - len(decoding), self.least_beside)
                chunk, left = min(chunk, self.beside), min(left, room)
            for i in running:
                if missing[i]:
                    taken = min(missing[i], chunk, left)
                    missing[i] -= taken
                    left -= taken
                    computed_after[i] = plan
            for i in decoding:
                grown[i] += 1
            holding = [i for i in range(n) if ended_at[i] < 0 or ended_at[i] + self.late >= plan]
            prefixes = sum(length for length, holders in self.shared if set(holders.tolist()) & set(holding))
            peak = max(peak, sum(held[i] + grown[i] for i in holding) + prefixes)


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
    _, latest = prompt_plans(np.full(64, 100), StepLimits(8192, 7, 8192, 8192, 8192), rows=64)
    assert latest.max() == 15


def test_no_requests() -> None:
    none = np.empty(0, np.int64)
    assert future_peak(demand(none, none), late=1) == 0
    assert scenario_peaks(demand(none, none), np.empty((3, 0), np.int64), late=1).tolist() == [0, 0, 0]


@pytest.mark.parametrize("late", [0, 1])
def test_shared_prefixes_count_once_until_the_last_holder_ends(late: int) -> None:
    rng = np.random.default_rng(300 + late)
    for _ in range(CASES):
        case = Case.draw(rng, late, prompts=0).share(rng)
        assert case.estimate() == case.run().peak, case
        case = Case.draw(rng, late, prompts=int(rng.integers(1, 9))).share(rng)
        assert case.estimate() >= case.run().peak, case


@pytest.mark.parametrize("late", [0, 1])
def test_the_peaks_of_scenarios_are_bounds_close_to_the_exact_ones(late: int) -> None:
    """With nothing in the way they are exact for one plan in flight, and a row per end at once too high for two."""
    rng = np.random.default_rng(400 + late)
    for _ in range(CASES // 4):
        case = Case.draw(rng, late, prompts=int(rng.integers(0, 3))).share(rng)
        of = case.as_demand()
        growths = np.stack([case.growth, rng.integers(0, 30, len(case.held)), np.zeros_like(case.growth)])
        for growth, peak in zip(growths, scenario_peaks(of, growths, late)):
            exact = future_peak(of._replace(growth=growth), late)
            assert exact <= peak <= exact + len(case.held) * (late + int(of.latest.max()))
            if late == 0 and not len(case.remaining):
                assert peak == exact


# ---- what the policies believe


def waiting(limit: int, open_ended: bool = False, **sampling) -> Request:
    (one,) = Request.sequences_of(request(1, 10, limit, open_ended=open_ended, **sampling), 0, prompt_cache=True)
    return one


def expected(policy: PastFuture | Conservative, one: Request) -> int:
    one.hint = policy.hint(one)
    policy.admitted(one)
    return one.expected


def see(policy: PastFuture, length: int, count: int, **asked) -> None:
    """So many requests begin and end with outputs of a length."""
    for _ in range(count):
        one = waiting(**asked)
        expected(policy, one)
        policy.ended(one, length)


def test_past_future_counts_limits_until_outputs_have_ended() -> None:
    policy = PastFuture(1000, late=1)
    assert expected(policy, waiting(100, stop_token_ids=[3])) == 100
    see(policy, 20, 50, limit=100, stop_token_ids=[3])
    assert expected(policy, waiting(100, stop_token_ids=[3])) == 20


def test_kinds_of_requests_have_their_own_past() -> None:
    """Long limits say nothing of short ones, and who ignores the end of sequence gives all that is allowed."""
    policy = PastFuture(10**4, late=1)
    see(policy, 20, 50, limit=100, stop_token_ids=[3])
    see(policy, 900, 50, limit=4000, stop_token_ids=[3])
    see(policy, 100, 50, limit=100)
    assert expected(policy, waiting(100, stop_token_ids=[3])) == 20
    assert expected(policy, waiting(4000, stop_token_ids=[3])) == 900
    assert expected(policy, waiting(100)) == 100


def test_open_ended_requests_are_expected_to_end_early() -> None:
    """Counted at the whole context, one or two chats would fill the pool."""
    for policy in (PastFuture(10**6, late=1), Conservative(10**6, late=1)):
        assert 100 < expected(policy, waiting(100_000, open_ended=True)) < 2000


def test_lengths_are_drawn_from_the_longer_ones_and_move_only_with_growth() -> None:
    lengths = OutputLengths(512)
    for length in range(1, 101):
        lengths.end(7, lengths.admit(7), length)
    luck = np.linspace(0, 0.99, 12)[:, None]
    kinds, limits = np.array([7]), np.array([100])
    previous = np.zeros((12, 1))
    for generated in range(0, 110):
        predicted = lengths.predict(kinds, np.array([generated]), limits, luck)
        assert (predicted > min(generated, 99)).all() and (predicted <= 100).all()
        assert (predicted >= previous - 1).all(), "a prediction fell although the output has grown"
        previous = predicted
    assert (previous == 100).all(), "nothing was longer: the limit"


def test_running_outputs_count_as_longer_than_they_are() -> None:
    """When half of what began together has ended, the rest is known to be longer: the prediction is not biased."""
    rng = np.random.default_rng(0)
    true = np.sort(rng.integers(1, 1001, 400))
    lengths = OutputLengths(512)
    numbers = [lengths.admit(12) for _ in true]
    for number, length in zip(numbers[:200], true[:200].tolist()):
        lengths.end(12, number, length)
    still = np.full(200, int(true[200]))
    columns = np.full(201, 12), np.append(still, 0), np.full(201, 4000)
    predicted = lengths.predict(*columns, np.tile((np.arange(1000)[:, None] + 0.5) / 1000, (1, 201)))
    assert abs(np.quantile(predicted[:, -1], 0.25) - np.quantile(true, 0.25)) < 20
    assert np.mean(predicted[:, -1] >= true[200]) == pytest.approx(0.5, abs=0.02)


def test_old_requests_are_forgotten() -> None:
    lengths = OutputLengths(512)
    late = lengths.admit(7)
    for length in (1000, 20):
        for _ in range(WINDOW):
            lengths.end(7, lengths.admit(7), length)
    lengths.end(7, late, 1000)
    kinds, none, limits = np.array([[7], [0], [4000]])
    assert (lengths.predict(kinds, none, limits, np.linspace(0, 0.99, 50)[:, None]) == 20).all()


@pytest.mark.parametrize("late", [0, 1])
def test_past_future_admits_all_that_conservative_admits(late: int) -> None:
    rng = np.random.default_rng(500 + late)
    admitted = 0
    for _ in range(CASES // 4):
        case = Case.draw(rng, late, prompts=int(rng.integers(0, 9))).share(rng)
        of = case.as_demand()._replace(hints=rng.random((len(case.held), SCENARIOS)))
        pool = int(case.run().peak * rng.uniform(0.8, 1.3))
        if Conservative(pool, late).admits(of):
            admitted += 1
            assert PastFuture(pool, late).admits(of)
    assert admitted > CASES // 10


def test_past_future_is_reproducible() -> None:
    first, second = PastFuture(100, late=1), PastFuture(100, late=1)
    assert (first.hint(waiting(5)) == second.hint(waiting(5))).all()


def test_every_policy_can_be_chosen() -> None:
    (flag,) = (flag for flag in fields(ServerArgs) if flag.name == "schedule_policy")
    assert flag.metadata["choices"] == list(POLICIES)
