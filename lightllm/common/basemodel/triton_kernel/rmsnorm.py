"""Root mean square norm, alone and with the residual addition before it."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.triton_utils.dependent_launch import EARLY_LINES, dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op


@op
def rmsnorm(x: Tensor, weight: Tensor, eps: float, minus_one: bool = False) -> Tensor:
    """x [..., D], weight [D] -> [..., D]: x / sqrt(mean(x^2) + eps) in float32, cast to x's dtype, times weight.

    With `minus_one`, as Gemma does it: the weight is stored minus 1, and multiplied before the cast.
    """
    if minus_one:
        return (F.rms_norm(x.float(), weight.shape, None, eps) * (1 + weight.float())).to(x.dtype)
    return F.rms_norm(x, weight.shape, None, eps) * weight


def whole_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, D] itself, or the sum of its parts [S, T, D], rounded to dtype."""
    return x.sum(0).to(dtype) if x.dim() == 3 else x


@op
def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, minus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """x, residual [T, D], weight [D] -> (rmsnorm(residual + x), residual + x); the sum is rounded to residual's dtype.

    x may be in parts [S, T, D], which are added up and rounded first.
    """
    residual = residual + whole_of(x, residual.dtype)
    return rmsnorm.twin(residual, weight, eps, minus_one), residual


@triton.jit(do_not_specialize=["rows"])
def _rmsnorm_kernel(
    X, R, W, Y, S, rows, part_stride, x_stride, head_stride, r_stride, eps,
    HEADS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr, MINUS_ONE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of rows): row i of X is head i % HEADS of line i // HEADS."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (d < D)
    w = tl.load(W + d, mask=d < D, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    at = row // HEADS * x_stride + row % HEADS * head_stride
    x = tl.load(X + at + d, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(X + part * part_stride + at + d, mask=mask, other=0.0)
    if ADD:
        if PARTS > 1:
            x = x.to(S.dtype.element_ty).to(tl.float32)
        x += tl.load(R + row * r_stride + d, mask=mask, other=0.0).to(tl.float32)
        total = x.to(S.dtype.element_ty)
        tl.store(S + row * D + d, total, mask=mask)
        x = total.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    y = normed * (1 + w) if MINUS_ONE else normed.to(Y.dtype.element_ty).to(tl.float32) * w
    tl.store(Y + row * D + d, y.to(Y.dtype.element_ty), mask=mask)


def _launch(
    parts: Tensor, residual: Tensor | None, weight: Tensor, eps: float, minus_one: bool
) -> tuple[Tensor, Tensor]:
    """parts [S, ..., D], which are added up."""
    x, dim = parts[0], weight.shape[0]
    heads = x if x.dim() == 3 else x.reshape(-1, 1, dim)
    rows = heads.shape[0] * heads.shape[1]
    addend = x if residual is None else residual
    y = torch.empty(x.shape, dtype=addend.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    if rows:
        block = triton.next_power_of_2(dim)
        per_program = max(1, 1024 // block)
        _rmsnorm_kernel[(triton.cdiv(rows, per_program),)](
            heads, addend, weight, y, total, rows,
            parts.stride(0), heads.stride(0), heads.stride(1), addend.stride(0), eps,
            PARTS=len(parts), HEADS=heads.shape[1], D=dim, ADD=residual is not None, MINUS_ONE=minus_one,
            ROWS=per_program, BLOCK=block,
            num_warps=min(16, max(4, block // 512)), **dependent_launch(heads, EARLY_LINES),
        )  # fmt: skip
    return y, total


@rmsnorm.kernel
def _rmsnorm(x: Tensor, weight: Tensor, eps: float, minus_one: bool = False) -> Tensor:
    return _launch(x[None], None, weight, eps, minus_one)[0]


@add_rmsnorm.kernel
def _add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, minus_one: bool = False
) -> tuple[Tensor, Tensor]:
    return _launch(x if x.dim() == 3 else x[None], residual, weight, eps, minus_one)
