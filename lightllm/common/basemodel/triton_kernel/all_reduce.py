"""Sums over the ranks of a tensor-parallel group, alone and with the residual addition and the norm that follow.

Sums of moderate size go through memory that the ranks share (PeerMemory) in one shot: each rank writes its addend into
a place of its own at every other rank, waits until theirs have arrived, and adds. An empty place holds -0.0, which no
addend contains, so the data is its own signal and there is no barrier. Each line has two places, used in turn: a rank
can be one sum ahead of another but not two, for it needs the other's addend of the sum between. The reader empties a
place; the turn is kept on the device, line by line, so CUDA graphs of different sizes may follow one another freely.
Source: the low-latency protocols of NCCL ("LL") and of TensorRT-LLM ("Lamport").
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm, rmsnorm, whole_of
from lightllm.common.triton_utils.dependent_launch import dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op
from lightllm.distributed.communication_op import all_reduce
from lightllm.distributed.parallel_state import ParallelState
from lightllm.distributed.peer_memory import PeerMemory


@op
def sum_over_ranks(x: Tensor, parallel: ParallelState) -> Tensor:
    """x [T, D] of every rank -> their sum, the same bits on all; x may be overwritten."""
    return all_reduce(x, parallel)


@op
def sum_add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, parallel: ParallelState
) -> tuple[Tensor, Tensor]:
    """x [T, D] of every rank; residual [T, D] and weight [D], the same on all -> add_rmsnorm of the sum of x; x may be
    overwritten. x may be in parts [S, T, D], which are added up and rounded first."""
    if parallel.size == 1:
        return add_rmsnorm(x, residual, weight, eps)
    return add_rmsnorm(all_reduce(whole_of(x, residual.dtype), parallel), residual, weight, eps)


@op
def add_received_rmsnorm(
    x: Tensor, received: Tensor, residual: Tensor, weight: Tensor, eps: float, normed: Tensor, total: Tensor
) -> None:
    """x and received [T, D], the addends of two ranks -> add_rmsnorm of their sum into normed and total [T, D]."""
    total.copy_(x.float() + received.float() + residual.float())
    normed.copy_(rmsnorm.twin(total, weight, eps))


@triton.jit
def place_of(Peers, rank, source, turn, line, LINES: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, DTYPE):
    """Where `rank` receives this line's addend of `source`."""
    start = tl.multiple_of(tl.load(Peers + rank).to(tl.pointer_type(DTYPE)), 16)
    return start + tl.multiple_of(((turn * RANKS + source) * LINES + line) * WIDTH, 16)


@triton.jit
def bits_of(x, DTYPE: tl.constexpr, EMPTY: tl.constexpr):
    """What is sent of x, which is never empty."""
    bits = x.to(DTYPE, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits).to(DTYPE)


@triton.jit
def receive(place, mask, EMPTY: tl.constexpr):
    """Waits until every element under the mask has arrived, and empties the place."""
    bits = tl.load(place, mask=mask, other=0, volatile=True)
    while tl.max((bits == EMPTY).to(tl.int32)) > 0:
        bits = tl.load(place, mask=mask, other=0, volatile=True)
    tl.store(place, tl.full(bits.shape, EMPTY, bits.dtype), mask=mask)
    return bits


@triton.jit
def exchange(x, Outbox, Inbox, at, mask):
    """What the other rank has of x, 16 bits an element, at these places. No two threads may hold the same element."""
    EMPTY: tl.constexpr = -(1 << 15)  # -0.0
    tl.store(Outbox + at, bits_of(x, tl.int16, EMPTY), mask=mask)
    return receive(Inbox + at, mask, EMPTY).to(x.dtype, bitcast=True)


@triton.jit
def _one_shot_kernel(
    X, R, W, Y, S, Peers, Turns, part_stride, x_stride, r_stride, eps,
    D: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, LINES: tl.constexpr,
    WIDTH: tl.constexpr, NORM: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < D
    DTYPE: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    EMPTY: tl.constexpr = -(1 << (BITS - 1))  # -0.0
    if NORM:
        w = tl.load(W + d, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    turn = tl.load(Turns + line)
    x = tl.load(X + line * x_stride + d, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(X + part * part_stride + line * x_stride + d, mask=mask, other=0.0)
    x = x.to(Y.dtype.element_ty)
    bits = bits_of(x, DTYPE, EMPTY)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(place_of(Peers, peer, RANK, turn, line, LINES, WIDTH, RANKS, DTYPE) + d, bits, mask=mask)
    if NORM:
        residual = tl.load(R + line * r_stride + d, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(RANKS):  # in the same order on every rank
        if source == RANK:
            total += x.to(tl.float32)
        else:
            place = place_of(Peers, RANK, source, turn, line, LINES, WIDTH, RANKS, DTYPE) + d
            total += receive(place, mask, EMPTY).to(Y.dtype.element_ty, bitcast=True).to(tl.float32)
    tl.store(Turns + line, 1 - turn)
    if NORM:
        finish_line(total + residual, w, Y + line * D + d, S + line * D + d, mask, eps, D)
    else:
        tl.store(Y + line * D + d, total.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def finish_line(total, w, Y, S, mask, eps, D: tl.constexpr):
    """Stores the total of a line and its norm."""
    rounded = total.to(S.dtype.element_ty)
    tl.store(S, rounded, mask=mask)
    total = rounded.to(tl.float32)
    normed = total * tl.rsqrt(tl.sum(total * total, 0) / D + eps)
    tl.store(Y, (normed.to(Y.dtype.element_ty).to(tl.float32) * w).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _add_received_kernel(X, Received, R, W, Y, S, r_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    at = line * D + d
    mask = d < D
    total = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(Received + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(R + line * r_stride + d, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(W + d, mask=mask, other=0.0).to(tl.float32)
    finish_line(total, w, Y + at, S + at, mask, eps, D)


def _warps(block: int) -> int:
    return min(8, max(4, block // 256))


@add_received_rmsnorm.kernel
def _add_received_rmsnorm(
    x: Tensor, received: Tensor, residual: Tensor, weight: Tensor, eps: float, normed: Tensor, total: Tensor
) -> None:
    lines, dim = x.shape
    block = triton.next_power_of_2(dim)
    _add_received_kernel[(lines,)](
        x, received, residual, weight, normed, total, residual.stride(0), eps,
        D=dim, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip


def one_shot(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, parallel: ParallelState, peers: PeerMemory
) -> tuple[Tensor, Tensor]:
    """sum_add_rmsnorm, or without a residual (the sum, itself), through `peers`, which must have room for x."""
    parts = x if x.dim() == 3 else x[None]
    addend = x if residual is None else residual
    lines, dim = addend.shape
    y = torch.empty(lines, dim, dtype=addend.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    block = triton.next_power_of_2(dim)
    parallel.progress.collectives += 1
    if lines:
        _one_shot_kernel[(lines,)](
            x, addend, x if weight is None else weight, y, total, peers.pointers, peers.turns,
            parts.stride(0), parts.stride(1), addend.stride(0), eps,
            D=dim, PARTS=len(parts), RANK=parallel.rank, RANKS=parallel.size, LINES=peers.lines, WIDTH=peers.width,
            NORM=residual is not None, BITS=8 * y.itemsize, BLOCK=block,
            num_warps=_warps(block), **dependent_launch(y),
        )  # fmt: skip
    return y, total


@sum_over_ranks.kernel
def _sum_over_ranks(x: Tensor, parallel: ParallelState) -> Tensor:
    if parallel.peers is None or not parallel.peers.takes(x):
        return all_reduce(x, parallel)
    return one_shot(x, None, None, 0.0, parallel, parallel.peers)[0]


@sum_add_rmsnorm.kernel
def _sum_add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, parallel: ParallelState
) -> tuple[Tensor, Tensor]:
    if parallel.peers is None or not parallel.peers.takes(residual):
        return sum_add_rmsnorm.twin(x, residual, weight, eps, parallel)
    return one_shot(x, residual, weight, eps, parallel, parallel.peers)
