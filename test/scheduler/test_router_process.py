"""The router as its own process: two worker ranks, the detokenizer and two fronts are played over real sockets."""

import select
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.schedulers import make_scheduler
from support.server import until
from support.simulated_worker import SimulatedWorker, expected_output, request

from lightllm.server.core.channel import Inbox, Outbox, wait
from lightllm.server.core.messages import (
    AbortRequest,
    Compiled,
    CompileRequest,
    EngineInfo,
    ForgetRequest,
    Load,
    LoadReport,
    LoadRequest,
    Message,
    StepPlan,
    StopRequest,
    TokenBatch,
    unpack,
)
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.router import manager
from lightllm.server.router.compiling import NUM_UNUSED, Compiling
from lightllm.utils.process_utils import ChildProcess

TIMEOUT = 120.0
POOL = 200
ENGINE = EngineInfo(
    model_type="llama",
    dtype="float32",
    device="CPU",
    vocab_size=320,
    eos_token_ids=[],
    max_total_token_num=POOL,
    max_req_total_len=150,
    running_max_req_size=512,
)


class Receiver:
    """An inbox, read one message at a time."""

    def __init__(self, socket_dir: str, name: str, *kinds: type[Message]):
        self._inbox = Inbox(socket_dir, name, kinds)
        self._messages: list[Message] = []

    def arrived(self) -> list[Message]:
        messages, self._messages = self._messages + self._inbox.receive(), []
        return messages

    def next(self) -> Message:
        deadline = time.monotonic() + TIMEOUT
        while not (messages := self.arrived()):
            assert time.monotonic() < deadline
            wait(self._inbox, timeout=1)
        self._messages = messages[1:]
        return messages[0]


class Server:
    """A router process and everybody around it."""

    def __init__(self, socket_dir: str, engine: EngineInfo = ENGINE, **flags: float):
        args = ServerArgs(tp=2, httpserver_workers=2, chunked_prefill_size=16, batch_max_tokens=64, **flags)
        self.ranks = [
            Receiver(socket_dir, f"worker{rank}", StepPlan, CompileRequest, ForgetRequest) for rank in range(2)
        ]
        self.detokenizer = Receiver(socket_dir, "detok", TokenBatch)
        self.fronts = [Receiver(socket_dir, f"front{index}", LoadReport) for index in range(2)]
        self.child = ChildProcess(
            "lightllm-router",
            "lightllm.server.router.manager:main",
            {"args": msgspec.to_builtins(args), "socket_dir": socket_dir},
        )
        self.child.send({"engine": msgspec.structs.asdict(engine)})
        self.router = Outbox(socket_dir, "router")
        self.worker = SimulatedWorker(POOL, 64, 16, plans_in_flight=2)
        self.finish: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}

    def answer_one_plan(self) -> None:
        """Takes the next plan, which both ranks get, and answers the oldest."""
        plan, same = (rank.next() for rank in self.ranks)
        assert isinstance(plan, StepPlan) and plan == same
        self.worker.launch(plan)
        self.router.send(self.worker.result())

    def answer_plans_in_flight(self) -> None:
        for plan in self.ranks[0].arrived():
            assert isinstance(plan, StepPlan)
            self.worker.launch(plan)
            self.router.send(self.worker.result())

    def read(self, batch: Message) -> None:
        assert isinstance(batch, TokenBatch)
        columns = unpack(batch.sequence_ids, np.int64).tolist(), unpack(batch.tokens, np.int32).tolist(), batch.finishes
        for sequence_id, token, finish in zip(*columns):
            self.tokens.setdefault(sequence_id, []).append(token)
            if finish:
                self.finish[sequence_id] = finish
        for end in batch.ended:
            self.finish[end.sequence_id] = end.finish

    def run_until_ended(self, count: int) -> None:
        while len(self.finish) < count:
            self.answer_one_plan()
            self.read(self.detokenizer.next())
            for batch in self.detokenizer.arrived():
                self.read(batch)

    def load(self, front: int = 0, ticket: int = 1) -> LoadReport:
        self.router.send(LoadRequest(front, ticket))
        report = self.fronts[front].next()
        assert isinstance(report, LoadReport) and report.ticket == ticket
        return report


def event_of(child: ChildProcess) -> tuple[str, object]:
    assert select.select([child.status_fd], [], [], TIMEOUT)[0]
    event = next(iter(child.read_status()))
    return event.kind, event.value


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="router-") as socket_dir:
        server = Server(socket_dir)
        try:
            assert event_of(server.child) == ("ready", {})
            yield server
        finally:
            server.child.send({"stop": True})
            assert server.child.exit_status() == 0


def test_requests_become_tokens(server: Server) -> None:
    requests = [request(number, 20 + number, 10 + number, stop_token_ids=[3]) for number in range(1, 9)]
    for new in requests:
        server.router.send(new)
    server.run_until_ended(len(requests))
    for new in requests:
        assert (server.tokens[new.id], server.finish[new.id]) == expected_output(new.id, new.sampling)


def test_load_is_told_to_the_front_that_asks_also_when_idle(server: Server) -> None:
    assert server.load(front=1, ticket=7) == LoadReport(7, Load())
    server.router.send(request(1, 10, 21))
    server.router.send(request(2, 100, 31))
    server.router.send(request(3, 100, 31))
    while (load := server.load(front=0, ticket=8).load).running < 2:
        server.answer_plans_in_flight()  # else those that came after two plans would wait
    assert (load.running, load.waiting) == (2, 1)
    assert 0 < load.used_tokens <= load.predicted_peak <= POOL


def test_what_can_never_fit_ends_at_the_detokenizer(server: Server) -> None:
    server.router.send(request(1, 100, 100))
    batch = server.detokenizer.next()
    assert isinstance(batch, TokenBatch)
    assert [(end.sequence_id, end.status) for end in batch.ended] == [(8, 400)]


def test_aborts_and_stops_free_everything(server: Server) -> None:
    for number in range(1, 6):
        server.router.send(request(number, 20, 20))
    server.answer_one_plan()
    server.read(server.detokenizer.next())
    server.router.send(StopRequest(8, 1))
    for number in range(2, 6):
        server.router.send(AbortRequest(number << 3))
    while (load := server.load().load).used_tokens:
        server.answer_plans_in_flight()
    assert (load.running, load.waiting) == (0, 0)


def test_a_grammar_is_compiled_by_every_rank_while_others_run(server: Server) -> None:
    waits, fails, leaves = (request(number, 20, 5, guided_grammar=f"grammar {number}") for number in (1, 2, 3))
    for key, new in enumerate((waits, fails, leaves)):
        server.router.send(new)
        assert [rank.next() for rank in server.ranks] == [CompileRequest(key, new.sampling.guided_grammar)] * 2
    assert server.load().load.waiting == 3
    server.router.send(AbortRequest(leaves.id))
    assert server.load().load.waiting == 2
    assert [rank.next() for rank in server.ranks] == [ForgetRequest(2)] * 2
    server.router.send(Compiled(0, ""))
    server.router.send(Compiled(1, "it is nonsense"))
    server.router.send(Compiled(2, ""))
    (end,) = server.detokenizer.next().ended
    assert (end.sequence_id, end.status, end.reason) == (fails.id, 400, "it is nonsense")
    assert [rank.next() for rank in server.ranks] == [ForgetRequest(1)] * 2
    server.router.send(request(4, 20, 5))
    server.run_until_ended(1)
    assert set(server.finish) == {4 << 3}
    server.router.send(Compiled(0, ""))
    server.router.send(Compiled(1, "it is nonsense"))
    server.router.send(Compiled(2, ""))
    server.run_until_ended(2)
    assert server.tokens[waits.id] == expected_output(waits.id, waits.sampling)[0]
    assert set(server.finish) == {waits.id, 4 << 3} and server.load().load.running == 0
    server.router.send(request(5, 20, 5, guided_grammar=waits.sampling.guided_grammar))  # all ranks have it
    server.run_until_ended(3)
    for key, number, gone in ((3, 6, fails), (4, 7, leaves)):
        server.router.send(request(number, 20, 5, guided_grammar=gone.sampling.guided_grammar))
        assert [rank.next() for rank in server.ranks] == [CompileRequest(key, gone.sampling.guided_grammar)] * 2


def test_who_have_the_same_grammar_wait_for_it_together(server: Server) -> None:
    for number in range(1, 4):
        server.router.send(request(number, 20, 5, guided_grammar="grammar"))
    assert server.load().load.waiting == 3
    server.router.send(AbortRequest(1 << 3))
    for _ in server.ranks:
        server.router.send(Compiled(0, ""))
    assert [rank.next() for rank in server.ranks] == [CompileRequest(0, "grammar")] * 2
    server.run_until_ended(2)
    assert set(server.finish) == {2 << 3, 3 << 3}


def test_workers_keep_the_grammars_of_all_who_wait_or_run_and_a_few_more() -> None:
    told: list[Message] = []
    used = {f"grammar {number}" for number in range(0, 600, 2)}  # by requests that the scheduler has
    compiling = Compiling(1, 1000, told.append, lambda: used)
    for number in range(601):
        new = request(number, 20, 5, guided_grammar=f"grammar {number}")
        assert compiling.needs(new) and compiling.add(new) is None
        assert compiling.take(Compiled(number, "")) == [new]
    forgotten = [message.key for message in told if isinstance(message, ForgetRequest)]
    kept = [number for number in range(600) if number not in forgotten]
    assert [number for number in kept if f"grammar {number}" not in used] == list(range(601 - 2 * NUM_UNUSED, 600, 2))
    assert not any(compiling.needs(request(1, 20, 5, guided_grammar=f"grammar {number}")) for number in kept)
    assert compiling.needs(request(1, 20, 5, guided_grammar="grammar 1"))


def test_no_more_sequences_wait_for_their_grammar_than_the_queue_holds() -> None:
    with tempfile.TemporaryDirectory(prefix="router-") as socket_dir:
        server = Server(socket_dir, ENGINE, max_queue=3)
        assert event_of(server.child)[0] == "ready"
        for number, n in ((1, 4), (2, 1)):  # where nothing waits, a request is taken whatever its n
            server.router.send(request(number, 20, 5, guided_grammar=f"grammar {number}", n=n))
        (end,) = server.detokenizer.next().ended
        reason = "4 sequences wait for their grammar; the queue holds 3 (--max_queue)"
        assert (end.sequence_id, end.status, end.reason) == (2 << 3, 429, reason)
        server.router.send(AbortRequest(1 << 3))
        server.router.send(request(3, 20, 5, guided_grammar="grammar 3"))
        assert server.load().load.waiting == 1


def test_ranks_on_gpus_that_do_not_answer_in_time_end_the_router() -> None:
    with tempfile.TemporaryDirectory(prefix="router-") as socket_dir:
        server = Server(socket_dir, msgspec.structs.replace(ENGINE, device="NVIDIA H200"), nccl_timeout=1.0)
        assert event_of(server.child) == ("ready", {})
        server.router.send(request(1, 10, 3))
        assert event_of(server.child) == (
            "failed",
            "TimeoutError: a step of 2 ranks took longer than --nccl_timeout 1 s",
        )
        assert server.child.exit_status() == 1


def test_ranks_owe_an_answer_to_the_oldest_step_in_flight_and_none_when_idle(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(manager, "monotonic", lambda: clock[0])
    scheduler, worker = make_scheduler(pool=POOL, plans=2), SimulatedWorker(POOL, 64, 16, plans_in_flight=2)
    left = partial(manager._time_left, scheduler, 3.0)
    assert left() is None
    scheduler.add(request(1, 10, 3), clock[0])
    for clock[0] in (10.0, 11.0):
        worker.launch(scheduler.schedule(clock[0]))
    assert (left(), manager._time_left(scheduler, None)) == (2.0, None)
    clock[0] = 20.0
    assert left() == 0
    scheduler.update(worker.result(), clock[0])
    assert left() == 0
    worker.launch(scheduler.schedule(clock[0]))
    scheduler.update(worker.result(), clock[0])
    assert left() == 3.0
    scheduler.update(worker.result(), clock[0])
    assert left() is None


def test_an_idle_router_uses_no_time(server: Server) -> None:
    def ticks() -> int:
        fields = Path(f"/proc/{server.child._process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def ticks_of_a_second() -> int:
        before = ticks()
        time.sleep(1)
        return ticks() - before

    server.load()
    until(lambda: ticks_of_a_second() <= 1)  # what came before is done
    assert ticks_of_a_second() <= 1
