"""The two collectives of tensor parallelism. With one rank both are free."""

from __future__ import annotations

import torch
from torch import Tensor

from lightllm.distributed.parallel_state import ParallelState


def all_reduce(x: Tensor, parallel: ParallelState) -> Tensor:
    """Sum of x over the ranks, in place; x must be contiguous."""
    if parallel.group is not None:
        parallel.group.allreduce([x]).wait()
    return x


def all_gather(x: Tensor, parallel: ParallelState) -> Tensor:
    """x [T, n] of every rank, joined along the last dimension in rank order: [T, n * size]."""
    if parallel.group is None:
        return x
    gathered = torch.empty(parallel.size, *x.shape, dtype=x.dtype, device=x.device)
    parallel.group.allgather([list(gathered)], [x.contiguous()]).wait()
    return gathered.transpose(0, 1).reshape(len(x), -1)
