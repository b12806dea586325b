"""What a token's experts answered, weighted and summed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightllm.common.basemodel.triton_kernel.grouped_gemm import Routing, grouped_gemm
from lightllm.common.basemodel.triton_kernel.lone_token_experts import lone_sum
from lightllm.common.triton_utils.dispatch import op


@op
def weighted_sum(lines: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """lines [T * k, D], weights float32 [T, k] -> [T, D], summed in float32. Lines of weight 0 are not looked at."""
    weights = weights[..., None]
    wide = lines.view(*weights.shape[:2], -1).float()
    return (wide.masked_fill(weights == 0, 0.0) * weights).sum(1).to(lines.dtype)


@triton.jit
def _weighted_sum_kernel(X, Weights, Y, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, block of features)."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        line = token * K + j
        weight = tl.load(Weights + line)
        end = tl.where(weight == 0, 0, D)
        total += weight * tl.load(X + line * D + d, mask=d < end, other=0.0).to(tl.float32)
    tl.store(Y + token * D + d, total.to(Y.dtype.element_ty), mask=d < D)


@weighted_sum.kernel
def _weighted_sum(lines: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    tokens, dim = len(weights), lines.shape[1]
    out = torch.empty(tokens, dim, dtype=lines.dtype, device=lines.device)
    if tokens:
        block = min(512, triton.next_power_of_2(dim))
        _weighted_sum_kernel[(tokens, triton.cdiv(dim, block))](
            *(lines, weights, out, dim), K=weights.shape[1], BLOCK=block, num_warps=2
        )
    return out


@op
def routed_sum(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing, weights: torch.Tensor
) -> torch.Tensor:
    """x [T * k, K] with a line for each choice, weight [experts, N, K], bias [experts, N], weights float32 [T, k] ->
    [T, N]: the weighted_sum of the grouped_gemm. Choices of experts that are not held must have weight 0."""
    return weighted_sum(grouped_gemm(x, weight, bias, routing), weights)


@routed_sum.kernel
def _routed_sum(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing, weights: torch.Tensor
) -> torch.Tensor:
    if len(weights) == 1:
        return lone_sum(x, weight, bias, routing.ids, routing.first, weights)
    return routed_sum.twin(x, weight, bias, routing, weights)
