"""WaitingQueue against a model that sorts anew each time, and fair shares through the scheduler."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
import pytest
from support.simulated_worker import request
from support.trace import Trace

from lightllm.server.router import waiting_queue
from lightllm.server.router.request import Request
from lightllm.server.router.waiting_queue import INPUT_WEIGHT, OUTPUT_WEIGHT, WaitingQueue


def waiting(
    number: int,
    client: str = "",
    priority: int = 0,
    due: float = float("inf"),
    paused: bool = False,
    prompt_len: int = 10,
) -> Request:
    (sequence,) = Request.sequences_of(request(number, prompt_len, 5, client=client, priority=priority), number, True)
    sequence.due, sequence.paused = due, paused
    return sequence


def numbers(requests: Iterable[Request]) -> list[int]:
    return [sequence.arrival for sequence in requests]


def queue_of(*requests: Request, fair: bool = False) -> WaitingQueue:
    queue = WaitingQueue(fair)
    for sequence in requests:
        queue.add(sequence)
    return queue


class QueueModel:
    """A list that is searched for whoever is next."""

    def __init__(self, fair: bool):
        self.fair = fair
        self.waiting: list[Request] = []
        self.served: defaultdict[str, float] = defaultdict(float)
        self.last_to_leave = ""

    def client(self, sequence: Request) -> str:
        return sequence.client if self.fair else ""

    def add(self, sequence: Request) -> None:
        client = self.client(sequence)
        backlogged = {self.client(other) for other in self.waiting}
        if client not in backlogged:
            least = min((self.served[other] for other in backlogged), default=self.served[self.last_to_leave])
            self.served[client] = max(self.served[client], least)
        self.waiting.append(sequence)

    def remove(self, sequence: Request) -> None:
        self.waiting.remove(sequence)
        client = self.client(sequence)
        if client not in map(self.client, self.waiting):
            self.last_to_leave = client

    def order(self) -> list[int]:
        left, served, order = list(self.waiting), dict(self.served), []
        while left:
            # Within a client by rank; among clients paused ones and priorities first, then the least served.
            lines = defaultdict(list)
            for sequence in left:
                lines[self.client(sequence)].append(sequence)
            heads = [min(line, key=lambda s: (not s.paused, -s.priority, s.due, s.arrival)) for line in lines.values()]
            head = min(
                heads,
                key=lambda s: (not s.paused, -s.priority, served.get(self.client(s), 0.0), s.due, s.arrival),
            )
            left.remove(head)
            order.append(head.arrival)
            served[self.client(head)] = served.get(self.client(head), 0.0) + INPUT_WEIGHT * len(head.ids)
        return order


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_against_the_model(fair: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    queue, model = WaitingQueue(fair), QueueModel(fair)
    for number in range(1, 150):
        if rng.random() < 0.6 or not model.waiting:
            sequence = waiting(
                number,
                client="abcde"[rng.integers(5)],
                priority=int(rng.integers(-1, 2)) if rng.random() < 0.3 else 0,
                due=float(rng.integers(100)) if rng.random() < 0.5 else float("inf"),
                paused=rng.random() < 0.1,
                prompt_len=int(rng.integers(1, 50)),
            )
            queue.add(sequence)
            model.add(sequence)
        else:
            place = rng.integers(len(model.waiting)) if rng.random() < 0.3 else 0
            sequence = next(s for s in model.waiting if s.arrival == model.order()[place])
            queue.remove(sequence)
            model.remove(sequence)
            prompt, output = (int(rng.integers(0, 50)) for _ in range(2))
            queue.served(sequence, prompt, output)
            if fair:
                model.served[sequence.client] += INPUT_WEIGHT * prompt + OUTPUT_WEIGHT * output
        assert numbers(queue) == model.order()
        assert len(queue) == len(model.waiting)


# ---- order


def test_first_come_first_served() -> None:
    assert numbers(queue_of(*map(waiting, (3, 1, 2)))) == [1, 2, 3]


def test_paused_then_priority_then_due_then_arrival() -> None:
    queue = queue_of(
        waiting(1),
        waiting(2, due=9.0),
        waiting(3, due=3.0),
        waiting(4, priority=1),
        waiting(5, priority=-1, due=1.0),
        waiting(6, priority=-1, paused=True),
        waiting(7, paused=True),
    )
    assert numbers(queue) == [7, 6, 4, 3, 2, 1, 5]


def test_removal_of_any_and_return() -> None:
    requests = [waiting(number, client=str(number % 3)) for number in range(1, 10)]
    queue = queue_of(*requests)
    for sequence in requests[::2]:
        queue.remove(sequence)
    assert numbers(queue) == [2, 4, 6, 8]
    requests[8].paused = True
    queue.add(requests[8])
    assert numbers(queue) == [9, 2, 4, 6, 8] and len(queue) == 5


def test_overdue() -> None:
    early, late, paused, gone = waiting(1, due=1.0), waiting(2, due=2.0), waiting(3, due=1.0), waiting(4, due=1.0)
    queue = queue_of(early, late, paused, gone, waiting(5))
    queue.remove(gone)
    queue.remove(paused)
    paused.paused = True
    queue.add(paused)
    assert queue.overdue(1.0) == []
    assert queue.overdue(1.5) == [early]
    queue.remove(early)
    assert queue.overdue(9.0) == [late]
    assert numbers(queue) == [3, 2, 5], "they are told, not removed"


@pytest.mark.parametrize("seed", range(3))
def test_overdue_against_a_list(seed: int) -> None:
    rng = np.random.default_rng(seed)
    queue, all_waiting = WaitingQueue(fair=bool(seed % 2)), []
    for now in range(1, 200):
        for place in range(rng.integers(0, 3)):
            sequence = waiting(3 * now + place, client=str(rng.integers(3)), due=now + float(rng.integers(1, 20)))
            queue.add(sequence)
            all_waiting.append(sequence)
        if all_waiting and rng.random() < 0.5:
            queue.remove(all_waiting.pop(rng.integers(len(all_waiting))))
        late = [sequence for sequence in all_waiting if sequence.due < now]
        assert sorted(numbers(queue.overdue(now))) == sorted(numbers(late))
        for sequence in late:
            queue.remove(sequence)
            all_waiting.remove(sequence)


# ---- fair shares


def test_without_fair_share_a_client_is_nobody() -> None:
    queue = queue_of(waiting(1, "a"), waiting(2, "a"), waiting(3, "b"))
    queue.served(waiting(4, "a"), output_tokens=1000)
    assert numbers(queue) == [1, 2, 3]


def test_clients_take_turns_by_what_their_prompts_cost() -> None:
    """Three prompts of 10 tokens are as dear as one of 30."""
    flood = [waiting(number, "flood", prompt_len=10) for number in range(1, 8)]
    rare = [waiting(number, "rare", prompt_len=30) for number in range(8, 10)]
    assert numbers(queue_of(*flood, *rare, fair=True)) == [1, 8, 2, 3, 4, 9, 5, 6, 7]


def test_priority_goes_before_fairness() -> None:
    queue = queue_of(waiting(1, "a"), waiting(2, "b", priority=1), waiting(3, "b", priority=1), fair=True)
    queue.served(waiting(4, "b"), output_tokens=1000)
    assert numbers(queue) == [2, 3, 1]


def test_nobody_gets_credit_for_idle_time_while_others_wait() -> None:
    busy = [waiting(number, "busy") for number in range(1, 50)]
    queue = queue_of(*busy, fair=True)
    for sequence in busy[:40]:
        queue.remove(sequence)
        queue.served(sequence, 10, 10)
    for number in range(50, 60):
        queue.add(waiting(number, "idle"))
    assert numbers(queue)[:6] in ([41, 50, 42, 51, 43, 52], [50, 41, 51, 42, 52, 43])


def test_nobody_gets_credit_for_idle_time_while_nobody_waits() -> None:
    """All of the busy client run, and the queue is empty, when the idle one comes: they start as equals (OSDI'24)."""
    busy = [waiting(number, "busy") for number in range(1, 17)]
    queue = queue_of(*busy, fair=True)
    for sequence in busy:
        queue.remove(sequence)
        queue.served(sequence, prompt_tokens=10)
    for sequence in busy:
        queue.served(sequence, output_tokens=1000)
    for number in range(20, 40):
        queue.add(waiting(number, "busy" if number % 2 else "idle"))
    first = Counter("busy" if number % 2 else "idle" for number in numbers(queue)[:10])
    assert first == {"busy": 5, "idle": 5}


def test_leaving_and_coming_back_loses_no_debt() -> None:
    queue = queue_of(waiting(1, "a"), waiting(2, "b"), fair=True)
    served = waiting(3, "a")
    queue.add(served)
    queue.served(served, output_tokens=1000)
    for sequence in list(queue):
        if sequence.client == "a":
            queue.remove(sequence)
    queue.add(waiting(4, "a"))
    queue.add(waiting(5, "b"))
    assert numbers(queue) == [2, 5, 4]


def test_clients_that_wait_are_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_queue, "MAX_CLIENTS", 10)
    queue = WaitingQueue(fair=True)
    for number in range(1, 100):
        queue.add(waiting(number, client=str(number)))
        if number % 3:
            queue.remove(next(sequence for sequence in queue if sequence.arrival == number))
    assert sorted(numbers(queue)) == list(range(3, 100, 3)) and len(queue) == 33


def test_many_clients_that_come_and_go_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_queue, "MAX_CLIENTS", 10)
    queue = WaitingQueue(fair=True)
    for number in range(1, 1000):
        sequence = waiting(number, client=str(number))
        queue.add(sequence)
        queue.remove(sequence)
    assert len(queue._clients) <= 10


# ---- through the scheduler

ROWS = 4


def make(**scheduling) -> Trace:
    return Trace(2000, rows=ROWS, budget=64, chunk=32, plans=2, fair_share=True, **scheduling)


def test_a_flood_delays_nobody_else() -> None:
    """Behind 200 requests of another client, each of a few is the next to get a row."""
    trace = make()
    for number in range(1, 201):
        trace.add(request(number, 10, 20, client="flood"))
    for _ in range(60):
        trace.step()
    for number in range(300, 303):
        trace.add(request(number, 10, 20, client="rare"))
        ahead = len(trace.worker.started)
        while number << 3 not in trace.worker.started:
            trace.step()
        assert trace.worker.started.index(number << 3) <= ahead + 1
    for number in range(1, 201):
        trace.abort(number << 3)
    while trace.scheduler.has_work or trace.worker.flying:
        trace.step()
    trace.check_end()


@pytest.mark.parametrize("sizes", [((10, 20), (10, 20)), ((40, 30), (3, 4)), ((2, 60), (60, 2))], ids=str)
def test_two_clients_that_always_wait_are_served_alike(sizes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """Their weighted tokens differ by no more than twice what may run at once (theorem 4.4 of the paper)."""
    trace = make()
    clients = "ab"
    for number in range(1, 201):
        prompt_len, output = sizes[number % 2]
        trace.add(request(number, prompt_len, output, client=clients[number % 2]))
    most = ROWS * max(INPUT_WEIGHT * prompt_len + OUTPUT_WEIGHT * output for prompt_len, output in sizes)
    served: Counter[str] = Counter()
    while min(Counter(sequence.client for sequence in trace.scheduler._queue).get(c, 0) for c in clients) > 0:
        trace.step()
        served = Counter(dict.fromkeys(clients, 0))
        for sequence_id in trace.worker.started:
            new = trace.requests[sequence_id]
            served[new.client] += INPUT_WEIGHT * len(new.prompt_ids) // 4
            served[new.client] += OUTPUT_WEIGHT * len(trace.tokens[sequence_id])
        assert abs(served["a"] - served["b"]) <= 2 * most
    assert min(served.values()) > 2 * most, "the trace is too short to tell"


def test_cached_prompt_tokens_cost_nothing() -> None:
    """A client whose prompts are found in the cache gets more of them started than one whose prompts are new."""
    trace = make()
    ids = list(range(5000, 5060))
    trace.add(request(1, 60, 1, ids, client="known"))
    while trace.scheduler.has_work or trace.worker.flying:
        trace.step()
    for number in range(2, 100):
        client = ("known", "new")[number % 2]
        trace.add(request(number, 60, 2, ids if client == "known" else None, client=client))
    for _ in range(30):
        trace.step()
    started = Counter(trace.requests[sequence_id].client for sequence_id in trace.worker.started)
    assert started["known"] > 3 * started["new"] > 0
