"""Matrix products of 129 to 512 lines on Hopper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
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

from lightllm.common.basemodel.triton_kernel.few_lines_linear import BLOCK_K, load_tile
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul
from lightllm.common.triton_utils.dependent_launch import dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op

Tile = gl.shared_memory_descriptor
reinterpret = Tile.reinterpret if hasattr(Tile, "reinterpret") else Tile._reinterpret  # Triton 3.9, 3.6

store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@dataclass(frozen=True)
class SomeLinesConfig:
    """One program takes block_n outputs (gated: half of them gate, half up) of block_m lines."""

    block_m: int
    block_n: int
    split: int
    num_stages: int
    together: int = 1
    wide: bool = False


@op
def some_lines_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: SomeLinesConfig,
    gated: bool = False,
) -> torch.Tensor:
    if config.split == 1:
        y = F.linear(x, weight, bias)
        return silu_and_mul.twin(y) if gated else y
    assert not gated
    parts = [
        F.linear(of_x.float(), of_weight.float())
        for of_x, of_weight in zip(x.tensor_split(config.split, 1), weight.tensor_split(config.split, 1))
    ]
    if bias is not None:
        parts[0] += bias.float()
    return torch.stack(parts)


@gluon.jit
def _fetch_weights(W, tile, barrier, n0, k, GATED: gl.constexpr):
    if GATED:
        load_tile(W, [n0 // 16, 0, 0, k], barrier, tile)
    else:
        load_tile(W, [n0, k], barrier, tile)


@gluon.jit
def _fetch_lines(X, Rest, lines, rest, barrier, slot, m0, k):
    load_tile(X, [m0, k], barrier, lines.index(slot))
    if Rest is not None:
        load_tile(Rest, [m0 + X.block_shape[0], k], barrier, rest.index(slot))


@gluon.jit
def _fill(
    X, Rest, W, lines, rest, weights, arrived, emptied, m0, n0, first, steps,
    TILE_BYTES: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    for step in range(min(STAGES, steps)):
        mbarrier.expect(arrived.index(step), TILE_BYTES)
        _fetch_weights(W, weights.index(step), arrived.index(step), n0, (first + step) * BK, GATED)
    wait_for_inputs(PDL)
    for step in range(min(STAGES, steps)):
        _fetch_lines(X, Rest, lines, rest, arrived.index(step), step, m0, (first + step) * BK)
    for step in range(STAGES, steps):
        slot = step % STAGES
        mbarrier.wait(emptied.index(slot), (step // STAGES & 1) ^ 1)
        mbarrier.expect(arrived.index(slot), TILE_BYTES)
        _fetch_weights(W, weights.index(slot), arrived.index(slot), n0, (first + step) * BK, GATED)
        _fetch_lines(X, Rest, lines, rest, arrived.index(slot), slot, m0, (first + step) * BK)


BK = gl.constexpr(BLOCK_K)


@gluon.jit
def _multiply(
    Bias, Y, YRest, lines, rest, weights, arrived, emptied, m0, n0, share, steps, M, N,
    BIAS: gl.constexpr, GATED: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr,
    REST_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, max(8, REST_M), 16])
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    if REST_M:
        acc1 = gl.zeros([BLOCK_N, REST_M], gl.float32, rest_layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(arrived.index(slot), step // STAGES & 1)
        w = weights.index(slot)
        if GATED:
            w = w.reshape([BLOCK_N, BK])
        acc = warpgroup_mma(w, lines.index(slot).permute((1, 0)), acc, is_async=True)
        if REST_M:
            acc1 = warpgroup_mma(w, rest.index(slot).permute((1, 0)), acc1, is_async=True)
            acc, acc1 = warpgroup_mma_wait(2, deps=[acc, acc1])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(emptied.index((step + STAGES - 1) % STAGES), pred=step > 0)
    if REST_M:
        acc, acc1 = warpgroup_mma_wait(0, deps=[acc, acc1])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    _store(acc, Bias, Y, lines, m0, n0, share, M, N, BIAS, GATED, PARTS)
    if REST_M:
        _store(acc1, Bias, YRest, rest, m0 + BLOCK_M, n0, share, M, N, BIAS, GATED, PARTS)
    if not PARTS:
        tma.store_wait(0)


@gluon.jit
def _store(acc, Bias, Y, ring, m0, n0, share, M, N, BIAS: gl.constexpr, GATED: gl.constexpr, PARTS: gl.constexpr):
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    OUTPUTS: gl.constexpr = BLOCK_N // (1 + GATED)
    if BIAS:
        row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout))
        if GATED:
            n = row // 16 * 8 + row % 8 + n0 // 2 + (row // 8 % 2) * N
            b = gl.load(Bias + n, mask=n0 // 2 + row // 16 * 8 < N, other=0.0)
        else:
            b = gl.load(Bias + n0 + row, mask=(n0 + row < N) & (share == 0), other=0.0)
        acc += b.to(gl.float32)[:, None]
    if PARTS:
        n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout))
        m = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, acc.type.layout))
        to = Y + share * M * N + m[None, :] * N + n[:, None]
        gl.store(to, acc, mask=(m < M)[None, :] & (n < N)[:, None])
    else:
        if GATED:
            pairs = acc.to(gl.bfloat16).to(gl.float32).reshape([BLOCK_N // 16, 2, 8, BLOCK_M]).permute((0, 2, 3, 1))
            gate, up = gl.split(pairs)
            acc = (gate / (1 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32) * up
            acc = acc.reshape([OUTPUTS, BLOCK_M])
        tile = reinterpret(ring, gl.bfloat16, [1, BLOCK_M, OUTPUTS], Y.layout)
        tile.store(acc.to(gl.bfloat16).permute((1, 0)).reshape([1, BLOCK_M, OUTPUTS]))
        fence_async_shared()
        store_tile(Y, [share, m0, n0 // (1 + GATED)], tile)


@gluon.jit(do_not_specialize=["M"])
def _some_lines_kernel(
    X, Rest, W, Bias, Y, YRest, M, N, K,
    BIAS: gl.constexpr, GATED: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Program (block of outputs, share of the inputs, block of lines)."""
    BLOCK_M: gl.constexpr = X.block_shape[0]
    REST_M: gl.constexpr = 0 if Rest is None else Rest.block_shape[0]
    TILE_BYTES: gl.constexpr = 2 * BK * (BLOCK_M + REST_M + BLOCK_N)
    n0 = gl.program_id(0) * BLOCK_N
    share = gl.program_id(1)
    m0 = gl.program_id(2) * (BLOCK_M + REST_M)
    first = share * (K // BK) // gl.num_programs(1)
    steps = (share + 1) * (K // BK) // gl.num_programs(1) - first
    lines = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BK], X.layout)
    rest = lines if Rest is None else gl.allocate_shared_memory(gl.bfloat16, [STAGES, REST_M, BK], Rest.layout)
    TILE: gl.constexpr = [STAGES, BLOCK_N // 16, 2, 8, BK] if GATED else [STAGES, BLOCK_N, BK]
    weights = gl.allocate_shared_memory(gl.bfloat16, TILE, W.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
        mbarrier.init(emptied.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    Bias, Y, YRest, lines, rest, weights, arrived, emptied, m0, n0, share, steps, M, N,
                    BIAS, GATED, PARTS, BLOCK_N, BLOCK_M, REST_M, STAGES,
                ),
            ),
            (
                _fill,
                (
                    X, Rest, W, lines, rest, weights, arrived, emptied, m0, n0, first, steps,
                    TILE_BYTES, GATED, STAGES, PDL,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


def _tiles(matrix: torch.Tensor, rows: int, columns: int = BLOCK_K) -> TensorDescriptor:
    block = [1] * (matrix.dim() - 2) + [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(matrix, block, layout)


def _interleaved(weight: torch.Tensor, rows: int) -> TensorDescriptor:
    """8 rows of gate, 8 of up, 8 of gate and so on."""
    outputs, inputs = len(weight) // 2, weight.shape[1]
    block = [rows // 16, 2, 8, BLOCK_K]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(
        weight, [outputs // 8, 2, 8, inputs], [8 * inputs, outputs * inputs, inputs, 1], block, layout
    )


@some_lines_linear.kernel
def _some_lines_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: SomeLinesConfig,
    gated: bool = False,
) -> torch.Tensor:
    (lines, inputs), outputs = x.shape, len(weight) // (1 + gated)
    assert inputs % BLOCK_K == 0 and not (gated and config.split > 1)
    block_m = 1 << min(8, config.block_m.bit_length() - 1)
    rest_m = config.block_m - block_m
    assert rest_m & (rest_m - 1) == 0, "a power of two"
    dtype = torch.float32 if config.wide else x.dtype
    y = torch.empty(config.split, lines, outputs, dtype=dtype, device=x.device)
    columns = config.block_n // (1 + gated)
    of_y = (y, y) if config.wide else (_tiles(y, block_m, columns), _tiles(y, rest_m, columns) if rest_m else None)
    _some_lines_kernel[(cdiv(len(weight), config.block_n), config.split, cdiv(lines, config.block_m))](
        *(_tiles(x, block_m), _tiles(x, rest_m) if rest_m else None),
        _interleaved(weight, config.block_n) if gated else _tiles(weight, config.block_n),
        *(y if bias is None else bias, *of_y),
        *(lines, outputs, inputs),
        BIAS=bias is not None,
        GATED=gated,
        PARTS=config.wide,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        num_warps=config.block_n // 16,
        maxnreg=65536 // (32 * (config.block_n // 16 + 4) * config.together) // 8 * 8 if config.together > 1 else None,
        **dependent_launch(x, 512),
    )
    return y[0] if config.split == 1 else y
