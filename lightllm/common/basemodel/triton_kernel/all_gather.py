"""Lines of which each rank holds some columns, joined: through the same memory and in the same way as all_reduce.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.all_reduce import bits_of, place_of, receive
from lightllm.common.triton_utils.dispatch import op
from lightllm.distributed.communication_op import all_gather
from lightllm.distributed.parallel_state import ParallelState

LONGEST_SEGMENT = 4096  # elements of a line that one program sends


@op
def join_columns(x: Tensor, columns: int, parallel: ParallelState) -> Tensor:
    """x [T, n] of every rank -> [T, columns]: side by side in the order of the ranks, without padding at the end."""
    return all_gather(x, parallel)[:, :columns]


@triton.jit
def _join_kernel(
    X, Y, Peers, Turns, n, columns, x_stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, SEGMENT)
    at = tl.program_id(0) * SEGMENT + d
    mask = at < n
    DTYPE: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    EMPTY: tl.constexpr = -(1 << (BITS - 1))  # -0.0
    place = line * tl.num_programs(0) + tl.program_id(0)
    turn = tl.load(Turns + place)
    own = bits_of(tl.load(X + line * x_stride + at, mask=mask, other=0.0), DTYPE, EMPTY)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(place_of(Peers, peer, RANK, turn, place, LINES, WIDTH, RANKS, DTYPE) + d, own, mask=mask)
    for source in tl.static_range(RANKS):
        bits = own
        if source != RANK:
            bits = receive(place_of(Peers, RANK, source, turn, place, LINES, WIDTH, RANKS, DTYPE) + d, mask, EMPTY)
        column = source * n + at
        y = bits.to(Y.dtype.element_ty, bitcast=True)
        tl.store(Y + line * columns + column, y, mask=mask & (column < columns))
    tl.store(Turns + place, 1 - turn)


@join_columns.kernel
def _join_columns(x: Tensor, columns: int, parallel: ParallelState) -> Tensor:
    peers, (lines, n) = parallel.peers, x.shape
    if peers is None or x.dtype != peers.dtype:
        return all_gather(x, parallel)[:, :columns]
    segment = min(LONGEST_SEGMENT, triton.next_power_of_2(peers.width + 1) // 2)
    segments = triton.cdiv(n, segment)
    if lines * segments > peers.most_lines:
        return all_gather(x, parallel)[:, :columns]
    y = torch.empty(lines, columns, dtype=x.dtype, device=x.device)
    parallel.progress.collectives += 1
    if lines:
        _join_kernel[(segments, lines)](
            x, y, peers.pointers, peers.turns, n, columns, x.stride(0),
            RANK=parallel.rank, RANKS=parallel.size, LINES=peers.lines, WIDTH=peers.width, BITS=8 * x.itemsize,
            SEGMENT=segment,
            num_warps=8,
        )  # fmt: skip
    return y
