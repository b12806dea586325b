"""Matrix products of 129 to 512 lines on Hopper."""

from __future__ import annotations

import functools
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


BK = gl.constexpr(BLOCK_K)
GROUP = gl.constexpr(8)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@dataclass(frozen=True)
class StreamConfig:
    """One program takes block_n outputs (gated: half of them gate, half up) of block_m lines, or a share of their
    inputs if `split` > 1. Split 0: the steps of all tiles are dealt out evenly to the multiprocessors."""

    block_m: int
    block_n: int
    split: int
    num_stages: int
    slim: bool = False


@op
def stream_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: StreamConfig,
    gated: bool = False,
) -> torch.Tensor:
    if config.split <= 1:
        y = F.linear(x, weight, bias)
        return silu_and_mul.twin(y) if gated else y
    assert not gated
    parts = [
        F.linear(of_x.float(), of_weight.float())
        for of_x, of_weight in zip(x.tensor_split(config.split, 1), weight.tensor_split(config.split, 1))
    ]
    if bias is not None:
        parts[0] += bias.float()
    return torch.stack(parts).to(x.dtype)


@gluon.jit
def _item(done, work):
    """What a program does after so many steps: (block of lines, block of outputs, first step of the inputs, steps).
    `work`: first the steps from `begin` on of tiles that are dealt out by steps, `dealt` of them, then whole tiles,
    `stride` apart."""
    begin, dealt, first, stride, KS, line_blocks, blocks = work
    if done < dealt:
        tile = (begin + done) // KS
        k = begin + done - tile * KS
        steps = min(KS - k, dealt - done)
    else:
        tile = first + (done - dealt) // KS * stride
        k = 0
        steps = KS
    group = tile // (GROUP * blocks)
    together = min(line_blocks - group * GROUP, GROUP)
    within = tile - group * (GROUP * blocks)
    return group * GROUP + within % together, within // together, k, steps


@gluon.jit
def _fetch_weights(W, weights, arrived, slot, n, k, BLOCK_N: gl.constexpr, TILE_BYTES: gl.constexpr):
    mbarrier.expect(arrived.index(slot), TILE_BYTES)
    if len(W.block_shape) == 4:
        load_tile(W, [n * (BLOCK_N // 16), 0, 0, k * BK], arrived.index(slot), weights.index(slot))
    else:
        load_tile(W, [n * BLOCK_N, k * BK], arrived.index(slot), weights.index(slot))


@gluon.jit
def _fetch_lines(X, Rest, lines, rest, arrived, slot, m, k):
    REST_M: gl.constexpr = 0 if Rest is None else Rest.block_shape[0]
    m0 = m * (X.block_shape[0] + REST_M)
    load_tile(X, [m0, k * BK], arrived.index(slot), lines.index(slot))
    if REST_M:
        load_tile(Rest, [m0 + X.block_shape[0], k * BK], arrived.index(slot), rest.index(slot))


@gluon.jit
def _fill(
    X, Rest, W, lines, rest, weights, arrived, emptied, work, total,
    BLOCK_N: gl.constexpr, TILE_BYTES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    m, n, k, steps = _item(0, work)
    ahead = min(STAGES, steps)
    for i in range(ahead):
        _fetch_weights(W, weights, arrived, i, n, k + i, BLOCK_N, TILE_BYTES)
    wait_for_inputs(PDL)
    for i in range(ahead):
        _fetch_lines(X, Rest, lines, rest, arrived, i, m, k + i)
    done = 0
    while done < total:
        m, n, k, steps = _item(done, work)
        for i in range(ahead, steps):
            turn = done + i
            slot = turn % STAGES
            mbarrier.wait(emptied.index(slot), (turn // STAGES & 1) ^ 1)
            _fetch_weights(W, weights, arrived, slot, n, k + i, BLOCK_N, TILE_BYTES)
            _fetch_lines(X, Rest, lines, rest, arrived, slot, m, k + i)
        ahead = 0
        done += steps


@gluon.jit
def _places(Work, p, layout: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, BLOCK_M: gl.constexpr, M0: gl.constexpr):
    row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    column = M0 + gl.arange(0, BLOCK_M, gl.SliceLayout(0, layout))
    return Work + p * (BLOCK_N * WIDTH) + row[:, None] * WIDTH + column[None, :]


@gluon.jit
def _multiply(
    Bias, Y, YRest, Work, Flags, lines, rest, weights, out, rest_out, arrived, emptied, p, splits, work, total, KS, N,
    BIAS: gl.constexpr, GATED: gl.constexpr, DEALT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr,
    REST_M: gl.constexpr, STAGES: gl.constexpr, MOST_N: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, min(MOST_N, BLOCK_M), 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, max(8, REST_M), 16])
    WIDTH: gl.constexpr = BLOCK_M + REST_M
    done = 0
    while done < total:
        m, n, k, steps = _item(done, work)
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
        if REST_M:
            acc1 = gl.zeros([BLOCK_N, REST_M], gl.float32, rest_layout)
        for i in range(steps):
            turn = done + i
            slot = turn % STAGES
            mbarrier.wait(arrived.index(slot), turn // STAGES & 1)
            w = weights.index(slot)
            if GATED:
                w = w.reshape([BLOCK_N, BK])
            acc = warpgroup_mma(w, lines.index(slot).permute((1, 0)), acc, is_async=True)
            if REST_M:
                acc1 = warpgroup_mma(w, rest.index(slot).permute((1, 0)), acc1, is_async=True)
                acc, acc1 = warpgroup_mma_wait(2, deps=[acc, acc1])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(emptied.index((turn + STAGES - 1) % STAGES), pred=i > 0)
        if REST_M:
            acc, acc1 = warpgroup_mma_wait(0, deps=[acc, acc1])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(emptied.index((done + steps - 1) % STAGES))
        if DEALT:
            if (k == 0) & (steps < KS):
                while gl.atomic_cas(Flags + p + 1, 1, 0, sem="acquire") == 0:
                    pass
                acc += gl.load(_places(Work, p + 1, layout, BLOCK_N, WIDTH, BLOCK_M, 0), cache_modifier=".cg")
                if REST_M:
                    acc1 += gl.load(_places(Work, p + 1, rest_layout, BLOCK_N, WIDTH, REST_M, BLOCK_M), cache_modifier=".cg")
        if DEALT and k > 0:
            gl.store(_places(Work, p, layout, BLOCK_N, WIDTH, BLOCK_M, 0), acc)
            if REST_M:
                gl.store(_places(Work, p, rest_layout, BLOCK_N, WIDTH, REST_M, BLOCK_M), acc1)
            barrier()
            gl.atomic_xchg(Flags + p, 1, sem="release")
        else:
            n0 = n * BLOCK_N
            m0 = m * WIDTH
            part = p % splits
            _store(acc, Bias, Y, out, part, m0, n0, N, BIAS, GATED)
            if REST_M:
                _store(acc1, Bias, YRest, rest_out, part, m0 + BLOCK_M, n0, N, BIAS, GATED)
        done += steps
    tma.store_wait(0)


@gluon.jit
def _store(acc, Bias, Y, out, part, m0, n0, N, BIAS: gl.constexpr, GATED: gl.constexpr):
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    OUTPUTS: gl.constexpr = BLOCK_N // (1 + GATED)
    if BIAS:
        row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout))
        if GATED:
            n = row // 16 * 8 + row % 8 + n0 // 2 + (row // 8 % 2) * N
            b = gl.load(Bias + n, mask=n0 // 2 + row // 16 * 8 < N, other=0.0)
        else:
            b = gl.load(Bias + n0 + row, mask=(n0 + row < N) & (part == 0), other=0.0)
        acc += b.to(gl.float32)[:, None]
    if GATED:
        pairs = acc.to(gl.bfloat16).to(gl.float32).reshape([BLOCK_N // 16, 2, 8, BLOCK_M]).permute((0, 2, 3, 1))
        gate, up = gl.split(pairs)
        acc = (gate / (1 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32) * up
        acc = acc.reshape([OUTPUTS, BLOCK_M])
    tma.store_wait(0)
    FLAT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, OUTPUTS], gl.bfloat16)
    reinterpret(out, gl.bfloat16, [BLOCK_M, OUTPUTS], FLAT).store(acc.to(gl.bfloat16).permute((1, 0)))
    fence_async_shared()
    store_tile(Y, [part, m0, n0 // (1 + GATED)], reinterpret(out, gl.bfloat16, [1, BLOCK_M, OUTPUTS], Y.layout))


@gluon.jit(do_not_specialize=["line_blocks", "shared", "splits"])
def _stream_kernel(
    X, Rest, W, Bias, Y, YRest, Work, Flags, line_blocks, shared, splits, N, K,
    BIAS: gl.constexpr, GATED: gl.constexpr, DEALT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MOST_N: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Program (share of the steps of all tiles)."""
    BLOCK_M: gl.constexpr = X.block_shape[0]
    REST_M: gl.constexpr = 0 if Rest is None else Rest.block_shape[0]
    TILE_BYTES: gl.constexpr = 2 * BK * (BLOCK_M + REST_M + BLOCK_N)
    KS = K // BK
    programs = gl.num_programs(0)
    p = programs - 1 - gl.program_id(0)
    if DEALT:
        begin = p * (shared * KS) // programs
        dealt = (p + 1) * (shared * KS) // programs - begin
    else:
        begin = p // splits * KS + p % splits * KS // splits
        dealt = p // splits * KS + (p % splits + 1) * KS // splits - begin
    blocks = (N * (1 + GATED) + BLOCK_N - 1) // BLOCK_N
    total = dealt + (line_blocks * blocks - shared) // programs * KS
    work = (begin, dealt, shared + p, programs, KS, line_blocks, blocks)
    lines = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BK], X.layout)
    rest = lines if Rest is None else gl.allocate_shared_memory(gl.bfloat16, [STAGES, REST_M, BK], Rest.layout)
    TILE: gl.constexpr = [STAGES, BLOCK_N // 16, 2, 8, BK] if GATED else [STAGES, BLOCK_N, BK]
    weights = gl.allocate_shared_memory(gl.bfloat16, TILE, W.layout)
    if not DEALT:
        out = lines
        rest_out = rest
    else:
        out = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_M, BLOCK_N // (1 + GATED)], Y.layout)
        rest_out = out
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
                    Bias, Y, YRest, Work, Flags, lines, rest, weights, out, rest_out, arrived, emptied,
                    p, splits, work, total, KS, N, BIAS, GATED, DEALT, BLOCK_N, BLOCK_M, REST_M, STAGES, MOST_N,
                ),
            ),
            (
                _fill,
                (
                    X, Rest, W, lines, rest, weights, arrived, emptied, work, total,
                    BLOCK_N, TILE_BYTES, STAGES, PDL,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip


@functools.cache
def _flags(device: torch.device) -> torch.Tensor:
    return torch.zeros(1024, dtype=torch.int32, device=device)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


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


def _registers(config):
    warps = config.block_n // 16
    wanted = config.block_m // 2 + 48
    share = cdiv(wanted * warps + 24 * 4, 8 * (warps + 4)) * 8
    return min(max(96, share), 65536 // (32 * (warps + 4)) // 8 * 8)


@stream_linear.kernel
def _stream_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: StreamConfig,
    gated: bool = False,
) -> torch.Tensor:
    (lines, inputs), outputs = x.shape, len(weight) // (1 + gated)
    assert inputs % BLOCK_K == 0 and not (gated and config.split > 1)
    block_m = 1 << min(8, config.block_m.bit_length() - 1)
    rest_m = config.block_m - block_m
    assert rest_m & (rest_m - 1) == 0, "a power of two"
    line_blocks = cdiv(lines, config.block_m)
    tiles = cdiv(len(weight), config.block_n) * line_blocks
    if config.split:
        programs, shared, work = tiles * config.split, tiles, x
    else:
        programs = _processors(x.device)
        assert tiles >= programs
        shared = tiles % programs + programs if tiles % programs else 0
        work = torch.empty(programs, config.block_n, config.block_m, dtype=torch.float32, device=x.device)
    y = torch.empty(max(1, config.split), lines, outputs, dtype=x.dtype, device=x.device)
    columns = config.block_n // (1 + gated)
    _stream_kernel[(programs,)](
        *(_tiles(x, block_m), _tiles(x, rest_m) if rest_m else None),
        _interleaved(weight, config.block_n) if gated else _tiles(weight, config.block_n),
        *(y if bias is None else bias, _tiles(y, block_m, columns), _tiles(y, rest_m, columns) if rest_m else None),
        *(work, _flags(x.device), line_blocks, shared, max(1, config.split), outputs, inputs),
        BIAS=bias is not None,
        GATED=gated,
        DEALT=config.split == 0,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        MOST_N=128 if config.slim else 256,
        num_warps=config.block_n // 16,
        maxnreg=_registers(config) if config.slim else None,
        **dependent_launch(x, 512),
    )
    return y if config.split > 1 else y[0]
