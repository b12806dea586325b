"""skinny_linear's products of 2 to 16 lines on Hopper: weights are on their way before the lines are there.

A program owns a range of outputs, or a share of their inputs. One of its warps keeps the copy engine filling a ring of
tiles in shared memory, which is full of weights before the kernel before this one has ended (dependent launch); the
others multiply, outputs being the rows of wgmma and lines its columns. All multiprocessors have as much to read:
outputs are dealt out to within 8, and a tile comes in boxes whose heights are powers of two.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lightllm.common.basemodel.triton_kernel.few_lines_linear import BLOCK_K, load_tile, table_key, tiles_of
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu
from lightllm.common.basemodel.triton_kernel.some_lines_linear import gate_and_up_tiles
from lightllm.common.triton_utils.dependent_launch import (
    EARLY_LINES,
    dependent_launch,
    wait_for_inputs,
    wait_for_writes,
)
from lightllm.common.triton_utils.gpu import is_hopper
from lightllm.common.triton_utils.kernel_tables import kernel_table
from lightllm.distributed.peer_memory import Boxes

MOST_BOXES = 3  # of a tile
MOST_BLOCKS = 1 << 12
NUM_WARPS = 4  # that multiply
FEWEST_ROWS = 64  # of a tile: those of one wgmma
BK = gl.constexpr(BLOCK_K)
UNIT = gl.constexpr(8)  # outputs that are dealt out together: rows of a swizzled tile that belong together
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.9, 3.6


@dataclass(frozen=True)
class RingConfig:
    """Outputs are dealt out to `blocks`, of which `split` programs share the inputs. A tile has `rows` of the weight
    (gated: half gate, half up), the sum of at most three powers of two, and where one block of inputs leaves wgmma's
    64 rows unused, the next `stack` of them one below the other. The ring has num_stages tiles."""

    rows: int
    blocks: int
    split: int
    num_stages: int
    stack: int = 1

    @property
    def tile_rows(self) -> int:
        return max(FEWEST_ROWS, next_power_of_2(self.rows * self.stack))

    def fits(self, outputs: int, inputs: int, gated: bool) -> bool:
        """Whether it can take a weight [outputs, inputs]."""
        unit = UNIT.value * (1 + gated)
        dealt = outputs % unit == 0 and cdiv(outputs // unit, self.blocks) * unit <= self.rows <= outputs
        in_boxes = self.rows % unit == 0 and self.rows.bit_count() <= MOST_BOXES
        stacked = self.stack == 1 or (self.rows * self.stack == self.tile_rows and not gated)
        shared = inputs % (BLOCK_K * self.stack) == 0 and not (gated and self.split > 1)
        return dealt and in_boxes and stacked and shared


def ring_config(weight: Tensor, gated: bool) -> RingConfig | None:
    """The configuration that beats other kernels from 2 to 16 lines on this GPU, None if none is known."""
    return _tuned(*weight.shape, gated, weight.device) if is_hopper(weight.device) else None


@functools.cache
def _tuned(outputs: int, inputs: int, gated: bool, device: torch.device) -> RingConfig | None:
    fields = kernel_table("ring_linear", device).get(table_key(outputs, inputs, gated))
    return RingConfig(*fields) if fields else None


@gluon.jit
def _fetch_box(W, ring, slot, unit, k, into: gl.constexpr):
    """The rows of W's boxes from `unit` on, into the tile from unit `into` on."""
    _, weights, arrived, _ = ring
    HEIGHT: gl.constexpr = W.block_shape[0]
    if len(W.block_shape) == 4:
        load_tile(W, [unit, 0, 0, k], arrived.index(slot), weights.index(slot).slice(into, HEIGHT))
    else:
        load_tile(W, [unit * UNIT, k], arrived.index(slot), weights.index(slot).slice(into * UNIT, HEIGHT))


@gluon.jit
def _fetch_weights(W, ring, work, step, slot, TILE_BYTES: gl.constexpr, STACK: gl.constexpr):
    unit, first, _ = work
    W0, W1, W2 = W
    k = (first + step) * (BK * STACK)
    ROWS_OF_UNIT: gl.constexpr = 1 if len(W0.block_shape) == 4 else UNIT
    AT1: gl.constexpr = W0.block_shape[0] // ROWS_OF_UNIT
    mbarrier.expect(ring[2].index(slot), TILE_BYTES)
    for i in gl.static_range(STACK):
        _fetch_box(W0, ring, slot, unit, k + i * BK, i * AT1)
    if W1 is not None:
        _fetch_box(W1, ring, slot, unit + AT1, k, AT1)
        if W2 is not None:
            AT2: gl.constexpr = AT1 + W1.block_shape[0] // ROWS_OF_UNIT
            _fetch_box(W2, ring, slot, unit + AT2, k, AT2)


@gluon.jit
def _fetch_lines(X, ring, work, step, slot, STACK: gl.constexpr):
    lines, _, arrived, _ = ring
    _, first, _ = work
    LINES: gl.constexpr = X.block_shape[0]
    k = (first + step) * (BK * STACK)
    for i in gl.static_range(STACK):
        load_tile(X, [0, k + i * BK], arrived.index(slot), lines.index(slot).slice(i * LINES, LINES))


@gluon.jit
def _fill(X, W, ring, work, TILE_BYTES: gl.constexpr, STAGES: gl.constexpr, STACK: gl.constexpr, PDL: gl.constexpr):
    """The warp that fills the ring."""
    _, _, _, emptied = ring
    _, _, steps = work
    for step in range(min(STAGES, steps)):
        _fetch_weights(W, ring, work, step, step, TILE_BYTES, STACK)
    wait_for_inputs(PDL)
    for step in range(min(STAGES, steps)):
        _fetch_lines(X, ring, work, step, step, STACK)
    for step in range(STAGES, steps):
        slot = step % STAGES
        mbarrier.wait(emptied.index(slot), (step // STAGES & 1) ^ 1)
        _fetch_weights(W, ring, work, step, slot, TILE_BYTES, STACK)
        _fetch_lines(X, ring, work, step, slot, STACK)


@gluon.jit
def _product(ring, steps, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Of the tiles that come through the ring, [ROWS, COLUMNS]."""
    lines, weights, arrived, emptied = ring
    STAGES: gl.constexpr = weights.shape[0]
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(arrived.index(slot), step // STAGES & 1)
        w = weights.index(slot)
        if len(w.shape) == 4:
            w = w.reshape([ROWS, BK])
        acc = warpgroup_mma(w, lines.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(emptied.index((step + STAGES - 1) % STAGES), pred=step > 0)  # the step before has ended
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _on_diagonal(acc, STACK: gl.constexpr, ROWS: gl.constexpr, LINES: gl.constexpr):
    """Of blocks of inputs one below the other, each times all blocks of lines: the sum of those that belong."""
    layout: gl.constexpr = acc.type.layout
    of_row = gl.arange(0, STACK * ROWS, gl.SliceLayout(1, layout)) // ROWS
    of_column = gl.arange(0, STACK * LINES, gl.SliceLayout(0, layout)) // LINES
    acc = gl.where(of_row[:, None] == of_column[None, :], acc, 0.0)
    return gl.sum(gl.sum(acc.reshape([STACK, ROWS, STACK, LINES]), 2), 0)


@gluon.jit
def _rounded(x, Y):
    return x.to(Y.dtype.element_ty).to(gl.float32)


@gluon.jit
def _exchange(x, Outbox, Inbox, at, mask):
    """all_reduce.exchange in Gluon, which fills tensors by layout."""
    EMPTY: gl.constexpr = -(1 << 15)  # -0.0
    bits = x.to(gl.int16, bitcast=True)
    gl.store(Outbox + at, gl.where(bits == EMPTY, 0, bits).to(gl.int16), mask=mask)
    bits = gl.load(Inbox + at, mask=mask, other=0, volatile=True)
    while gl.max(gl.max((bits == EMPTY).to(gl.int32), 1), 0) > 0:
        bits = gl.load(Inbox + at, mask=mask, other=0, volatile=True)
    gl.store(Inbox + at, gl.full(bits.shape, EMPTY, gl.int16, bits.type.layout), mask=mask)
    return bits.to(x.dtype, bitcast=True)


@gluon.jit
def _norm_of(Squares, blocks, M, K, eps, BLOCKS: gl.constexpr, LINES: gl.constexpr):
    """By which the lines are multiplied."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [64 // LINES, LINES // 2], [gl.num_warps(), 1], [1, 0])
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, layout))[:, None]
    m = gl.arange(0, LINES, gl.SliceLayout(0, layout))[None, :]
    squares = gl.load(Squares + block * M + m, mask=(block < blocks) & (m < M), other=0.0)
    return gl.rsqrt(gl.sum(squares, 0) / K + eps)


@gluon.jit
def _silu_and_mul(acc, Bias, Y, unit, N, BIAS: gl.constexpr):
    """acc [ROWS, LINES], 8 rows of gate and 8 of up in turn -> [ROWS / 2, LINES]."""
    ROWS: gl.constexpr = acc.shape[0]
    if BIAS:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
        n = unit * UNIT + row // 16 * 8 + row % 8
        acc += gl.load(Bias + n + row // 8 % 2 * N, mask=n < N, other=0.0).to(gl.float32)[:, None]
    pairs = _rounded(acc, Y).reshape([ROWS // 16, 2, 8, acc.shape[1]]).permute((0, 2, 3, 1))
    gate, up = gl.split(pairs)
    return (_rounded(silu(gate), Y) * up).reshape([ROWS // 2, acc.shape[1]])


@gluon.jit
def _multiply(
    Bias, Squares, R, Norm, Y, Scaled, NewSquares, Outbox, Inbox, Partial, Arrived, ring, work, share, squares, M, N, K,
    eps,
    BIAS: gl.constexpr, NORMED: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, EXCHANGE: gl.constexpr,
    SQUARES: gl.constexpr, TILE_ROWS: gl.constexpr, LINES: gl.constexpr, SPLIT: gl.constexpr, STACK: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The warps that multiply, and store what becomes of it."""
    unit, _, steps = work
    block, blocks = gl.program_id(0), gl.num_programs(0)
    WARPS: gl.constexpr = gl.num_warps()
    OUTPUTS: gl.constexpr = TILE_ROWS // ((1 + GATED) * STACK)
    product_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, LINES * STACK, 16])
    THREADS: gl.constexpr = min(32, OUTPUTS)  # of a warp along the outputs
    ALONG: gl.constexpr = min(WARPS, OUTPUTS // THREADS)  # warps
    layout: gl.constexpr = gl.BlockedLayout(
        [1, LINES * THREADS * ALONG // (32 * WARPS)], [THREADS, 32 // THREADS], [ALONG, WARPS // ALONG], [0, 1]
    )
    line = gl.arange(0, LINES, gl.SliceLayout(0, layout))
    n = unit * UNIT + gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
    own = (n >= block * (N // UNIT) // blocks * UNIT) & (n < (block + 1) * (N // UNIT) // blocks * UNIT)
    mask = own[:, None] & (line < M)[None, :]
    at = line[None, :] * N + n[:, None]
    wait_for_writes(PDL)  # the warp that fills lets the next kernel begin
    if NORMED:
        norm_layout: gl.constexpr = gl.SliceLayout(0, product_layout if GATED else layout)
        scale = gl.convert_layout(_norm_of(Squares, squares, M, K, eps, SQUARES, LINES), norm_layout)[None, :]
    if ADD:
        residual = gl.load(R + at, mask=mask, other=0.0)
        norm = gl.load(Norm + n, mask=own, other=0.0)
    acc = _product(ring, steps, TILE_ROWS, LINES * STACK, product_layout)
    if GATED:
        if NORMED:
            acc *= scale
        y = gl.convert_layout(_silu_and_mul(acc, Bias, Y, unit, N, BIAS), layout)
        gl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask)
    else:
        y = gl.convert_layout(_on_diagonal(acc, STACK, OUTPUTS, LINES) if STACK > 1 else acc, layout)
        last = True
        if SPLIT > 1:
            gl.store(Partial + share * LINES * N + at, y, mask=mask)
            barrier()  # all of the program's stores come before its arrival
            last = gl.atomic_add(Arrived + block, 1, sem="acq_rel") == SPLIT - 1
            if last:
                y = gl.zeros([OUTPUTS, LINES], gl.float32, layout)
                for s in gl.static_range(SPLIT):
                    y += gl.load(Partial + s * LINES * N + at, mask=mask, other=0.0, cache_modifier=".cg")
                gl.store(Arrived + block, 0)
        if last:
            if NORMED:
                y *= scale
            if BIAS:
                y += gl.load(Bias + n, mask=own, other=0.0).to(gl.float32)[:, None]
            if ADD:
                if EXCHANGE:
                    mine = y.to(Y.dtype.element_ty)
                    y = mine.to(gl.float32) + _exchange(mine, Outbox, Inbox, at, mask).to(gl.float32)
                y = _rounded(y + residual.to(gl.float32), Y)
                scaled = y * norm.to(gl.float32)[:, None]
                gl.store(Scaled + at, scaled.to(Y.dtype.element_ty), mask=mask)
                gl.store(NewSquares + block * M + line, gl.sum(gl.where(mask, y * y, 0.0), 0), mask=line < M)
            gl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["M", "squares"])
def _ring_kernel(
    X, W0, W1, W2, Bias, Squares, R, Norm, Y, Scaled, NewSquares, Outbox, Inbox, Partial, Arrived, squares, M, N, K,
    eps,
    BIAS: gl.constexpr, NORMED: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, EXCHANGE: gl.constexpr,
    SQUARES: gl.constexpr, ROWS: gl.constexpr, TILE_ROWS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    STACK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (block of outputs, share of the inputs). The last of the shares to arrive adds the others' parts."""
    LINES: gl.constexpr = X.block_shape[0]
    TILE_BYTES: gl.constexpr = 2 * BK * (LINES + ROWS) * STACK
    UNITS: gl.constexpr = ROWS // (UNIT * (1 + GATED))
    share, tiles = gl.program_id(1), K // (BK * STACK)
    unit = gl.minimum(gl.program_id(0) * (N // UNIT) // gl.num_programs(0), N // UNIT - UNITS)
    first = share * tiles // SPLIT
    steps = (share + 1) * tiles // SPLIT - first
    lines = gl.allocate_shared_memory(gl.bfloat16, [STAGES, LINES * STACK, BK], X.layout)
    TILES: gl.constexpr = [STAGES, TILE_ROWS // 16, 2, 8, BK] if GATED else [STAGES, TILE_ROWS, BK]
    weights = gl.allocate_shared_memory(gl.bfloat16, TILES, W0.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
        mbarrier.init(emptied.index(i), count=1)
    ring = (lines, weights, arrived, emptied)
    work = (unit, first, steps)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    Bias, Squares, R, Norm, Y, Scaled, NewSquares, Outbox, Inbox, Partial, Arrived, ring, work, share,
                    squares, M, N, K, eps, BIAS, NORMED, GATED, ADD, EXCHANGE, SQUARES, TILE_ROWS, LINES, SPLIT, STACK,
                    PDL,
                ),
            ),
            (_fill, (X, (W0, W1, W2), ring, work, TILE_BYTES, STAGES, STACK, PDL)),
        ],
        [1],  # warps and registers of who fills
        [40],
    )  # fmt: skip


def _boxes_of(config: RingConfig, weight: Tensor, gated: bool) -> list[TensorDescriptor | None]:
    """Those of a tile, from the highest down."""
    heights = [1 << i for i in range(8, 2, -1) if config.rows >> i & 1]
    boxes: list[TensorDescriptor | None] = [(gate_and_up_tiles if gated else tiles_of)(weight, h) for h in heights]
    return boxes + [None] * (MOST_BOXES - len(boxes))


@functools.cache
def _arrived(device: torch.device) -> Tensor:
    """Zeros, which every kernel leaves as it found them."""
    return torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=device)


def launch_ring(
    config: RingConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    squares: Tensor | None,
    eps: float,
    gated: bool,
    y: Tensor,
    addition: tuple[Tensor, ...] | None,
    boxes: Boxes | None,
) -> None:
    """As skinny_linear's launch: fills y and the last two of `addition`."""
    (lines, inputs), outputs = x.shape, len(weight) // (1 + gated)
    residual, norm, scaled, new_squares = addition or (y, y, y, y)  # y stands in for what is not there
    box = max(8, next_power_of_2(lines))
    partial = arrived = y
    if config.split > 1:
        partial = torch.empty(config.split, box, outputs, dtype=torch.float32, device=x.device)
        arrived = _arrived(x.device)
    summed = 0 if squares is None else len(squares)
    _ring_kernel[(config.blocks, config.split)](
        tiles_of(x, box), *_boxes_of(config, weight, gated), y if bias is None else bias,
        y if squares is None else squares, residual, norm,
        y, scaled, new_squares, *(boxes or (y, y)), partial, arrived,
        summed, lines, outputs, inputs, eps,
        BIAS=bias is not None, NORMED=squares is not None, GATED=gated, ADD=addition is not None,
        EXCHANGE=boxes is not None, SQUARES=max(128, next_power_of_2(summed)), ROWS=config.rows,
        TILE_ROWS=config.tile_rows, SPLIT=config.split, STAGES=config.num_stages, STACK=config.stack,
        num_warps=NUM_WARPS, **dependent_launch(x, EARLY_LINES),
    )  # fmt: skip
