"""The scheduler, one behaviour at a time."""

import numpy as np
import pytest
from support.invariants import check_scheduler
from support.schedulers import make_scheduler
from support.simulated_worker import SimulatedWorker, request, token_at

from lightllm.server.core.messages import (
    Ended,
    Finish,
    Load,
    StepPlan,
    StepResult,
    StopRequest,
    TokenBatch,
    pack,
    unpack,
)
from lightllm.server.router.scheduler import SHORT_STEP, Scheduler


def column(plan: StepPlan, name: str) -> list[int]:
    return unpack(getattr(plan, name), np.uint8 if name == "samples" else np.int32).tolist()


def next_plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def answer(
    scheduler: Scheduler, plan: StepPlan, token: int = 7, failed=(), refused=(), seconds: float = 0.0
) -> TokenBatch | None:
    """Every row that the plan samples gets `token`, after the device was at it for so many seconds."""
    rows = unpack(plan.rows, np.int32)[unpack(plan.samples, np.uint8) == 1]
    tokens, logprobs = pack([token] * len(rows), np.int32), pack([-1.0] * len(rows), np.float32)
    result = StepResult(plan.step, rows.tobytes(), tokens, logprobs, [], [], list(failed), seconds, list(refused))
    scheduler.update(result)
    return scheduler.take_output()


def finishes(batch: TokenBatch | None) -> dict[int, int]:
    assert batch is not None
    return dict(zip(unpack(batch.sequence_ids, np.int64).tolist(), batch.finishes))


def ended(scheduler: Scheduler) -> list[Ended]:
    batch = scheduler.take_output()
    return batch.ended if batch else []


def used(scheduler: Scheduler) -> int:
    return scheduler.load().used_tokens


# ---- refusals


@pytest.mark.parametrize("pool, limit, named", [(100, 100, "100 tokens"), (1000, 500, "500 tokens")])
def test_what_can_never_fit_is_refused_at_once_and_blocks_nobody(pool: int, limit: int, named: str) -> None:
    scheduler = make_scheduler(pool=pool)
    scheduler.add(request(1, 60, limit))
    scheduler.add(request(2, 5, 5))
    (refusal,) = ended(scheduler)
    assert (refusal.sequence_id, refusal.finish, refusal.status) == (8, Finish.ERROR, 400)
    assert named in refusal.reason
    assert [new.sequence_id for new in next_plan(scheduler).new_rows] == [16]


def test_a_request_may_fill_the_pool_to_the_last_slot() -> None:
    scheduler = make_scheduler(pool=20, plans=2)
    worker = SimulatedWorker(20, 64, 16, 2)
    scheduler.add(request(1, 10, 11))
    while scheduler.has_work:
        while plan := scheduler.schedule():
            worker.launch(plan)
        scheduler.update(worker.result())
        check_scheduler(scheduler)
    assert finishes(scheduler.take_output()) == {8: Finish.LENGTH}


def test_a_full_queue_refuses_with_429_and_takes_again_later() -> None:
    scheduler = make_scheduler(rows=1, queue=2)
    for number in range(1, 5):
        scheduler.add(request(number, 4, 1))
    refused = ended(scheduler)
    assert [(end.sequence_id, end.status) for end in refused] == [(32, 429)]
    assert "max_queue" in refused[0].reason
    answer(scheduler, next_plan(scheduler))
    next_plan(scheduler)
    scheduler.add(request(5, 4, 1))
    assert not ended(scheduler)


def test_every_sequence_of_a_refused_request_ends() -> None:
    scheduler = make_scheduler(pool=10)
    scheduler.add(request(1, 60, 60, n=3))
    assert [end.sequence_id for end in ended(scheduler)] == [8, 9, 10]
    assert not scheduler.has_work


# ---- plans


def test_the_next_plan_does_not_wait_for_the_result() -> None:
    scheduler = make_scheduler(plans=2)
    scheduler.add(request(1, 5, 10))
    first, second = next_plan(scheduler), next_plan(scheduler)
    assert (first.num_decode, column(first, "lengths"), column(first, "samples")) == (0, [5], [1])
    assert (second.num_decode, column(second, "starts"), column(second, "lengths")) == (1, [5], [1])
    assert scheduler.schedule() is None
    answer(scheduler, first)
    assert column(next_plan(scheduler), "starts") == [6]


def test_one_plan_in_flight() -> None:
    scheduler = make_scheduler(plans=1)
    scheduler.add(request(1, 5, 10))
    plan = next_plan(scheduler)
    assert scheduler.schedule() is None
    answer(scheduler, plan)
    assert next_plan(scheduler).num_decode == 1


def test_a_third_plan_is_in_flight_while_steps_are_short() -> None:
    scheduler = make_scheduler(plans=2, plans_of_short_steps=3)
    scheduler.add(request(1, 5, 20))

    def planned() -> list[StepPlan]:
        return list(iter(scheduler.schedule, None))

    flying = planned()
    assert len(flying) == 2  # nothing is known yet
    for seconds, most in ((SHORT_STEP / 2, 3), (SHORT_STEP / 2, 3), (SHORT_STEP, 2), (SHORT_STEP / 2, 3), (0.0, 2)):
        answer(scheduler, flying.pop(0), seconds=seconds)
        flying += planned()
        assert len(flying) == most


def test_a_known_end_is_never_planned_past() -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, 5, 1))
    plan = next_plan(scheduler)
    assert scheduler.schedule() is None
    assert finishes(answer(scheduler, plan)) == {8: Finish.LENGTH}
    assert used(scheduler) == 0


def test_decode_rows_first_then_chunks_in_order_of_arrival() -> None:
    scheduler = make_scheduler(budget=20, chunk=16)
    scheduler.add(request(1, 3, 10))
    next_plan(scheduler)
    for number in (2, 3, 4):
        scheduler.add(request(number, 18, 10))
    plan = next_plan(scheduler)
    rows = {new.sequence_id: new.row for new in plan.new_rows}
    assert plan.num_decode == 1
    assert column(plan, "lengths") == [1, 16, 3]
    assert column(plan, "rows")[1:] == [rows[16], rows[24]]
    assert column(plan, "samples") == [1, 0, 0]


def test_who_comes_first_in_line_begins_before_prompts_that_cannot_begin_yet() -> None:
    """A row is given when its prompt can soon be computed, so that a flood does not hold all of them."""
    scheduler = make_scheduler(budget=20, chunk=20, rows=64)
    for number in range(1, 31):
        scheduler.add(request(number, 10, 10))
    plan = next_plan(scheduler)
    assert len(plan.new_rows) == 3 and scheduler.load().waiting == 27
    scheduler.add(request(40, 10, 10, priority=1))
    begun: list[int] = []
    while 40 << 3 not in begun:
        answer(scheduler, plan)
        plan = next_plan(scheduler)
        begun += [new.sequence_id for new in plan.new_rows]
    assert begun[0] == 40 << 3
    check_scheduler(scheduler)


def test_short_prompts_need_not_wait_for_a_long_one() -> None:
    """It fills steps in which nobody decodes, but has only its chunk of those beside decoding rows."""
    scheduler = make_scheduler(budget=40, chunk=40, rows=64, mixed_prefill_size=5)
    scheduler.add(request(1, 300, 10))
    scheduler.add(request(2, 10, 10))
    assert [new.sequence_id for new in next_plan(scheduler).new_rows] == [8, 16]


def test_a_long_prompt_never_starves_decode() -> None:
    scheduler = make_scheduler(budget=8, chunk=8, plans=1)
    for number in range(1, 5):
        scheduler.add(request(number, 1, 90))
    answer(scheduler, next_plan(scheduler))
    scheduler.add(request(5, 400, 10))
    for _ in range(80):
        plan = next_plan(scheduler)
        assert plan.num_decode == 4 and column(plan, "lengths")[4:] == [4]
        answer(scheduler, plan)


def test_there_are_no_more_rows_than_a_step_has_tokens() -> None:
    scheduler = make_scheduler(budget=3, chunk=100, rows=50, plans=1)
    for number in range(1, 8):
        scheduler.add(request(number, 1, 50))
    for _ in range(20):
        plan = next_plan(scheduler)
        assert sum(column(plan, "lengths")) <= 3
        answer(scheduler, plan)
    assert plan.num_decode == 3


def test_the_samples_of_a_request_are_sequences() -> None:
    scheduler = make_scheduler(chunk=64)
    scheduler.add(request(1, 40, 5, n=3))
    plan = next_plan(scheduler)
    assert [new.sequence_id for new in plan.new_rows] == [8]
    following = next_plan(scheduler)
    assert [new.sequence_id for new in following.new_rows] == [9, 10], "they wait for their prompt"
    assert [len(new.cached) // 4 for new in following.new_rows] == [39, 39]
    announced = scheduler.take_output().new
    assert [new.sequence_id for new in announced] == [8, 9, 10]
    assert unpack(announced[0].prompt_tail, np.int32).tolist() == list(range(1024, 1040))


def test_rows_of_ended_sequences_serve_new_ones_in_the_same_plan() -> None:
    scheduler = make_scheduler(rows=1)
    scheduler.add(request(1, 4, 1))
    scheduler.add(request(2, 4, 1))
    first = next_plan(scheduler)
    answer(scheduler, first)
    second = next_plan(scheduler)
    assert column(second, "ended") == [first.new_rows[0].row] == [second.new_rows[0].row]


def test_waiting_sequences_start_as_soon_as_the_peak_fits() -> None:
    """Two of 10 + 31 tokens hold 80 slots together; with 79 the second waits a plan."""
    for pool, expected in ((80, [8, 16]), (79, [8])):
        scheduler = make_scheduler(pool=pool, plans=1)
        scheduler.add(request(1, 10, 31))
        scheduler.add(request(2, 10, 31))
        assert [new.sequence_id for new in next_plan(scheduler).new_rows] == expected


def test_the_smallest_that_fits_passes_one_that_does_not() -> None:
    scheduler = make_scheduler(pool=100)
    scheduler.add(request(1, 10, 50))
    scheduler.add(request(2, 50, 50))
    scheduler.add(request(3, 3, 3))
    scheduler.add(request(4, 1, 1))
    scheduler.add(request(5, 60, 50))
    assert [new.sequence_id for new in next_plan(scheduler).new_rows] == [8, 32]


# ---- ends


def run_to_end(scheduler: Scheduler, pool: int = 1000) -> dict[int, tuple[list[int], int]]:
    """Tokens and finish of every sequence."""
    worker = SimulatedWorker(pool, 64, 16, 2)
    got: dict[int, tuple[list[int], int]] = {}
    while scheduler.has_work:
        while plan := scheduler.schedule():
            worker.launch(plan)
        scheduler.update(worker.result())
        batch = scheduler.take_output()
        if batch is None:
            continue
        columns = unpack(batch.sequence_ids, np.int64).tolist(), unpack(batch.tokens, np.int32).tolist(), batch.finishes
        for sequence_id, token, finish in zip(*columns):
            got[sequence_id] = (got.get(sequence_id, ([], 0))[0] + [token], finish)
    return got


def tokens_of(sequence_id: int, count: int) -> list[int]:
    return [token_at(sequence_id, index) for index in range(count)]


def test_a_stop_id_ends_with_its_token() -> None:
    scheduler = make_scheduler()
    tokens = tokens_of(8, 30)
    stop = tokens[6]
    scheduler.add(request(1, 4, 30, stop_token_ids=[99, stop]))
    end = tokens.index(stop) + 1
    assert run_to_end(scheduler) == {8: (tokens[:end], Finish.STOP)}


def test_a_token_sequence_ends_with_its_last_token() -> None:
    scheduler = make_scheduler()
    tokens = tokens_of(8, 30)
    scheduler.add(request(1, 4, 30, stop_sequences=["text", tokens[9:14]]))
    assert run_to_end(scheduler) == {8: (tokens[:14], Finish.STOP)}


def test_no_stop_counts_before_min_new_tokens() -> None:
    scheduler = make_scheduler()
    tokens = tokens_of(8, 30)
    scheduler.add(request(1, 4, 30, stop_token_ids=tokens[:5], stop_sequences=[tokens[1:4]], min_new_tokens=25))
    expected = next(count for count in range(25, 31) if tokens[count - 1] in tokens[:5] or count == 30)
    assert run_to_end(scheduler)[8][0] == tokens[:expected]


def test_results_of_an_ended_row_are_dropped_and_its_slots_wait_for_them() -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, 5, 10, stop_token_ids=[7]))
    first, second = next_plan(scheduler), next_plan(scheduler)
    assert finishes(answer(scheduler, first)) == {8: Finish.STOP}
    assert used(scheduler) == 6 and not scheduler.has_work
    assert answer(scheduler, second) is None
    assert used(scheduler) == 0
    check_scheduler(scheduler)


def test_abort_while_waiting() -> None:
    scheduler = make_scheduler(rows=1)
    scheduler.add(request(1, 5, 10))
    next_plan(scheduler)
    scheduler.add(request(2, 5, 10, n=2))
    scheduler.take_output()
    scheduler.abort(16)
    assert [(end.sequence_id, end.finish) for end in ended(scheduler)] == [(16, Finish.ABORT), (17, Finish.ABORT)]
    assert scheduler.load().waiting == 0


@pytest.mark.parametrize("prompt_len", [5, 100])  # decoding, prefilling
def test_abort_in_flight_frees_within_two_steps(prompt_len: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, prompt_len, 10))
    first, second = next_plan(scheduler), next_plan(scheduler)
    scheduler.take_output()
    scheduler.abort(8)
    assert [(end.sequence_id, end.finish, end.status) for end in ended(scheduler)] == [(8, Finish.ABORT, 0)]
    assert used(scheduler) > 0
    assert answer(scheduler, first) is None and answer(scheduler, second) is None
    assert used(scheduler) == 0 and scheduler.schedule() is None
    scheduler.add(request(2, 5, 10))
    assert column(next_plan(scheduler), "ended") == [column(first, "rows")[0]]


def test_abort_with_no_step_in_flight_frees_at_once() -> None:
    scheduler = make_scheduler(plans=1)
    scheduler.add(request(1, 5, 10))
    answer(scheduler, next_plan(scheduler))
    scheduler.abort(8)
    assert used(scheduler) == 0
    check_scheduler(scheduler)


def test_abort_of_what_has_ended_or_never_was() -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, 5, 1))
    answer(scheduler, next_plan(scheduler))
    scheduler.abort(8)
    scheduler.abort(800)
    assert scheduler.take_output() is None


def test_a_stop_string_ends_silently() -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, 5, 10))
    first, second = next_plan(scheduler), next_plan(scheduler)
    answer(scheduler, first)
    scheduler.stop(StopRequest(8, 1))
    scheduler.stop(StopRequest(8, 1))
    assert answer(scheduler, second) is None
    assert used(scheduler) == 0 and not scheduler.has_work


def test_a_failed_row_ends_with_500_and_the_others_go_on() -> None:
    scheduler = make_scheduler()
    scheduler.add(request(1, 5, 10))
    scheduler.add(request(2, 5, 10))
    first, second = next_plan(scheduler), next_plan(scheduler)
    row = next(new.row for new in first.new_rows if new.sequence_id == 8)
    scheduler.take_output()
    batch = answer(scheduler, first, failed=[(row, "it broke")])
    assert batch.ended == [Ended(8, Finish.ERROR, 500, "it broke")]
    assert finishes(batch) == {16: Finish.NONE}
    assert finishes(answer(scheduler, second)) == {16: Finish.NONE}
    assert column(next_plan(scheduler), "rows") == [next(new.row for new in first.new_rows if new.sequence_id == 16)]


def test_a_refused_row_ends_with_400_and_its_prompt_is_there_for_others() -> None:
    scheduler = make_scheduler(chunk=64)
    scheduler.add(request(1, 40, 5, n=2))
    first, second = next_plan(scheduler), next_plan(scheduler)
    scheduler.take_output()
    batch = answer(scheduler, first, refused=[(first.new_rows[0].row, "it cannot be")])
    assert batch.ended == [Ended(8, Finish.ERROR, 400, "it cannot be")]
    assert finishes(batch) == {}, "what it sampled is not told"
    assert finishes(answer(scheduler, second)) == {9: Finish.NONE}


def test_load() -> None:
    scheduler = make_scheduler(rows=1)
    assert scheduler.load() == Load()
    scheduler.add(request(1, 10, 6))
    scheduler.add(request(2, 10, 6))
    next_plan(scheduler)
    load = scheduler.load()
    assert (load.used_tokens, load.predicted_peak, load.running, load.waiting) == (10, 15, 1, 1)


def test_steps_that_give_no_token_are_progress() -> None:
    """/health looks for it: a long prompt on a slow machine may take minutes."""
    scheduler = make_scheduler(rows=1, plans=1, chunked_prefill_size=4)
    scheduler.add(request(1, prompt_len=10, max_new_tokens=2))
    for steps in (1, 2):
        answer(scheduler, next_plan(scheduler))
        assert (scheduler.load().steps_total, scheduler.load().output_tokens_total) == (steps, 0)


def test_prompts_make_way_for_decoding_rows() -> None:
    """One has 2 tokens of a step beside them, which has 8 with theirs; without them it has 16 of 64."""
    scheduler = make_scheduler(rows=16, plans=1, mixed_prefill_size=2)
    scheduler.add(request(1, prompt_len=4, max_new_tokens=30))
    answer(scheduler, next_plan(scheduler))
    for number in range(2, 14):
        scheduler.add(request(number, prompt_len=20, max_new_tokens=30))
    plan = next_plan(scheduler)
    assert plan.num_decode == 1 and column(plan, "lengths") == [1, 2, 2, 2, 1]
    scheduler.abort(1 << 3)
    answer(scheduler, plan)
    assert column(next_plan(scheduler), "lengths") == [16, 16, 16, 16]
