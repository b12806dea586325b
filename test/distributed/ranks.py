"""What every rank of test_parallel_state.py runs."""

from datetime import timedelta

import torch

from lightllm.distributed.communication_op import RankLost, all_gather, all_reduce
from lightllm.distributed.parallel_state import ParallelState


def agree(rank: int, size: int, meet: str) -> None:
    parallel = ParallelState.init(rank, size, "gloo", meet)
    assert parallel.alike("both say this", 20.0)
    assert not parallel.alike(f"rank {rank} says this", 20.0)
    assert parallel.alike("both say this", 20.0)
    assert all_reduce(torch.ones(2), parallel).tolist() == [size, size]  # nothing is out of step
    if rank == 0:
        parallel.progress.collectives += 1
    assert not parallel.alike("both say this, but one has come further", 20.0)
    if rank == 0:
        assert not parallel.alike("the other says nothing", 0.1)
    parallel.store.set(f"done {rank}", "")
    parallel.store.wait([f"done {r}" for r in range(size)], timedelta(seconds=60))


def lose_a_rank(rank: int, size: int, meet: str) -> None:
    """The last rank joins and then says nothing more, for the first time alive, then gone."""
    parallel = ParallelState.init(rank, size, "gloo", meet)
    assert all_gather(torch.full((1, 1), float(rank)), parallel).tolist() == [[0.0, 1.0]]
    parallel.limit_waiting(0.5)
    if rank == 0:
        try:
            all_reduce(torch.ones(2), parallel)
        except RankLost as error:
            assert "rank 0 of 2 lost the others" in str(error)
        else:
            raise AssertionError("the collective ended without the other rank")
    parallel.store.set(f"done {rank}", "")
    parallel.store.wait([f"done {r}" for r in range(size)], timedelta(seconds=60))
