"""The two collectives of tensor parallelism. With one rank both are free."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightllm.distributed.parallel_state import ParallelState


class RankLost(RuntimeError):
    """A collective failed: another rank has gone or kept this one waiting too long. The group is of no use any more."""


def all_reduce(x: Tensor, parallel: ParallelState) -> Tensor:
    """Sum of x over the ranks, in place; x must be contiguous."""
    if parallel.group is not None:
        with _collective(parallel):
            parallel.group.allreduce([x]).wait()
    return x


def all_gather(x: Tensor, parallel: ParallelState) -> Tensor:
    """x [T, n] of every rank, joined along the last dimension in rank order: [T, n * size]."""
    if parallel.group is None:
        return x
    gathered = torch.empty(parallel.size, *x.shape, dtype=x.dtype, device=x.device)
    with _collective(parallel):
        parallel.group._allgather_base(gathered.flatten(0, 1), x.contiguous()).wait()
    return gathered.transpose(0, 1).reshape(len(x), -1)


@contextmanager
def _collective(parallel: ParallelState) -> Iterator[None]:
    parallel.progress.collectives += 1
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"rank {parallel.rank} of {parallel.size} lost the others: {error}") from error
