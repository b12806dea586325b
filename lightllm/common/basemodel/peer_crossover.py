"""Up to which size sums over ranks go through memory that GPUs share: measured when a model is loaded."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from lightllm.common.basemodel.halves import first_half
from lightllm.common.basemodel.triton_kernel.all_reduce import one_shot
from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm
from lightllm.common.triton_utils.timing import graph_microseconds
from lightllm.distributed.communication_op import all_gather, all_reduce
from lightllm.distributed.parallel_state import ParallelState
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)

LINES = (64, 128, 256, 512, 1024, 2048)  # of the sums that are timed; the last is what the memory has room for
CALLS = 10  # in one CUDA graph


def share_peer_memory(parallel: ParallelState, width: int, dtype: torch.dtype, tokens: int) -> ParallelState:
    """`parallel` with memory for sums of up to `tokens` lines of `width`; in one shot up to the size at which NCCL is
    faster: the same on all ranks. As it is where ranks cannot share memory."""
    parallel = parallel.with_peers(LINES[-1], width, dtype, first_half(tokens) * width)
    peers = parallel.peers
    if peers is None:
        return parallel
    most_lines = 0
    for lines in LINES:
        x = torch.zeros(lines, width, dtype=dtype, device=peers.turns.device)
        ours = partial(one_shot, x, x, x[0], 1e-5, parallel, peers)
        if _microseconds(ours, parallel) > _microseconds(partial(_through_nccl, x, parallel), parallel):
            break
        most_lines = lines
    largest = most_lines * width * dtype.itemsize
    logger.info("sums over ranks of up to %d KB go through shared memory, larger ones through NCCL", largest >> 10)
    return replace(parallel, peers=replace(peers, most_lines=most_lines) if most_lines else None)


def _through_nccl(x: torch.Tensor, parallel: ParallelState) -> None:
    add_rmsnorm(all_reduce(x, parallel), x, x[0], 1e-5)


def _microseconds(call: Callable[[], object], parallel: ParallelState) -> float:
    """Of one call, on the slowest rank."""
    taken = torch.full((1, 1), graph_microseconds([call] * CALLS), device="cuda")
    return float(all_gather(taken, parallel).max())
