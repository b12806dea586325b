"""Matrix products of 129 to 512 lines on Hopper, as fast as tensor cores are fed.

A program computes a tile of block_n outputs by block_m lines, or a share of its inputs. One of its warps keeps the copy
engine filling a ring of tiles in shared memory, while 4 warps for every 64 outputs multiply: outputs are the rows of
wgmma, so that its columns may be as many lines as there are. The ring is full of weights before the kernel before this
one has ended. Rows of gate and up alternate by 8 in a tile, as registers of a thread do, so silu takes no exchange.

On an H200 a layer with 256 or 320 decode rows takes 105.5 or 126.7 instead of 110.1 or 134.1 us (1B). Sharing the steps
of all tiles evenly where a multiprocessor has 1.7 of them gains nothing: the chip is at its power limit, and computes
the second ones faster while others idle.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lightllm.common.basemodel.triton_kernel.few_lines_linear import (
    BLOCK_K,
    TileConfig,
    linear_in_parts,
    load_tile,
    tiles_of,
    tuned_config,
)
from lightllm.common.triton_utils.dependent_launch import EARLY_LINES, dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op

LINES = (160, 192, 256, 320, 384, 512)  # an entry of a table is for so many lines, or SPARE_LINES fewer at most
SPARE_LINES = 16  # those that are not there take the copy engine longer than those that are
BK = gl.constexpr(BLOCK_K)

Tile = gl.shared_memory_descriptor
reinterpret = Tile.reinterpret if hasattr(Tile, "reinterpret") else Tile._reinterpret  # Triton 3.9, 3.6
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@dataclass(frozen=True)
class SomeLinesConfig(TileConfig):
    """Lines of a tile are a power of two up to 256, or one and a smaller one. Gated: half of its outputs are gate, half
    up."""


def some_lines_config(
    lines: int, weight: Tensor, gated: bool = False, in_parts: bool = False
) -> SomeLinesConfig | None:
    """As few_lines_config, for more lines."""
    most = table_lines(lines)
    return tuned_config(SomeLinesConfig, "some_lines_linear", most, weight, gated, in_parts) if most else None


def table_lines(lines: int) -> int | None:
    """Of the entry for so many lines, None if there can be none."""
    return next((most for most in LINES if most - SPARE_LINES <= lines <= most), None)


@op
def some_lines_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: SomeLinesConfig, gated: bool = False
) -> Tensor:
    """x [M, K] times weight [N, K], plus bias [N] -> [M, N], added up in float32; `gated`: silu_and_mul of that,
    [M, N / 2]. With a split, which excludes `gated`: parts [split, M, N] in x's dtype that add up to it."""
    return linear_in_parts(x, weight, bias, config.split, gated).to(x.dtype)


@gluon.jit
def _fetch_weights(W, ring, slot, n0, k, TILE_BYTES: gl.constexpr):
    _, _, weights, arrived, _ = ring
    mbarrier.expect(arrived.index(slot), TILE_BYTES)
    if len(W.block_shape) == 4:
        load_tile(W, [n0 // 16, 0, 0, k], arrived.index(slot), weights.index(slot))
    else:
        load_tile(W, [n0, k], arrived.index(slot), weights.index(slot))


@gluon.jit
def _fetch_lines(X, Rest, ring, slot, m0, k):
    lines, rest, _, arrived, _ = ring
    load_tile(X, [m0, k], arrived.index(slot), lines.index(slot))
    if Rest is not None:
        load_tile(Rest, [m0 + X.block_shape[0], k], arrived.index(slot), rest.index(slot))


@gluon.jit
def _fill(
    X, Rest, W, ring, m0, n0, first, steps, TILE_BYTES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """The warp that fills the ring."""
    _, _, _, _, emptied = ring
    for step in range(min(STAGES, steps)):
        _fetch_weights(W, ring, step, n0, (first + step) * BK, TILE_BYTES)
    wait_for_inputs(PDL)
    for step in range(min(STAGES, steps)):
        _fetch_lines(X, Rest, ring, step, m0, (first + step) * BK)
    for step in range(STAGES, steps):
        slot = step % STAGES
        mbarrier.wait(emptied.index(slot), (step // STAGES & 1) ^ 1)
        _fetch_weights(W, ring, slot, n0, (first + step) * BK, TILE_BYTES)
        _fetch_lines(X, Rest, ring, slot, m0, (first + step) * BK)


@gluon.jit
def _store(acc, Bias, Y, ring, share, m0, n0, N, BIAS: gl.constexpr, GATED: gl.constexpr):
    """Accumulators [outputs, lines] on their way to Y through the ring, which is empty now."""
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    OUTPUTS: gl.constexpr = BLOCK_N // (1 + GATED)
    if BIAS:
        row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout))
        if GATED:
            n = n0 // 2 + row // 16 * 8 + row % 8
            bias = gl.load(Bias + n + row // 8 % 2 * N, mask=n < N, other=0.0)
        else:
            bias = gl.load(Bias + n0 + row, mask=(n0 + row < N) & (share == 0), other=0.0)
        acc += bias.to(gl.float32)[:, None]
    if GATED:
        pairs = acc.to(gl.bfloat16).to(gl.float32).reshape([BLOCK_N // 16, 2, 8, BLOCK_M]).permute((0, 2, 3, 1))
        gate, up = gl.split(pairs)
        acc = (gate / (1 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32) * up
        acc = acc.reshape([OUTPUTS, BLOCK_M])
    FLAT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, OUTPUTS], gl.bfloat16)
    reinterpret(ring, gl.bfloat16, [BLOCK_M, OUTPUTS], FLAT).store(acc.to(gl.bfloat16).permute((1, 0)))
    fence_async_shared()
    store_tile(Y, [share, m0, n0 // (1 + GATED)], reinterpret(ring, gl.bfloat16, [1, BLOCK_M, OUTPUTS], Y.layout))


@gluon.jit
def _multiply(
    Bias, Y, YRest, ring, m0, n0, share, steps, N,
    BIAS: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, REST_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that multiply. `rest`: lines of a tile beyond a power of two, with accumulators of their own."""
    lines, rest, weights, arrived, emptied = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, max(8, REST_M), 16])
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    if REST_M:
        rest_acc = gl.zeros([BLOCK_N, REST_M], gl.float32, rest_layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(arrived.index(slot), step // STAGES & 1)
        w = weights.index(slot)
        if GATED:
            w = w.reshape([BLOCK_N, BK])
        acc = warpgroup_mma(w, lines.index(slot).permute((1, 0)), acc, is_async=True)
        if REST_M:
            rest_acc = warpgroup_mma(w, rest.index(slot).permute((1, 0)), rest_acc, is_async=True)
            acc, rest_acc = warpgroup_mma_wait(2, deps=[acc, rest_acc])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(emptied.index((step + STAGES - 1) % STAGES), pred=step > 0)  # the step before has ended
    if REST_M:
        acc, rest_acc = warpgroup_mma_wait(0, deps=[acc, rest_acc])
        _store(rest_acc, Bias, YRest, rest, share, m0 + BLOCK_M, n0, N, BIAS, GATED)
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    _store(acc, Bias, Y, lines, share, m0, n0, N, BIAS, GATED)
    tma.store_wait(0)


@gluon.jit
def _some_lines_kernel(
    X, Rest, W, Bias, Y, YRest, N, K,
    BIAS: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (block of lines, block of outputs, share of the inputs)."""
    BLOCK_M: gl.constexpr = X.block_shape[0]
    REST_M: gl.constexpr = 0 if Rest is None else Rest.block_shape[0]
    TILE_BYTES: gl.constexpr = 2 * BK * (BLOCK_M + REST_M + BLOCK_N)
    m0 = gl.program_id(0) * (BLOCK_M + REST_M)
    n0 = gl.program_id(1) * BLOCK_N
    share = gl.program_id(2)
    first = share * (K // BK) // gl.num_programs(2)
    steps = (share + 1) * (K // BK) // gl.num_programs(2) - first
    lines = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BK], X.layout)
    rest = lines if Rest is None else gl.allocate_shared_memory(gl.bfloat16, [STAGES, REST_M, BK], Rest.layout)
    TILE: gl.constexpr = [STAGES, BLOCK_N // 16, 2, 8, BK] if GATED else [STAGES, BLOCK_N, BK]
    weights = gl.allocate_shared_memory(gl.bfloat16, TILE, W.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
        mbarrier.init(emptied.index(i), count=1)
    ring = (lines, rest, weights, arrived, emptied)
    gl.warp_specialize(
        [
            (
                _multiply,
                (Bias, Y, YRest, ring, m0, n0, share, steps, N, BIAS, GATED, BLOCK_N, BLOCK_M, REST_M, STAGES),
            ),
            (_fill, (X, Rest, W, ring, m0, n0, first, steps, TILE_BYTES, STAGES, PDL)),
        ],
        [1],  # warps and registers of who fills
        [24],
    )


def gate_and_up_tiles(weight: Tensor, rows: int) -> TensorDescriptor:
    """Tiles with 8 rows of gate, 8 of up, 8 of gate and so on."""
    outputs, inputs = len(weight) // 2, weight.shape[1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    shape, strides = [outputs // 8, 2, 8, inputs], [8 * inputs, outputs * inputs, inputs, 1]
    return TensorDescriptor(weight, shape, strides, [rows // 16, 2, 8, BLOCK_K], layout)


@some_lines_linear.kernel
def _some_lines_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: SomeLinesConfig, gated: bool = False
) -> Tensor:
    (lines, inputs), outputs = x.shape, len(weight) // (1 + gated)
    assert inputs % BLOCK_K == 0 and outputs % 8 == 0 and not (gated and config.split > 1)
    block_m = min(256, 1 << config.block_m.bit_length() - 1)
    rest_m, columns = config.block_m - block_m, config.block_n // (1 + gated)
    y = torch.empty(config.split, lines, outputs, dtype=x.dtype, device=x.device)
    _some_lines_kernel[(cdiv(lines, config.block_m), cdiv(len(weight), config.block_n), config.split)](
        tiles_of(x, block_m), tiles_of(x, rest_m) if rest_m else None,
        gate_and_up_tiles(weight, config.block_n) if gated else tiles_of(weight, config.block_n),
        y if bias is None else bias,
        tiles_of(y, block_m, columns), tiles_of(y, rest_m, columns) if rest_m else None,
        outputs, inputs,
        BIAS=bias is not None, GATED=gated, BLOCK_N=config.block_n, STAGES=config.num_stages,
        num_warps=config.block_n // 16, **dependent_launch(x, EARLY_LINES),
    )  # fmt: skip
    return y if config.split > 1 else y[0]
