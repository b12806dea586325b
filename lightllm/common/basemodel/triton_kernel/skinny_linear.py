"""Matrix products of few lines, which only stream the weight: a vector kernel for one line, a tensor-core one to 16."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lightllm.common.triton_utils.dependent_launch import FEW_LINES, dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op
from lightllm.common.triton_utils.kernel_tables import kernel_table

MOST_LINES = 16
_MOST_BLOCKS = 1 << 16
VECTOR_SIZES = [(2, 2048, 4), (4, 1024, 4), (8, 512, 4), (8, 1024, 8), (16, 512, 8), (16, 256, 4)]
DOT_SIZES = [
    (16, 256, 1, 4, 5), (16, 512, 1, 4, 4), (32, 256, 1, 4, 4), (32, 128, 1, 4, 5), (32, 128, 2, 4, 5),
    (64, 128, 1, 4, 5), (64, 128, 2, 4, 5), (64, 256, 2, 8, 3), (32, 256, 2, 4, 4), (32, 128, 4, 4, 5),
]  # fmt: skip


@dataclass(frozen=True)
class SkinnyConfig:
    """One program takes block_n outputs in steps of block_k inputs; `split` programs share the inputs of an output.
    `dot` multiplies on tensor cores, else there is one line only. The blocks divide the weight's sizes."""

    block_n: int
    block_k: int
    split: int
    dot: bool
    num_warps: int
    num_stages: int


CANDIDATES = [
    *(SkinnyConfig(n, k, 1, False, warps, 1) for n, k, warps in VECTOR_SIZES),
    *(SkinnyConfig(n, k, split, True, warps, stages) for n, k, split, warps, stages in DOT_SIZES),
]


def skinny_config(lines: int, weight: torch.Tensor) -> SkinnyConfig | None:
    """The configuration that beats the library at this number of lines on this GPU, None if none is known."""
    if lines > MOST_LINES or not weight.is_cuda or weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        return None
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
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: SkinnyConfig | None = None
) -> torch.Tensor:
    """x [M <= 16, K] times weight [N, K], plus bias [N] -> [M, N], added up in float32. `config` is the kernel's."""
    return F.linear(x, weight, bias)


@triton.jit
def _finish(acc, Y, Bias, Partial, Arrived, y_at, mask, bias_at, part, size, SPLIT: tl.constexpr, BIAS: tl.constexpr):
    """Stores the sum over all splits plus bias: the last of the splits to arrive adds the others' parts."""
    if SPLIT > 1:
        tl.store(Partial + part * size + y_at, acc, mask=mask)
        tl.debug_barrier()  # all of the program's stores come before its arrival
        if tl.atomic_add(Arrived, 1, sem="acq_rel") == SPLIT - 1:
            acc = tl.zeros_like(acc)
            for s in tl.static_range(SPLIT):
                acc += tl.load(Partial + s * size + y_at, mask=mask, other=0.0, cache_modifier=".cg")
            if BIAS:
                acc += tl.load(Bias + bias_at).to(tl.float32)
            tl.store(Y + y_at, acc.to(Y.dtype.element_ty), mask=mask)
            tl.store(Arrived, 0)
    else:
        if BIAS:
            acc += tl.load(Bias + bias_at).to(tl.float32)
        tl.store(Y + y_at, acc.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _vector_kernel(
    X, W, Bias, Y, Partial, Arrived, N, K,
    BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One line; program (block of outputs, split of the inputs)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = K // SPLIT
    k = tl.program_id(1) * share + tl.arange(0, BLOCK_K)
    at = W + n.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    w = tl.load(at)
    wait_for_inputs(PDL)
    for i in range(BLOCK_K, share, BLOCK_K):  # one block ahead of its use
        following = tl.load(at + i)
        acc += w.to(tl.float32) * tl.load(X + k + (i - BLOCK_K)).to(tl.float32)[None, :]
        w = following
    acc += w.to(tl.float32) * tl.load(X + k + (share - BLOCK_K)).to(tl.float32)[None, :]
    arrived = Arrived + tl.program_id(0)
    _finish(tl.sum(acc, 1), Y, Bias, Partial, arrived, n, n < N, n, tl.program_id(1), N, SPLIT, BIAS)


@triton.jit(do_not_specialize=["M"])
def _dot_kernel(
    X, W, Bias, Y, Partial, Arrived, M, N, K,
    BIAS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to 16 lines; program (block of outputs, split of the inputs)."""
    m = tl.arange(0, 16)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    share = K // SPLIT
    k = tl.program_id(1) * share + tl.arange(0, BLOCK_K)
    w_at = W + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = X + m[:, None] * K + k[None, :]
    acc = tl.zeros([16, BLOCK_N], tl.float32)
    wait_for_inputs(PDL)
    for i in range(0, share, BLOCK_K):
        w = tl.load(w_at + i)
        x = tl.load(x_at + i, mask=(m < M)[:, None], other=0.0)
        acc = tl.dot(x, tl.trans(w), acc)
    y_at = m[:, None] * N + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    bias_at = n[None, :]
    arrived = Arrived + tl.program_id(0)
    _finish(acc, Y, Bias, Partial, arrived, y_at, mask, bias_at, tl.program_id(1), 16 * N, SPLIT, BIAS)


@functools.cache
def _arrived(device: torch.device) -> torch.Tensor:
    """Zeros, which every kernel leaves as it found them."""
    return torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)


@skinny_linear.kernel
def _skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: SkinnyConfig
) -> torch.Tensor:
    (lines, inputs), outputs = x.shape, len(weight)
    y = torch.empty(lines, outputs, dtype=x.dtype, device=x.device)
    blocks = outputs // config.block_n
    partial = arrived = y
    if config.split > 1:
        partial = torch.empty(config.split, MOST_LINES, outputs, dtype=torch.float32, device=x.device)
        arrived = _arrived(x.device)
    shared = dict(
        BIAS=bias is not None,
        SPLIT=config.split,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=1 if torch.version.hip else config.num_stages,
    )
    tensors = (x, weight, y if bias is None else bias, y, partial, arrived)
    if config.dot:
        shared |= dependent_launch(x, FEW_LINES)
        _dot_kernel[(blocks, config.split)](*tensors, lines, outputs, inputs, **shared)
    else:
        _vector_kernel[(blocks, config.split)](*tensors, outputs, inputs, **shared, **dependent_launch(x))
    return y
