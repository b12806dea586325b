"""A scheduler with its simulated worker: everything that comes out is kept and checked as it comes."""

from collections import defaultdict
from collections.abc import Callable, Collection

import numpy as np
from support.invariants import check_scheduler
from support.schedulers import make_scheduler
from support.simulated_worker import SimulatedWorker, expected_output

from lightllm.server.core.messages import Finish, GenerateRequest, StopRequest, TokenBatch, sample_of, unpack


class Trace:
    """A scheduler, its worker, and what has come out for each sequence."""

    def __init__(
        self,
        pool: int,
        rows: int,
        budget: int,
        chunk: int,
        plans: int,
        failing: Collection[int] = (),
        policy: str = "conservative",
        **scheduling,
    ):
        self.pauses = policy != "conservative"
        self.scheduler = make_scheduler(
            pool, rows, budget, chunk, plans, queue=10**6, longest=2048, policy=policy, **scheduling
        )
        self.worker = SimulatedWorker(pool, budget, min(chunk, budget), plans, failing, full_chunks=not self.pauses)
        self.requests: dict[int, GenerateRequest] = {}  # by sequence id
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finish: dict[int, Finish] = {}
        self.stopped: set[int] = set()
        self.announced: set[int] = set()
        self.started: set[int] = set()
        self.cached: dict[int, int] = {}  # of those that found any of their prompt
        self.prompt_logprobs: dict[int, list[float]] = defaultdict(list)

    def add(self, new: GenerateRequest) -> None:
        for sample in range(new.sampling.n):
            self.requests[new.id | sample] = new
        self.scheduler.add(new)
        self.read()

    def abort(self, request_id: int) -> None:
        self.scheduler.abort(request_id)
        self.read()

    def stop(self, sequence_id: int) -> None:
        if sequence_id not in self.finish:
            self.stopped.add(sequence_id)
        self.scheduler.stop(StopRequest(sequence_id, len(self.tokens[sequence_id])))
        self.read()

    def plan(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.worker.launch(plan)
        if not self.pauses:
            assert self.worker.idle <= self.finish.keys() | self.stopped, "a row that could decode was left out"
        check_scheduler(self.scheduler)
        return True

    def result(self) -> None:
        self.scheduler.update(self.worker.result())
        self.read()
        check_scheduler(self.scheduler)

    def step(self) -> None:
        """As many plans as may be in flight, and the oldest one's result."""
        while self.plan():
            pass
        self.result()

    def run_to_end(self, after_step: Callable[[], None] = lambda: None) -> None:
        """Everything that was asked runs to its end, exactly as it would alone."""
        while self.scheduler.has_work or self.worker.flying:
            self.step()
            after_step()
        self.check_end()

    def read(self) -> None:
        if batch := self.scheduler.take_output():
            self._read(batch)
        assert self.scheduler.take_output() is None

    def _read(self, batch: TokenBatch) -> None:
        for new in batch.new:
            assert new.sequence_id not in self.announced
            self.announced.add(new.sequence_id)
            assert new.prompt_tail == self.requests[new.sequence_id].prompt_ids[-64:]
        for start in batch.started:
            assert start.sequence_id not in self.started and not self.tokens[start.sequence_id]
            self.started.add(start.sequence_id)
            if start.cached_tokens:
                self.cached[start.sequence_id] = start.cached_tokens
        ids = unpack(batch.sequence_ids, np.int64).tolist()
        columns = unpack(batch.tokens, np.int32).tolist(), unpack(batch.logprobs, np.float32).tolist(), batch.finishes
        tops = {top.index: top for top in batch.top}
        for index, (sequence_id, token, logprob, finish) in enumerate(zip(ids, *columns, strict=True)):
            assert sequence_id in self.announced
            assert sequence_id not in self.finish and sequence_id not in self.stopped, "a token after the end"
            self.tokens[sequence_id].append(token)
            assert logprob == -len(self.tokens[sequence_id])
            if self.requests[sequence_id].sampling.logprobs:
                top = tops.pop(index)
                assert unpack(top.ids, np.int32).tolist() == [token]
                assert unpack(top.logprobs, np.float32).tolist() == [logprob]
            if finish:
                self.finish[sequence_id] = Finish(finish)
        assert not tops
        for part in batch.prompt:
            places = unpack(part.logprobs, np.float32).tolist()
            self.prompt_logprobs[part.owner] += places
            assert places[0] == part.start
        for ended in batch.ended:
            assert ended.sequence_id not in self.finish and ended.sequence_id not in self.stopped, "a second end"
            self.finish[ended.sequence_id] = Finish(ended.finish)

    def check_end(self) -> None:
        """Everything has ended exactly once, exactly as expected unless it was interrupted, and everything is free."""
        assert self.requests.keys() == self.finish.keys() | self.stopped
        assert not self.finish.keys() & self.stopped
        for sequence_id, new in self.requests.items():
            tokens, finish = expected_output(sequence_id, new.sampling)
            got = self.tokens[sequence_id]
            if sequence_id in self.stopped or self.finish[sequence_id] in (Finish.ABORT, Finish.ERROR):
                assert got == tokens[: len(got)] and len(got) < len(tokens)
            else:
                assert (got, self.finish[sequence_id]) == (tokens, finish)
                if new.sampling.prompt_logprobs is not None and sample_of(sequence_id) == 0:
                    assert self.prompt_logprobs[sequence_id] == list(range(1, len(new.prompt_ids) // 4))
        load = self.scheduler.load()
        assert (load.used_tokens, load.running, load.waiting, load.paused) == (0, 0, 0, 0)
        assert self.scheduler.pool.free_count + load.cached_tokens == self.scheduler.pool.size
        assert self.pauses or not load.pauses_total, "a conservative scheduler pauses nobody"
        check_scheduler(self.scheduler)
