"""The scheduler where much happens at once: full queues, n samples, mass arrivals, aborts and ends, logprobs."""

import numpy as np
import pytest
from support.invariants import check_scheduler
from support.schedulers import make_scheduler
from support.simulated_worker import SimulatedWorker, request

from lightllm.common.kv_cache_mem_manager import radix_cache
from lightllm.server.core.messages import Finish, PromptLogprobs, StepResult, TopLogprobs, pack, request_of, unpack
from lightllm.server.router.candidates import Candidates
from lightllm.server.router.row_table import RowTable
from lightllm.server.router.scheduler import Scheduler


def make(pool: int = 1000, rows: int = 64, budget: int = 512, chunk: int = 64, queue: int = 4000, plans: int = 2):
    return make_scheduler(pool, rows, budget, chunk, plans, queue, longest=512)


def counting(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[int]:
    """How often a method is called."""
    calls = [0]
    method = getattr(owner, name)

    def counted(*args):
        calls[0] += 1
        return method(*args)

    monkeypatch.setattr(owner, name, counted)
    return calls


def idle(scheduler: Scheduler) -> bool:
    load = scheduler.load()
    return not (load.used_tokens or load.predicted_peak or load.running or load.waiting)


# ---- the queue


def test_a_request_of_many_samples_is_taken_where_nothing_waits() -> None:
    """Refused, it would be refused for ever: its n is more than the queue holds."""
    scheduler = make(rows=2, queue=4)
    scheduler.add(request(1, 5, 5, n=8))
    scheduler.add(request(2, 5, 5))
    batch = scheduler.take_output()
    assert batch is not None and [(end.sequence_id, end.status) for end in batch.ended] == [(16, 429)]
    assert len(batch.new) == 8


def test_what_can_run_at_once_is_not_refused() -> None:
    scheduler = make(rows=6, queue=1)
    for number in range(1, 9):
        scheduler.add(request(number, 5, 5))
    batch = scheduler.take_output()
    assert batch is not None
    assert [request_of(end.sequence_id) >> 3 for end in batch.ended] == [8], "six run, one waits"
    load = scheduler.load()
    assert (load.running, load.waiting) == (6, 1)


def test_no_sequence_of_a_refused_request_stays() -> None:
    scheduler = make(rows=1, queue=3)
    for number in (1, 2):
        scheduler.add(request(number, 5, 5))
    scheduler.add(request(3, 5, 5, n=4))
    batch = scheduler.take_output()
    assert batch is not None and [end.sequence_id for end in batch.ended] == [24, 25, 26, 27]
    check_scheduler(scheduler)
    load = scheduler.load()
    assert (load.running, load.waiting) == (1, 1)


# ---- much at once


@pytest.mark.parametrize("fitting", [0, 1, 2, 3, 7, 8, 20, 63, 64])
def test_a_burst_is_admitted_as_one_by_one(fitting: int) -> None:
    """As many from the head of the queue as the peak allows, with few looks at the peak."""
    scheduler = make(pool=max(1, fitting) * 10, budget=4096)
    if fitting == 0:
        scheduler.add(request(500, 5, 6))  # fills the pool
        scheduler.schedule()
    for number in range(1, 101):
        scheduler.add(request(number, 5, 6))
    plan = scheduler.schedule()
    assert plan is not None
    assert [new.sequence_id >> 3 for new in plan.new_rows] == list(range(1, fitting + 1))


def test_a_burst_looks_at_the_peak_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(pool=10**5, rows=512, budget=4096)
    for number in range(1, 1001):
        scheduler.add(request(number, 5, 6))
    looks = counting(monkeypatch, Candidates, "demand")
    plan = scheduler.schedule()
    assert plan is not None and len(plan.new_rows) == 512
    assert looks[0] <= 20
    looks[0] = 0
    scheduler.schedule()
    assert looks[0] <= 1, "no row is free"


def test_a_flood_that_is_refused_looks_at_the_peak_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, worker = make(pool=100, queue=4), SimulatedWorker(100, 512, 64, 2)
    for number in range(1, 6):
        scheduler.add(request(number, 50, 50))
        if plan := scheduler.schedule():
            worker.launch(plan)
    looks = counting(monkeypatch, Candidates, "demand")
    for step in range(1, 4):
        for number in range(100 * step, 100 * step + 50):
            scheduler.add(request(number, 50, 50))
        batch = scheduler.take_output()
        assert batch is not None and [end.status for end in batch.ended] == [429] * 50
        assert looks[0] <= 2 * step
        if step < 3:
            scheduler.update(worker.result())


def test_who_waits_for_a_long_prefix_compares_each_part_of_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, common = [0], radix_cache._common

    def counted(a: np.ndarray, b: np.ndarray) -> int:
        compared[0] += (length := common(a, b))
        return length

    monkeypatch.setattr(radix_cache, "_common", counted)
    scheduler = make_scheduler(pool=10**4, rows=64, budget=256, chunk=64, longest=5000)
    worker = SimulatedWorker(10**4, 256, 64, 2)
    document = list(range(4000))
    for number in range(1, 21):
        scheduler.add(request(number, len(document) + 1, 2, [*document, 5000 + number]))
    while scheduler.has_work:
        while plan := scheduler.schedule():
            worker.launch(plan)
        scheduler.update(worker.result())
    assert scheduler.load().cached_prompt_tokens_total > 19 * (len(document) - 64), "they did not wait"
    assert compared[0] <= 2 * 20 * len(document)


def test_2000_waiting_aborted_at_once() -> None:
    scheduler = make(rows=64, queue=2048)
    for number in range(1, 2001):
        scheduler.add(request(number, 50, 100))
    flying = [scheduler.schedule(), scheduler.schedule()]
    scheduler.take_output()
    for number in reversed(range(1, 2001)):
        scheduler.abort(number << 3)
    check_scheduler(scheduler)
    batch = scheduler.take_output()
    assert batch is not None
    assert sorted(end.sequence_id >> 3 for end in batch.ended) == list(range(1, 2001))
    assert not scheduler.has_work
    for plan in flying:
        assert plan is not None
        scheduler.update(StepResult(plan.step, b"", b"", b"", [], [], [], device_seconds=0.25))
    assert scheduler.schedule() is None and idle(scheduler)
    assert scheduler.load().device_seconds_total == 0.5


def test_many_ends_in_one_step_are_freed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make(pool=10**4, rows=256, plans=1)
    worker = SimulatedWorker(10**4, 512, 64, 1)
    for number in range(1, 257):
        scheduler.add(request(number, 2, 1))
    plan = scheduler.schedule()
    assert plan is not None
    worker.launch(plan)
    releases = counting(monkeypatch, RowTable, "release")
    scheduler.update(worker.result())
    assert releases[0] == 1 and idle(scheduler)


# ---- rows that the worker has not heard of


@pytest.mark.parametrize("plans", [1, 2])
def test_a_row_dropped_before_the_worker_heard_of_it(plans: int) -> None:
    """It is neither announced as new nor as ended, and its row serves the next."""
    scheduler = make(rows=1, queue=1, plans=plans)
    worker = SimulatedWorker(1000, 512, 64, plans)
    scheduler.add(request(1, 5, 5))
    scheduler.add(request(2, 5, 5))  # lets the first one in, since the queue is full
    scheduler.abort(8)
    plan = scheduler.schedule()
    assert plan is not None and [new.sequence_id for new in plan.new_rows] == [16]
    assert not plan.ended
    worker.launch(plan)
    check_scheduler(scheduler)


def test_a_row_told_but_not_yet_computed_is_given_up() -> None:
    """The budget went to others; aborted before its first chunk it holds no slot, but the worker knows its row."""
    scheduler = make(budget=8, chunk=8, plans=2)
    worker = SimulatedWorker(1000, 8, 8, 2)
    scheduler.add(request(1, 8, 5))
    scheduler.add(request(2, 30, 5))
    first = scheduler.schedule()
    assert first is not None and len(first.new_rows) == 2
    worker.launch(first)
    scheduler.abort(16)
    second = scheduler.schedule()
    assert second is not None
    worker.launch(second)
    scheduler.update(worker.result())
    third = scheduler.schedule()
    assert third is not None
    (told,) = (new.row for new in first.new_rows if new.sequence_id == 16)
    ended = unpack(second.ended + third.ended, np.int32).tolist()
    assert ended == [told]
    worker.launch(third)
    check_scheduler(scheduler)


@pytest.mark.parametrize("prompt_len", [10, 200])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_eight_samples_aborted(prompt_len: int, after: int) -> None:
    scheduler = make(rows=4, plans=2)
    worker = SimulatedWorker(1000, 512, 64, 2)
    scheduler.add(request(1, prompt_len, 100, n=8))
    for _ in range(after):
        plan = scheduler.schedule()
        assert plan is not None
        worker.launch(plan)
    scheduler.abort(8)
    batch = scheduler.take_output()
    assert batch is not None and [end.sequence_id for end in batch.ended] == list(range(8, 16))
    assert {end.finish for end in batch.ended} == {Finish.ABORT}
    while worker.flying:
        scheduler.update(worker.result())
        check_scheduler(scheduler)
    assert idle(scheduler) and scheduler.take_output() is None


# ---- logprobs


def test_logprobs_go_to_the_tokens_that_are_left() -> None:
    """Of five rows two are aborted between plan and result, over two results in one batch; places move up."""
    scheduler = make(plans=2)
    for number in range(1, 6):
        scheduler.add(request(number, 2, 50, logprobs=1))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    sequence_at = {new.row: new.sequence_id for new in first.new_rows}
    scheduler.take_output()

    def result(plan) -> StepResult:
        rows = unpack(plan.rows, np.int32)
        return StepResult(
            plan.step,
            rows.tobytes(),
            pack(rows + 100, np.int32),
            pack(-rows, np.float32),
            [TopLogprobs(i, pack([row + 100], np.int32), pack([-row], np.float32)) for i, row in enumerate(rows) if i],
            [PromptLogprobs(int(row), 1, pack([-row], np.float32), b"", b"") for row in rows],
            [],
        )

    scheduler.abort(2 << 3)
    scheduler.update(result(first))
    scheduler.abort(4 << 3)
    scheduler.update(result(second))
    batch = scheduler.take_output()
    assert batch is not None
    sequences, tokens = unpack(batch.sequence_ids, np.int64).tolist(), unpack(batch.tokens, np.int32).tolist()
    assert [id >> 3 for id in sequences] == [1, 3, 4, 5, 1, 3, 5]
    assert [sequence_at[token - 100] for token in tokens] == sequences
    without = {sequence_at[int(row)] for row in (unpack(first.rows, np.int32)[0],)}
    assert [top.index for top in batch.top] == [i for i, id in enumerate(sequences) if id not in without]
    for top in batch.top:
        assert unpack(top.ids, np.int32).tolist() == [tokens[top.index]]
    assert [part.owner >> 3 for part in batch.prompt] == [1, 3, 4, 5, 1, 3, 5]
    for part in batch.prompt:
        assert sequence_at[-int(unpack(part.logprobs, np.float32)[0])] == part.owner
