"""Matrix products of few lines, which only stream the weight: a vector kernel for one line, tensor-core ones to 16,
here and for Hopper in ring_linear.py.

Each may take in what lies before it, the norm of its lines, and what lies behind it: silu of gate and up, or the
residual addition (between two ranks the sum over them too) and what the next product needs to norm that.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.all_reduce import exchange
from lightllm.common.basemodel.triton_kernel.ring_linear import RingConfig, launch_ring, ring_config
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu, silu_and_mul
from lightllm.common.triton_utils.dependent_launch import dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op
from lightllm.common.triton_utils.kernel_tables import kernel_table
from lightllm.distributed.peer_memory import EXCHANGED_LINES, Boxes

MOST_LINES = 16
_MOST_BLOCKS = 1 << 16
MOST_SQUARES = (64, 256, 1024, 4096, 1 << 14)  # that are summed: each is a kernel of its own
VECTOR_SIZES = [
    (4, 256, 4, 2), (4, 256, 4, 4), (4, 256, 4, 6), (4, 512, 4, 4), (4, 1024, 4, 2), (8, 256, 8, 4), (8, 256, 4, 4),
    (8, 512, 4, 1), (8, 512, 4, 2), (8, 512, 8, 2), (16, 256, 4, 1), (16, 256, 8, 4),
]  # fmt: skip
DOT_SIZES = [
    (16, 256, 1, 4, 5), (32, 128, 1, 4, 5), (32, 128, 2, 4, 5), (32, 256, 1, 4, 4), (32, 256, 2, 4, 4),
    (64, 128, 1, 4, 5), (64, 128, 2, 4, 5), (128, 128, 1, 8, 4),
]  # fmt: skip


@dataclass(frozen=True)
class SkinnyConfig:
    """One program takes block_n outputs in steps of block_k inputs; `split` programs share the inputs of an output.
    `dot` multiplies on tensor cores; else there is one line only, no split, and num_stages blocks are on their way
    before the line is needed. block_n divides the outputs, block_k * split (block_k * num_stages) the inputs."""

    block_n: int
    block_k: int
    split: int
    dot: bool
    num_warps: int
    num_stages: int

    def fits(self, lines: int, outputs: int, inputs: int) -> bool:
        """Whether it can take a product of these sizes."""
        shares = self.split if self.dot else self.num_stages
        return (self.dot or lines == 1) and outputs % self.block_n == 0 and inputs % (self.block_k * shares) == 0


CANDIDATES = [
    *(SkinnyConfig(n, k, 1, False, warps, ahead) for n, k, warps, ahead in VECTOR_SIZES),
    *(SkinnyConfig(n, k, split, True, warps, stages) for n, k, split, warps, stages in DOT_SIZES),
]


def skinny_config(lines: int, weight: Tensor, gated: bool = False) -> SkinnyConfig | RingConfig | None:
    """The configuration that beats the library at this number of lines on this GPU, None if none is known."""
    if lines > MOST_LINES or not weight.is_cuda or weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        return None
    if lines > 1 and (ring := ring_config(weight, gated)):
        return ring
    return _tuned(1 if lines == 1 else MOST_LINES, *weight.shape, weight.device)


@functools.cache
def _tuned(lines: int, outputs: int, inputs: int, device: torch.device) -> SkinnyConfig | None:
    fields = kernel_table("skinny_linear", device).get(f"{outputs}x{inputs}", {}).get(str(lines))
    return SkinnyConfig(*fields) if fields else None


def forget_tables() -> None:
    """Reads the tables anew."""
    _tuned.cache_clear()


@op
def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: SkinnyConfig | RingConfig | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> Tensor:
    """x [M <= 16, K] times weight [N, K], plus bias [N] -> [M, N], added up in float32. `config` is the kernel's.

    With squares, what add_skinny_linear gave of x, the product is that of the normed lines. `gated`: silu_and_mul of
    the product, [M, N / 2].
    """
    if squares is not None:
        x = (x * torch.rsqrt(squares.sum(0) / x.shape[1] + eps)[:, None]).to(x.dtype)
    y = F.linear(x, weight, bias)
    return silu_and_mul.twin(y) if gated else y


@op
def add_skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    config: SkinnyConfig | RingConfig | None = None,
    boxes: Boxes | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """skinny_linear plus residual [M, N], and two parts of its RMS norm with the weight norm [N] ->
    (the sum, rounded once [M, N]; that times norm [M, N]; sums of squares of blocks of it, float32 [blocks, M])."""
    total = residual + F.linear(x, weight, bias)
    return total, total * norm, total.float().square().sum(1)[None]


@triton.jit
def _rows(block, N, GATED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of the weight that a program has: GATED, one of gate and its partner of up in turn."""
    lane = tl.arange(0, BLOCK_N)
    if GATED:
        return block * (BLOCK_N // 2) + lane // 2 + (lane % 2) * (N // 2)
    return block * BLOCK_N + lane


@triton.jit
def _load_squares(Squares, blocks, M, NORMED: tl.constexpr, BLOCKS: tl.constexpr, LINES: tl.constexpr):
    block, m = tl.arange(0, BLOCKS)[:, None], tl.arange(0, LINES)[None, :]
    if NORMED:
        return tl.load(Squares + block * M + m, mask=(block < blocks) & (m < M), other=0.0)
    return tl.zeros([BLOCKS, LINES], tl.float32)


@triton.jit
def _rounded(x, Y):
    return x.to(Y.dtype.element_ty).to(tl.float32)


@triton.jit
def _sum_of_two_ranks(own, Outbox, Inbox, at, mask, LINES: tl.constexpr, BLOCK_N: tl.constexpr, THREADS: tl.constexpr):
    """own [LINES, BLOCK_N] plus what the other rank's program has there: programs on both ranks wait for each other."""
    if LINES > 1:
        theirs = exchange(own, Outbox, Inbox, at, mask).to(tl.float32)
    else:  # fewer elements than threads: each thread has one of its own, of which the first count
        copies: tl.constexpr = THREADS // BLOCK_N
        lane = tl.arange(0, THREADS)
        each = tl.reshape(tl.broadcast_to(own, [copies, BLOCK_N]), [THREADS])
        each = exchange(each, Outbox, Inbox, tl.program_id(0) * BLOCK_N + lane % BLOCK_N, lane < BLOCK_N)
        each = tl.where(lane < BLOCK_N, each.to(tl.float32), 0.0)
        theirs = tl.sum(tl.reshape(each, [copies, BLOCK_N]), 0)[None, :]
    return own.to(tl.float32) + theirs


@triton.jit
def _finish(
    acc, squares, Bias, R, Norm, Y, Scaled, NewSquares, Outbox, Inbox, n, M, N, K, eps,
    BIAS: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, EXCHANGE: tl.constexpr,
    LINES: tl.constexpr, BLOCK_N: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Stores what becomes of the product acc [LINES, BLOCK_N]."""
    block, m = tl.program_id(0), tl.arange(0, LINES)[:, None]
    if NORMED:
        acc *= tl.rsqrt(tl.sum(squares, 0) / K + eps)[:, None]
    if BIAS:
        acc += tl.load(Bias + n).to(tl.float32)[None, :]
    at = m * N + n[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(_rounded(acc, Y), [LINES, BLOCK_N // 2, 2]))
        acc = _rounded(silu(gate), Y) * up
        at = m * (N // 2) + block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[None, :]
    if ADD:
        residual = tl.load(R + at, mask=m < M, other=0.0).to(tl.float32)
        norm = tl.load(Norm + n).to(tl.float32)[None, :]
        if EXCHANGE:
            acc = _sum_of_two_ranks(acc.to(Y.dtype.element_ty), Outbox, Inbox, at, m < M, LINES, BLOCK_N, THREADS)
        acc = _rounded(acc + residual, Y)
        scaled = acc * norm
        tl.store(Scaled + at, scaled.to(Y.dtype.element_ty), mask=m < M)
        line = tl.arange(0, LINES)
        tl.store(NewSquares + block * M + line, tl.sum(acc * acc, 1), mask=line < M)
    tl.store(Y + at, acc.to(Y.dtype.element_ty), mask=m < M)


@triton.jit
def _append(blocks, block):
    blocks += (block,)
    return blocks


@triton.jit(do_not_specialize=["blocks"])
def _vector_kernel(
    X, W, Bias, Squares, R, Norm, Y, Scaled, NewSquares, Outbox, Inbox, blocks, N, K, eps,
    BIAS: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, EXCHANGE: tl.constexpr,
    THREADS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One line; program (block of outputs). AHEAD blocks of weights are on their way, also before the line is there.

    Each row of weights has the line of its own: so that comes in the layout of the weights, not through shared memory.
    """
    n = _rows(tl.program_id(0), N, GATED, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    w_at = W + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = X + tl.broadcast_to(k[None, :], [BLOCK_N, BLOCK_K])
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    ahead = _append((), tl.load(w_at))
    for i in tl.static_range(1, AHEAD):
        ahead = _append(ahead, tl.load(w_at + i * BLOCK_K))
    wait_for_inputs(PDL)
    squares = _load_squares(Squares, blocks, 1, NORMED, BLOCKS, 1)
    for start in range(0, K - AHEAD * BLOCK_K, AHEAD * BLOCK_K):
        for i in tl.static_range(AHEAD):
            following = tl.load(w_at + start + (AHEAD + i) * BLOCK_K)
            acc += ahead[0].to(tl.float32) * tl.load(x_at + start + i * BLOCK_K).to(tl.float32)
            ahead = _append(ahead[1:], following)
    for i in tl.static_range(AHEAD):
        acc += ahead[i].to(tl.float32) * tl.load(x_at + K - (AHEAD - i) * BLOCK_K).to(tl.float32)
    product = tl.sum(acc, 1)[None, :]
    _finish(
        product, squares, Bias, R, Norm, Y, Scaled, NewSquares, Outbox, Inbox, n, 1, N, K, eps,
        BIAS, NORMED, GATED, ADD, EXCHANGE, 1, BLOCK_N, THREADS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "blocks"])
def _dot_kernel(
    X, W, Bias, Squares, R, Norm, Y, Scaled, NewSquares, Outbox, Inbox, Partial, Arrived, blocks, M, N, K, eps,
    BIAS: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, EXCHANGE: tl.constexpr,
    THREADS: tl.constexpr, BLOCKS: tl.constexpr,
    NORMS: tl.constexpr, LINES: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Up to LINES lines; program (block of outputs, split of the inputs). The last of the splits to arrive adds the
    others' parts. The squares are those of NORMS lines."""
    m = tl.arange(0, LINES)[:, None]
    n = _rows(tl.program_id(0), N, GATED, BLOCK_N)
    share = K // SPLIT
    k = tl.program_id(1) * share + tl.arange(0, BLOCK_K)
    w_at = W + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = X + m * K + k[None, :]
    acc = tl.zeros([LINES, BLOCK_N], tl.float32)
    wait_for_inputs(PDL)
    squares = _load_squares(Squares, blocks, M, NORMED, BLOCKS, NORMS)
    for i in range(0, share, BLOCK_K):
        w = tl.load(w_at + i)
        x = tl.load(x_at + i, mask=m < M, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc)
    last = True
    if SPLIT > 1:
        at = Partial + m * N + n[None, :]
        arrived = Arrived + tl.program_id(0)
        tl.store(at + tl.program_id(1) * LINES * N, acc, mask=m < M)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        last = tl.atomic_add(arrived, 1, sem="acq_rel") == SPLIT - 1
        if last:
            acc = tl.zeros_like(acc)
            for s in tl.static_range(SPLIT):
                acc += tl.load(at + s * LINES * N, mask=m < M, other=0.0, cache_modifier=".cg")
            tl.store(arrived, 0)
    if last:
        _finish(
            acc, squares, Bias, R, Norm, Y, Scaled, NewSquares, Outbox, Inbox, n, M, N, K, eps,
            BIAS, NORMED, GATED, ADD, EXCHANGE, LINES, BLOCK_N, THREADS,
        )  # fmt: skip


@functools.cache
def _arrived(device: torch.device) -> Tensor:
    """Zeros, which every kernel leaves as it found them."""
    return torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)


@skinny_linear.kernel
def _skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: SkinnyConfig | RingConfig,
    squares: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> Tensor:
    y = x.new_empty(len(x), len(weight) // (1 + gated))
    _launch(config, x, weight, bias, squares, eps, gated, y)
    return y


@add_skinny_linear.kernel
def _add_skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    config: SkinnyConfig | RingConfig,
    boxes: Boxes | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    total, scaled = torch.empty_like(residual), torch.empty_like(residual)
    blocks = config.blocks if isinstance(config, RingConfig) else len(weight) // config.block_n
    squares = x.new_empty(blocks, len(x), dtype=torch.float32)
    _launch(config, x, weight, bias, None, 0.0, False, total, (residual, norm, scaled, squares), boxes)
    return total, scaled, squares


def _launch(
    config: SkinnyConfig | RingConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    squares: Tensor | None,
    eps: float,
    gated: bool,
    y: Tensor,
    addition: tuple[Tensor, ...] | None = None,
    boxes: Boxes | None = None,
) -> None:
    """Fills y and the last two of `addition`: residual, norm, scaled and new squares of add_skinny_linear."""
    (lines, inputs), outputs = x.shape, len(weight)
    assert boxes is None or lines <= EXCHANGED_LINES, "boxes would be written beyond their end"
    if isinstance(config, RingConfig):
        launch_ring(config, x, weight, bias, squares, eps, gated, y, addition, boxes)
        return
    residual, norm, scaled, new_squares = addition or (y, y, y, y)  # y stands in for what is not there
    summed = 0 if squares is None else len(squares)
    given = x, weight, y if bias is None else bias, y if squares is None else squares, residual, norm
    tensors = *given, y, scaled, new_squares, *(boxes or (y, y))
    options = dict(
        BIAS=bias is not None, NORMED=squares is not None, GATED=gated, ADD=addition is not None,
        EXCHANGE=boxes is not None, THREADS=32 * config.num_warps,
        BLOCKS=next(size for size in MOST_SQUARES if size >= summed),
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip
    blocks = outputs // config.block_n
    if not config.dot:
        assert lines == 1
        options |= dict(AHEAD=config.num_stages, **dependent_launch(x))
        _vector_kernel[(blocks,)](*tensors, summed, outputs, inputs, eps, **options)
        return
    partial = arrived = y
    if config.split > 1:
        partial = torch.empty(config.split, MOST_LINES, outputs, dtype=torch.float32, device=x.device)
        arrived = _arrived(x.device)
    options |= dict(NORMS=1 if lines == 1 else MOST_LINES, LINES=MOST_LINES, SPLIT=config.split)
    options |= dict(num_stages=1 if torch.version.hip else config.num_stages, **dependent_launch(x))
    _dot_kernel[(blocks, config.split)](*tensors, partial, arrived, summed, lines, outputs, inputs, eps, **options)
