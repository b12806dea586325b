"""The gated activation of LLaMA's feed-forward."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.triton_utils.dependent_launch import EARLY_LINES, dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op


@op
def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2F] -> [T, F]: silu of the first half, rounded to x's dtype, times the second half."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _silu_and_mul_kernel(X, Y, stride, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < F
    gate = tl.load(X + row * stride + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(X + row * stride + F + d, mask=mask, other=0.0).to(tl.float32)
    act = silu(gate).to(Y.dtype.element_ty).to(tl.float32)
    tl.store(Y + row * F + d, (act * up).to(Y.dtype.element_ty), mask=mask)


@silu_and_mul.kernel
def _silu_and_mul(x: Tensor) -> Tensor:
    tokens, width = x.shape[0], x.shape[1] // 2
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens:
        block = min(1024, triton.next_power_of_2(width))
        _silu_and_mul_kernel[(tokens, triton.cdiv(width, block))](
            x, y, x.stride(0), F=width, BLOCK=block, num_warps=4, **dependent_launch(x, EARLY_LINES)
        )
    return y
