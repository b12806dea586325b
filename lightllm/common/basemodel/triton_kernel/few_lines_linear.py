"""Matrix products of 17 to 128 lines on Hopper, where a weight takes longer to read than to multiply.

A program owns a block of outputs, of a share of the inputs. The copy engine fills a ring of tiles in shared memory
while tensor cores empty it. The ring is full of weights before the kernel before this one has ended (dependent launch),
so that memory is not idle between two products. One or two programs fill a multiprocessor: those that are set up early
cannot gather where the running kernel has left room.

On an H200 a step of 64 rows takes 6.52 instead of cuBLAS's 7.13 ms (8B at 1k), 1.18 instead of 1.33 (1B at 256).
Written in Gluon, the layer under Triton's language: Triton cannot fetch tiles before it waits, and with prefetches into
L2 in their place a layer takes 3 to 6 % longer.
"""

import functools
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import cdiv, next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul
from lightllm.common.triton_utils.dependent_launch import EARLY_LINES, dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op
from lightllm.common.triton_utils.gpu import is_hopper
from lightllm.common.triton_utils.kernel_tables import kernel_table

LINES = (32, 64, 128)  # an entry of a table is for up to so many lines, more than the one before it
FEWEST_LINES = 17  # fewer are skinny_linear's
BLOCK_K = 64  # inputs of a tile: the 128 bytes that shared memory is swizzled by

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # Triton 3.9, 3.6


@dataclass(frozen=True)
class TileConfig:
    """A tile has block_m lines and block_n outputs; `split` programs share its inputs. The ring has num_stages tiles of
    lines and of weights."""

    block_m: int
    block_n: int
    split: int
    num_stages: int


@dataclass(frozen=True)
class FewLinesConfig(TileConfig):
    """Gated: a tile has block_n outputs of gate and as many of up."""

    num_warps: int


Config = TypeVar("Config", bound=TileConfig)


def few_lines_config(lines: int, weight: Tensor, gated: bool = False, in_parts: bool = False) -> FewLinesConfig | None:
    """The configuration that beats the library at this number of lines on this GPU, None if none is known. `in_parts`:
    who asks can take an answer in parts."""
    if not FEWEST_LINES <= lines <= LINES[-1]:
        return None
    most = next(most for most in LINES if lines <= most)
    return tuned_config(FewLinesConfig, "few_lines_linear", most, weight, gated, in_parts)


def tuned_config(
    kind: type[Config], table: str, most_lines: int, weight: Tensor, gated: bool, in_parts: bool
) -> Config | None:
    """What the kernel's table has for this weight and up to so many lines, if it can be used."""
    if not weight.is_cuda or weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        return None
    entry = _entry(table, most_lines, *weight.shape, gated, weight.device)
    config = kind(*entry) if entry else None
    return config if config and (in_parts or config.split == 1) else None


@functools.cache
def _entry(
    table: str, most_lines: int, outputs: int, inputs: int, gated: bool, device: torch.device
) -> list[int] | None:
    if not is_hopper(device):
        return None
    return kernel_table(table, device).get(table_key(outputs, inputs, gated), {}).get(str(most_lines))


def table_key(outputs: int, inputs: int, gated: bool) -> str:
    """Under which a table holds the configurations of a weight, by number of lines."""
    return f"{outputs}x{inputs}" + " gated" * gated


@op
def few_lines_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: FewLinesConfig, gated: bool = False
) -> Tensor:
    """x [M, K] times weight [N, K], plus bias [N] -> [M, N], added up in float32; `gated`: silu_and_mul of that,
    [M, N / 2]. With a split, which excludes `gated`: parts [split, M, N] in float32 that add up to it."""
    return linear_in_parts(x, weight, bias, config.split, gated)


def linear_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, split: int, gated: bool) -> Tensor:
    """few_lines_linear by torch."""
    if split == 1:
        y = F.linear(x, weight, bias)
        return silu_and_mul.twin(y) if gated else y
    assert not gated
    parts = [
        F.linear(of_x.float(), of_weight.float())
        for of_x, of_weight in zip(x.tensor_split(split, 1), weight.tensor_split(split, 1))
    ]
    if bias is not None:
        parts[0] += bias.float()
    return torch.stack(parts)


@gluon.jit
def _fetch_weights(W, tiles, barrier, slot, n, k, wanted, N, GATED: gl.constexpr):
    """Tiles of the weight (gated: of gate and up) on their way into the ring."""
    load_tile(W, [n, k], barrier, tiles.index(slot * (1 + GATED)), pred=wanted)
    if GATED:
        load_tile(W, [N + n, k], barrier, tiles.index(2 * slot + 1), pred=wanted)


@gluon.jit
def _fetch_lines(X, tile, barrier, m, k, wanted, BOXES: gl.constexpr):
    """A tile of lines; what is beyond its boxes, nobody stores."""
    BOX: gl.constexpr = X.block_shape[0]
    for i in gl.static_range(BOXES):
        load_tile(X, [m + i * BOX, k], barrier, tile.slice(i * BOX, BOX), pred=wanted)


@gluon.jit(do_not_specialize=["M"])
def _few_lines_kernel(
    X, W, Bias, Y, M, N, K,
    BIAS: gl.constexpr, GATED: gl.constexpr, SPLIT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (block of N outputs, share of the inputs, block of lines)."""
    n0 = gl.program_id(0) * BLOCK_N
    share = gl.program_id(1)
    m0 = gl.program_id(2) * BLOCK_M
    first = share * (K // BLOCK_K) // SPLIT
    steps = (share + 1) * (K // BLOCK_K) // SPLIT - first
    lines = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], X.layout)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES * (1 + GATED), BLOCK_N, BLOCK_K], W.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    TILE_BYTES: gl.constexpr = 2 * BLOCK_K * (BOXES * X.block_shape[0] + BLOCK_N * (1 + GATED))
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
    for i in gl.static_range(STAGES - 1):
        mbarrier.expect(arrived.index(i), TILE_BYTES, pred=i < steps)
        _fetch_weights(W, weights, arrived.index(i), i, n0, (first + i) * BLOCK_K, i < steps, N, GATED)
    wait_for_inputs(PDL)
    for i in gl.static_range(STAGES - 1):
        _fetch_lines(X, lines.index(i), arrived.index(i), m0, (first + i) * BLOCK_K, i < steps, BOXES)

    WARPS_M: gl.constexpr = min(gl.num_warps(), BLOCK_M // 16)
    WARPS_N: gl.constexpr = gl.num_warps() // WARPS_M
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS_M, WARPS_N], [16, min(256, BLOCK_N // WARPS_N), 16])
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    up = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    for step in range(steps):
        slot = step % STAGES
        mbarrier.wait(arrived.index(slot), step // STAGES & 1)
        x = lines.index(slot)
        acc = warpgroup_mma(x, weights.index(slot * (1 + GATED)).permute((1, 0)), acc, is_async=True)
        if GATED:
            up = warpgroup_mma(x, weights.index(2 * slot + 1).permute((1, 0)), up, is_async=True)
            acc, up = warpgroup_mma_wait(2, deps=[acc, up])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        ahead = step + STAGES - 1  # into the tiles of the step before, whose products have just ended
        into = ahead % STAGES
        k = (first + ahead) * BLOCK_K
        mbarrier.expect(arrived.index(into), TILE_BYTES, pred=ahead < steps)
        _fetch_weights(W, weights, arrived.index(into), into, n0, k, ahead < steps, N, GATED)
        _fetch_lines(X, lines.index(into), arrived.index(into), m0, k, ahead < steps, BOXES)
    acc, up = warpgroup_mma_wait(0, deps=[acc, up])

    m = m0 + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    if BIAS:
        acc += gl.load(Bias + n, mask=(n < N) & (share == 0), other=0.0).to(gl.float32)[None, :]
        if GATED:
            up += gl.load(Bias + N + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    if GATED:
        gate = acc.to(gl.bfloat16).to(gl.float32)
        acc = (gate / (1 + gl.exp(-gate))).to(gl.bfloat16).to(gl.float32) * up.to(gl.bfloat16).to(gl.float32)
    to = Y + share * M * N + m[:, None] * N + n[None, :]
    gl.store(to, acc.to(Y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def _fetches(lines: int, block_m: int) -> tuple[int, int]:
    """How many lines the copy engine fetches at a time (a box, a power of two), and how many times for a tile. Lines
    that are not there take it longer than those that are: with 72 of 128 a layer of 8B was a seventh slower."""
    if block_m == 128 and lines <= 96:
        return 32, 3
    return min(block_m, next_power_of_2(lines)), 1


@functools.cache
def _tile_layout(*block: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)


def tiles_of(matrix: Tensor, rows: int, columns: int = BLOCK_K) -> TensorDescriptor:
    """Tiles of a matrix, or of one of several."""
    block = [1] * (matrix.dim() - 2) + [rows, columns]
    return TensorDescriptor.from_tensor(matrix, block, _tile_layout(*block))


@few_lines_linear.kernel
def _few_lines_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, config: FewLinesConfig, gated: bool = False
) -> Tensor:
    (lines, inputs), outputs = x.shape, len(weight) // (1 + gated)
    assert inputs % BLOCK_K == 0 and not (gated and config.split > 1)
    if config.split == 1:
        y = torch.empty(lines, outputs, dtype=x.dtype, device=x.device)
    else:
        y = torch.empty(config.split, lines, outputs, dtype=torch.float32, device=x.device)
    box, boxes = _fetches(lines, config.block_m)
    _few_lines_kernel[(cdiv(outputs, config.block_n), config.split, cdiv(lines, config.block_m))](
        tiles_of(x, box), tiles_of(weight, config.block_n), y if bias is None else bias, y, lines, outputs, inputs,
        BIAS=bias is not None, GATED=gated, SPLIT=config.split, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=BLOCK_K, BOXES=boxes, STAGES=config.num_stages,
        num_warps=config.num_warps, **dependent_launch(x, EARLY_LINES),
    )  # fmt: skip
    return y
