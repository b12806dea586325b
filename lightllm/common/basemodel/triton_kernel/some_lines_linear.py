"""Matrix products of 129 to 512 lines on Hopper, as fast as tensor cores are fed.

A program computes tiles of block_n outputs by block_m lines. One of its warps keeps the copy engine filling a ring of
tiles in shared memory, while 4 warps for every 64 outputs multiply: outputs are the rows of wgmma, so that its columns
may be as many lines as there are. The ring is full of weights before the kernel before this one has ended. Rows of gate
and up alternate by 8 in a tile, as registers of a thread do, so silu takes no exchange.

Where tiles are fewer than multiprocessors, several programs share the inputs of a tile and leave parts to who adds
them. Where there are more, the last wave would be mostly idle: its tiles and those of the wave before are dealt out by
steps of inputs. Of a tile that two programs share, the one that has its last steps computes them first, and
leaves what it has to the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
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
from lightllm.common.basemodel.triton_kernel.few_lines_linear import LINES as FEWER_LINES
from lightllm.common.triton_utils.dependent_launch import FEW_LINES, dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op

LINES = (160, 192, 256, 320, 384, 512)  # an entry of a table is for up to so many lines, more than the one before it
BK = gl.constexpr(BLOCK_K)
GROUP = gl.constexpr(8)  # blocks of lines that are computed together for each block of outputs

Tile = gl.shared_memory_descriptor
reinterpret = Tile.reinterpret if hasattr(Tile, "reinterpret") else Tile._reinterpret  # Triton 3.9, 3.6
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@dataclass(frozen=True)
class SomeLinesConfig(TileConfig):
    """Lines of a tile are a power of two up to 256, or one and a smaller one. Gated: half of its outputs are gate, half
    up. Split 0: as many programs as multiprocessors share the steps of all tiles."""


def some_lines_config(
    lines: int, weight: torch.Tensor, gated: bool = False, in_parts: bool = False
) -> SomeLinesConfig | None:
    """As few_lines_config, for more lines."""
    if not FEWER_LINES[-1] < lines <= LINES[-1]:
        return None
    most = next(most for most in LINES if lines <= most)
    return tuned_config(SomeLinesConfig, "some_lines_linear", most, weight, gated, in_parts)


@op
def some_lines_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: SomeLinesConfig,
    gated: bool = False,
) -> torch.Tensor:
    """x [M, K] times weight [N, K], plus bias [N] -> [M, N], added up in float32; `gated`: silu_and_mul of that,
    [M, N / 2]. With a split above 1, which excludes `gated`: parts [split, M, N] in x's dtype that add up to it."""
    return linear_in_parts(x, weight, bias, max(1, config.split), gated).to(x.dtype)


@gluon.jit
def _item(done, work):
    """What a program does after so many steps: (block of lines, block of outputs, first step of the inputs, steps).
    `work`: first the steps from `begin` on, `dealt` of them, then whole tiles, `stride` apart."""
    begin, dealt, first, stride, tile_steps, line_blocks, blocks = work
    if done < dealt:
        tile = (begin + done) // tile_steps
        k = begin + done - tile * tile_steps
        steps = min(tile_steps - k, dealt - done)
    else:
        tile = first + (done - dealt) // tile_steps * stride
        k = 0
        steps = tile_steps
    group = tile // (GROUP * blocks)
    together = min(line_blocks - group * GROUP, GROUP)
    within = tile - group * (GROUP * blocks)
    return group * GROUP + within % together, within // together, k, steps


@gluon.jit
def _fetch_weights(W, ring, slot, n, k, BLOCK_N: gl.constexpr, TILE_BYTES: gl.constexpr):
    _, _, weights, arrived, _ = ring
    mbarrier.expect(arrived.index(slot), TILE_BYTES)
    if len(W.block_shape) == 4:
        load_tile(W, [n * (BLOCK_N // 16), 0, 0, k * BK], arrived.index(slot), weights.index(slot))
    else:
        load_tile(W, [n * BLOCK_N, k * BK], arrived.index(slot), weights.index(slot))


@gluon.jit
def _fetch_lines(X, Rest, ring, slot, m, k):
    lines, rest, _, arrived, _ = ring
    REST_M: gl.constexpr = 0 if Rest is None else Rest.block_shape[0]
    m0 = m * (X.block_shape[0] + REST_M)
    load_tile(X, [m0, k * BK], arrived.index(slot), lines.index(slot))
    if REST_M:
        load_tile(Rest, [m0 + X.block_shape[0], k * BK], arrived.index(slot), rest.index(slot))


@gluon.jit
def _fill(
    X, Rest, W, ring, work, total,
    BLOCK_N: gl.constexpr, TILE_BYTES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The warp that fills the ring."""
    _, _, _, _, emptied = ring
    m, n, k, steps = _item(0, work)
    ahead = min(STAGES, steps)
    for i in range(ahead):
        _fetch_weights(W, ring, i, n, k + i, BLOCK_N, TILE_BYTES)
    wait_for_inputs(PDL)
    for i in range(ahead):
        _fetch_lines(X, Rest, ring, i, m, k + i)
    done = 0
    while done < total:
        m, n, k, steps = _item(done, work)
        for i in range(ahead, steps):
            turn = done + i
            slot = turn % STAGES
            mbarrier.wait(emptied.index(slot), (turn // STAGES & 1) ^ 1)
            _fetch_weights(W, ring, slot, n, k + i, BLOCK_N, TILE_BYTES)
            _fetch_lines(X, Rest, ring, slot, m, k + i)
        ahead = 0
        done += steps


@gluon.jit
def _places(Work, p, acc, FIRST_LINE: gl.constexpr, BLOCK_M: gl.constexpr):
    """Where program p leaves accumulators [outputs, lines] to the one before it."""
    n = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    m = FIRST_LINE + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    return Work + p * (acc.shape[0] * BLOCK_M) + n[:, None] * BLOCK_M + m[None, :]


@gluon.jit
def _store(acc, Bias, Y, out, part, m0, n0, N, BIAS: gl.constexpr, GATED: gl.constexpr):
    """Accumulators [outputs, lines], the product of a tile, on their way to Y through shared memory."""
    BLOCK_N: gl.constexpr = acc.shape[0]
    BLOCK_M: gl.constexpr = acc.shape[1]
    OUTPUTS: gl.constexpr = BLOCK_N // (1 + GATED)
    if BIAS:
        row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, acc.type.layout))
        if GATED:
            n = n0 // 2 + row // 16 * 8 + row % 8
            bias = gl.load(Bias + n + row // 8 % 2 * N, mask=n < N, other=0.0)
        else:
            bias = gl.load(Bias + n0 + row, mask=(n0 + row < N) & (part == 0), other=0.0)
        acc += bias.to(gl.float32)[:, None]
    if GATED:
        pairs = acc.to(gl.bfloat16).to(gl.float32).reshape([BLOCK_N // 16, 2, 8, BLOCK_M]).permute((0, 2, 3, 1))
        gate, up = gl.split(pairs)
        acc = (gate / (1 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32) * up
        acc = acc.reshape([OUTPUTS, BLOCK_M])
    tma.store_wait(0)  # the tile before has been read
    FLAT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, OUTPUTS], gl.bfloat16)
    reinterpret(out, gl.bfloat16, [BLOCK_M, OUTPUTS], FLAT).store(acc.to(gl.bfloat16).permute((1, 0)))
    fence_async_shared()
    store_tile(Y, [part, m0, n0 // (1 + GATED)], reinterpret(out, gl.bfloat16, [1, BLOCK_M, OUTPUTS], Y.layout))


@gluon.jit
def _multiply(
    Bias, Y, YRest, Work, Flags, ring, out, rest_out, p, splits, work, total, N,
    BIAS: gl.constexpr, GATED: gl.constexpr, DEALT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr,
    REST_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warps that multiply. `rest`: lines of a tile beyond a power of two, with accumulators of their own."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    rest_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, max(8, REST_M), 16])
    lines, rest, weights, arrived, emptied = ring
    done = 0
    while done < total:
        m, n, k, steps = _item(done, work)
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
        if REST_M:
            rest_acc = gl.zeros([BLOCK_N, REST_M], gl.float32, rest_layout)
        for i in range(steps):
            slot = (done + i) % STAGES
            mbarrier.wait(arrived.index(slot), (done + i) // STAGES & 1)
            w = weights.index(slot)
            if GATED:
                w = w.reshape([BLOCK_N, BK])
            acc = warpgroup_mma(w, lines.index(slot).permute((1, 0)), acc, is_async=True)
            if REST_M:
                rest_acc = warpgroup_mma(w, rest.index(slot).permute((1, 0)), rest_acc, is_async=True)
                acc, rest_acc = warpgroup_mma_wait(2, deps=[acc, rest_acc])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(emptied.index((done + i + STAGES - 1) % STAGES), pred=i > 0)
        if REST_M:
            acc, rest_acc = warpgroup_mma_wait(0, deps=[acc, rest_acc])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(emptied.index((done + steps - 1) % STAGES))
        if DEALT and (k == 0) & (steps < work[4]):  # the next program computed the other steps first
            while gl.atomic_cas(Flags + p + 1, 1, 0, sem="acquire") == 0:
                pass
            acc += gl.load(_places(Work, p + 1, acc, 0, BLOCK_M + REST_M), cache_modifier=".cg")
            if REST_M:
                places = _places(Work, p + 1, rest_acc, BLOCK_M, BLOCK_M + REST_M)
                rest_acc += gl.load(places, cache_modifier=".cg")
        if DEALT and k > 0:
            gl.store(_places(Work, p, acc, 0, BLOCK_M + REST_M), acc)
            if REST_M:
                gl.store(_places(Work, p, rest_acc, BLOCK_M, BLOCK_M + REST_M), rest_acc)
            barrier()
            gl.atomic_xchg(Flags + p, 1, sem="release")
        else:
            m0 = m * (BLOCK_M + REST_M)
            _store(acc, Bias, Y, out, p % splits, m0, n * BLOCK_N, N, BIAS, GATED)
            if REST_M:
                _store(rest_acc, Bias, YRest, rest_out, p % splits, m0 + BLOCK_M, n * BLOCK_N, N, BIAS, GATED)
        done += steps
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["line_blocks", "shared", "splits"])
def _some_lines_kernel(
    X, Rest, W, Bias, Y, YRest, Work, Flags, line_blocks, shared, splits, N, K,
    BIAS: gl.constexpr, GATED: gl.constexpr, DEALT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Program (share of the steps of all tiles), the last first: it waits for none, and each waits for the next.
    Tiles from `shared` on are computed whole, the others by several programs."""
    BLOCK_M: gl.constexpr = X.block_shape[0]
    REST_M: gl.constexpr = 0 if Rest is None else Rest.block_shape[0]
    TILE_BYTES: gl.constexpr = 2 * BK * (BLOCK_M + REST_M + BLOCK_N)
    programs = gl.num_programs(0)
    p = programs - 1 - gl.program_id(0)
    steps = K // BK
    if DEALT:
        begin = p * (shared * steps) // programs
        end = (p + 1) * (shared * steps) // programs
    else:
        begin = p // splits * steps + p % splits * steps // splits
        end = p // splits * steps + (p % splits + 1) * steps // splits
    blocks = (N * (1 + GATED) + BLOCK_N - 1) // BLOCK_N
    total = end - begin + (line_blocks * blocks - shared) // programs * steps
    work = (begin, end - begin, shared + p, programs, steps, line_blocks, blocks)

    lines = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BK], X.layout)
    rest = lines if Rest is None else gl.allocate_shared_memory(gl.bfloat16, [STAGES, REST_M, BK], Rest.layout)
    TILE: gl.constexpr = [STAGES, BLOCK_N // 16, 2, 8, BK] if GATED else [STAGES, BLOCK_N, BK]
    weights = gl.allocate_shared_memory(gl.bfloat16, TILE, W.layout)
    if DEALT:
        out = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_M, BLOCK_N // (1 + GATED)], Y.layout)
        rest_out = out
    else:  # the ring is empty after the only tile
        out = lines
        rest_out = rest
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
                (
                    Bias, Y, YRest, Work, Flags, ring, out, rest_out, p, splits, work, total, N,
                    BIAS, GATED, DEALT, BLOCK_N, BLOCK_M, REST_M, STAGES,
                ),
            ),
            (_fill, (X, Rest, W, ring, work, total, BLOCK_N, TILE_BYTES, STAGES, PDL)),
        ],
        [1],
        [24],
    )  # fmt: skip


def _gate_and_up(weight: torch.Tensor, rows: int) -> TensorDescriptor:
    """Tiles with 8 rows of gate, 8 of up, 8 of gate and so on."""
    outputs, inputs = len(weight) // 2, weight.shape[1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    shape, strides = [outputs // 8, 2, 8, inputs], [8 * inputs, outputs * inputs, inputs, 1]
    return TensorDescriptor(weight, shape, strides, [rows // 16, 2, 8, BLOCK_K], layout)


@functools.cache
def _flags(device: torch.device) -> torch.Tensor:
    """Whether a program has left what it has to the one before it, which takes the flag back; by program."""
    return torch.zeros(_multiprocessors(device), dtype=torch.int32, device=device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@some_lines_linear.kernel
def _some_lines_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: SomeLinesConfig,
    gated: bool = False,
) -> torch.Tensor:
    (lines, inputs), outputs = x.shape, len(weight) // (1 + gated)
    assert inputs % BLOCK_K == 0 and outputs % 8 == 0 and not (gated and config.split > 1)
    block_m = min(256, 1 << config.block_m.bit_length() - 1)
    rest_m, columns = config.block_m - block_m, config.block_n // (1 + gated)
    line_blocks = cdiv(lines, config.block_m)
    tiles = cdiv(len(weight), config.block_n) * line_blocks
    programs, shared = tiles * config.split, tiles
    y = torch.empty(max(1, config.split), lines, outputs, dtype=x.dtype, device=x.device)
    left = y
    if config.split == 0:
        programs = min(tiles, _multiprocessors(x.device))
        shared = programs + tiles % programs if tiles % programs else 0
        left = torch.empty(programs, config.block_n, config.block_m, dtype=torch.float32, device=x.device)
    _some_lines_kernel[(programs,)](
        *(tiles_of(x, block_m), tiles_of(x, rest_m) if rest_m else None),
        _gate_and_up(weight, config.block_n) if gated else tiles_of(weight, config.block_n),
        y if bias is None else bias,
        *(tiles_of(y, block_m, columns), tiles_of(y, rest_m, columns) if rest_m else None),
        *(left, _flags(x.device), line_blocks, shared, max(1, config.split), outputs, inputs),
        BIAS=bias is not None,
        GATED=gated,
        DEALT=config.split == 0,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        num_warps=config.block_n // 16,
        **dependent_launch(x, FEW_LINES),
    )
    return y if config.split > 1 else y[0]
