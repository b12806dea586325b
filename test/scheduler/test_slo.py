"""Times to meet: --tpot_slo shapes the chunks, --ttft_slo orders and refuses. A clock that the steps move on."""

from collections import deque
from typing import NamedTuple

import numpy as np
import pytest
from support.invariants import check_scheduler
from support.schedulers import make_scheduler
from support.simulated_worker import SimulatedWorker, request

from lightllm.server.core.messages import Ended, unpack


class Step(NamedTuple):
    end: float
    seconds: float
    decoding: int
    prompt_tokens: int


class Clocked:
    """A scheduler whose steps take `base` + `per_token` x tokens seconds, one after the other."""

    def __init__(
        self,
        base: float,
        per_token: float,
        rows: int = 16,
        budget: int = 512,
        plans: int = 2,
        pool: int = 20_000,
        **slo,
    ):
        self.scheduler = make_scheduler(pool, rows, budget, budget, plans, 10**6, 10_000, **slo)
        self.worker = SimulatedWorker(pool, budget, budget, plans, full_chunks=False)
        self.base, self.per_token = base, per_token
        self.now = 0.0
        self.steps: list[Step] = []
        self._flying: deque[Step] = deque()
        self.asked: dict[int, float] = {}
        self.first_token: dict[int, float] = {}
        self.refused: dict[int, Ended] = {}
        self.refused_at: dict[int, float] = {}

    def add(self, number: int, prompt_len: int, max_new_tokens: int, **parameters) -> None:
        self.asked[number] = self.now
        self.scheduler.add(request(number, prompt_len, max_new_tokens, **parameters), self.now)
        self._read()

    def launch(self) -> bool:
        plan = self.scheduler.schedule(self.now)
        if plan is None:
            return False
        named = unpack(plan.rows, np.int32)
        leaving = set(unpack(plan.ended, np.int32).tolist())
        ready = {row for row, s in self.worker.rows.items() if s.prompt_computed and s.can_compute} - leaving
        assert ready == set(named[: plan.num_decode].tolist()), "a row that could decode was left out"
        tokens = int(unpack(plan.lengths, np.int32).sum())
        self.worker.launch(plan)
        start = max(self.now, self._flying[-1].end if self._flying else 0.0)
        seconds = self.base + self.per_token * tokens
        self._flying.append(Step(start + seconds, seconds, plan.num_decode, tokens - plan.num_decode))
        self.steps.append(self._flying[-1])
        return True

    def step(self) -> None:
        """To the end of the oldest step in flight."""
        while self.launch():
            pass
        if self._flying:
            self.now = self._flying.popleft().end
            self.scheduler.update(self.worker.result(), self.now)
        self._read()

    def _read(self) -> None:
        batch = self.scheduler.take_output()
        if batch is None:
            return
        for sequence_id in unpack(batch.sequence_ids, np.int64).tolist():
            self.first_token.setdefault(sequence_id >> 3, self.now)
        for ended in batch.ended:
            number = ended.sequence_id >> 3
            assert ended.status == 429 and "--ttft_slo" in ended.reason
            assert number not in self.first_token and number not in self.refused
            self.refused[number], self.refused_at[number] = ended, self.now

    def run_until(self, time: float) -> None:
        while self.now < time and self.scheduler.has_work:
            self.step()
        self.now = max(self.now, time)

    def finish(self) -> None:
        while self.scheduler.has_work or self._flying:
            self.step()
        check_scheduler(self.scheduler)
        assert self.asked.keys() == self.first_token.keys() | self.refused.keys()

    def wait(self, number: int) -> float:
        """Seconds until the first token."""
        return self.first_token[number] - self.asked[number]


# ---- time between tokens

COSTS = [(0.01, 0.0005), (0.03, 0.0002), (0.001, 0.001), (0.06, 0.0001)]


def with_decoding(base: float, per_token: float, **options) -> Clocked:
    """Six rows decode; prompts of 800 tokens come all the time."""
    clocked = Clocked(base, per_token, **options)
    for number in range(1, 7):
        clocked.add(number, 5, 400)
    clocked.step()
    for number in range(7, 15):
        clocked.add(number, 800, 10)
    return clocked


@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize(("base", "per_token"), COSTS, ids=str)
def test_mixed_steps_keep_the_time_between_tokens(base: float, per_token: float, plans: int) -> None:
    """Once it is known what a prompt token costs; and they do not compute much less than the time allows."""
    slo = 0.1
    clocked = with_decoding(base, per_token, plans=plans, tpot_slo=slo)
    clocked.finish()
    mixed = [step for step in clocked.steps if step.decoding and step.prompt_tokens]
    settled = mixed[10:]
    assert len(settled) > 10
    assert max(step.seconds for step in settled) <= slo
    full = [step for step in settled if step.prompt_tokens > 16][:-8]
    allowed = min(512, (slo - base) / per_token)
    assert np.median([step.prompt_tokens for step in full]) >= 0.6 * allowed


def test_without_it_chunks_are_whole() -> None:
    clocked = with_decoding(0.01, 0.0005)
    clocked.finish()
    assert max(step.prompt_tokens for step in clocked.steps if step.decoding) > 500


@pytest.mark.parametrize("base", [0.1, 0.5])
def test_prompts_go_on_when_decoding_alone_takes_too_long(base: float) -> None:
    clocked = with_decoding(base, 0.0005, tpot_slo=0.1)
    before = len(clocked.steps)
    clocked.finish()
    with_prompts = [step.prompt_tokens > 0 for step in clocked.steps[before:]]
    assert sum(with_prompts) > 100 and all(with_prompts[: sum(with_prompts)]), "a step without, though prompts wait"


def test_chunks_grow_again_when_steps_become_fast() -> None:
    clocked = with_decoding(0.05, 0.001, tpot_slo=0.1)
    for _ in range(20):
        clocked.step()
    slow = clocked.steps[-1].prompt_tokens
    clocked.base, clocked.per_token = 0.01, 0.0002
    clocked.finish()
    assert max(step.prompt_tokens for step in clocked.steps[25:] if step.decoding) > 4 * slow
    assert max(step.seconds for step in clocked.steps[25:] if step.decoding) <= 0.1


def test_chunks_are_whole_while_nobody_decodes() -> None:
    clocked = Clocked(0.01, 0.001, tpot_slo=0.05)
    for number in range(1, 5):
        clocked.add(number, 1024, 1)
    clocked.finish()
    assert [step.prompt_tokens for step in clocked.steps] == [512] * 8


# ---- time to the first token


def test_who_cannot_begin_in_time_is_refused_and_the_others_begin() -> None:
    """One row, a second each: of ten that come at once, five or six can begin within five seconds."""
    clocked = Clocked(0.1, 0.0, rows=1, ttft_slo=5.0)
    for number in range(1, 11):
        clocked.add(number, 5, 10)
    clocked.finish()
    served = sorted(clocked.first_token)
    assert served == list(range(1, len(served) + 1)) and 5 <= len(served) <= 6
    assert all(clocked.wait(number) <= 5.0 + 0.2 for number in served)
    assert all(clocked.refused_at[number] <= 5.0 + 0.2 for number in clocked.refused), "sooner than never"


def test_without_it_everybody_waits() -> None:
    clocked = Clocked(0.1, 0.0, rows=1)
    for number in range(1, 11):
        clocked.add(number, 5, 10)
    clocked.finish()
    assert not clocked.refused and clocked.wait(10) > 8.0


def test_early_refusal_where_the_queue_is_long() -> None:
    """Once it is known how fast the queue moves, nobody is let wait in vain: the answer comes at once."""
    clocked = Clocked(0.1, 0.0, rows=1, ttft_slo=5.0)
    for number in range(1, 101):
        clocked.add(number, 5, 10)
        clocked.run_until(clocked.now + 0.5)
    clocked.finish()
    late = [number for number in clocked.refused if clocked.refused_at[number] > clocked.asked[number] + 1.0]
    assert 30 <= len(clocked.refused) <= 60
    assert len(late) <= 5
    assert all(clocked.wait(number) <= 5.0 + 0.2 for number in clocked.first_token)


def test_with_little_to_do_nobody_is_refused() -> None:
    clocked = Clocked(0.1, 0.0, rows=4, ttft_slo=2.0)
    for number in range(1, 101):
        clocked.add(number, 5, 10)
        clocked.run_until(clocked.now + 0.3)
    clocked.finish()
    assert not clocked.refused


def test_a_burst_after_a_quiet_time_is_not_refused() -> None:
    """The queue did not move for a thousand seconds because nobody was in it. The burst could all begin in three."""
    clocked = Clocked(0.1, 0.0, rows=4, ttft_slo=10.0)
    clocked.now = 5.0
    clocked.add(1, 5, 10)
    clocked.run_until(1000.0)
    for number in range(2, 10):
        clocked.add(number, 5, 10)
    clocked.run_until(1000.3)
    for number in range(10, 14):
        clocked.add(number, 5, 10)
    clocked.finish()
    assert not clocked.refused


def test_a_long_prompt_after_short_ones_is_not_refused() -> None:
    """Steps have taken 20 ms with a prompt token each. That does not make 500 prompt tokens take ten seconds."""
    clocked = Clocked(0.02, 0.0001, ttft_slo=1.0)
    for number in range(1, 101):
        clocked.add(number, 1, 3)
        clocked.step()
    clocked.run_until(clocked.now + 1.0)
    clocked.add(200, 500, 3)
    clocked.finish()
    assert not clocked.refused and clocked.wait(200) < 0.2


def test_a_prompt_that_the_cache_knows_is_not_refused_for_its_length() -> None:
    """4000 tokens take 1.2 seconds, but the last alone 0.02."""
    clocked = Clocked(0.02, 0.0003, ttft_slo=1.5)
    for number in range(1, 21):
        clocked.add(number, 4000, 3, ids=list(range(4000)))
        clocked.run_until(clocked.now + 2.0)
    clocked.finish()
    assert not clocked.refused


def test_a_prompt_that_the_cache_knows_may_wait_as_long_as_a_short_one() -> None:
    """It begins half a second later: with 1.2 seconds for the whole prompt that would be too late."""
    clocked = Clocked(0.02, 0.0003, rows=1, ttft_slo=1.5)
    for number in range(1, 4):
        clocked.add(number, 4000, 3, ids=list(range(4000)))
        clocked.run_until(clocked.now + 2.0)
    clocked.add(4, 5, 25)
    clocked.step()
    clocked.add(5, 4000, 3, ids=list(range(4000)))
    clocked.finish()
    assert not clocked.refused and 0.4 < clocked.wait(5) < 0.8


def test_the_longer_prompt_goes_first_if_it_must() -> None:
    """Both came at once; to be in time the one of 2000 tokens has to begin two seconds earlier."""
    clocked = Clocked(0.01, 0.001, rows=1, ttft_slo=4.0)
    for number in range(1, 30):
        clocked.add(number, 300, 1)
        clocked.run_until(clocked.now + 0.5)
    clocked.add(40, 300, 100)
    clocked.step()
    clocked.add(41, 10, 1)
    clocked.add(42, 2000, 1)
    clocked.finish()
    assert clocked.first_token[42] < clocked.first_token[41] and not clocked.refused


@pytest.mark.parametrize("load", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_starves(seed: int, load: float) -> None:
    """Each begins in about its time or is told within it; both at any load and with any mixture of lengths."""
    rng = np.random.default_rng(seed)
    clocked = Clocked(0.02, 0.0002, rows=4, ttft_slo=3.0, tpot_slo=0.05)
    for number in range(1, 150):
        long = rng.random() < 0.2
        clocked.add(number, 600 if long else int(rng.integers(1, 50)), int(rng.integers(1, 40)))
        clocked.run_until(clocked.now + float(rng.exponential(0.15 / load)))
    clocked.finish()
    for number in clocked.refused:
        assert clocked.refused_at[number] - clocked.asked[number] <= 3.0 + 0.2
    waits = np.array([clocked.wait(number) for number in clocked.first_token])
    assert np.quantile(waits, 0.95) <= 3.0 + 0.2
    assert len(clocked.first_token) >= (140 if load == 0.5 else 20)
