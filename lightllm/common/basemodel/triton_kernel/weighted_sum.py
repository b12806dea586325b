"""What a token's experts answered, weighted and summed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.grouped_gemm import Routing, grouped_gemm
from lightllm.common.basemodel.triton_kernel.lone_token_experts import lone_sum
from lightllm.common.triton_utils.dispatch import op


@op
def weighted_sum(lines: Tensor, weights: Tensor, addend: Tensor | None = None) -> Tensor:
    """lines [T * k, D], weights float32 [T, k], addend [T, D] -> [T, D], summed in float32. Lines of weight 0 are not
    looked at."""
    weights = weights[..., None]
    wide = lines.view(*weights.shape[:2], -1).float()
    total = (wide.masked_fill(weights == 0, 0.0) * weights).sum(1)
    return (total if addend is None else total + addend).to(lines.dtype)


@triton.jit
def _weighted_sum_kernel(
    X, Weights, Addend, Y, D, K: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (token, block of features)."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if ADD:
        total += tl.load(Addend + token * D + d, mask=d < D, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        line = token * K + j
        weight = tl.load(Weights + line)
        end = tl.where(weight == 0, 0, D)
        total += weight * tl.load(X + line * D + d, mask=d < end, other=0.0).to(tl.float32)
    tl.store(Y + token * D + d, total.to(Y.dtype.element_ty), mask=d < D)


@weighted_sum.kernel
def _weighted_sum(lines: Tensor, weights: Tensor, addend: Tensor | None = None) -> Tensor:
    tokens, dim = len(weights), lines.shape[1]
    out = torch.empty(tokens, dim, dtype=lines.dtype, device=lines.device)
    if tokens:
        block = min(512, triton.next_power_of_2(dim))
        _weighted_sum_kernel[(tokens, triton.cdiv(dim, block))](
            lines, weights, lines if addend is None else addend, out, dim,
            K=weights.shape[1], ADD=addend is not None, BLOCK=block,
            num_warps=2,
        )  # fmt: skip
    return out


@op
def routed_sum(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, weights: Tensor, addend: Tensor | None = None
) -> Tensor:
    """x [T * k, K] with a line for each choice, weight [experts, N, K], bias [experts, N], weights float32 [T, k],
    addend [T, N] -> [T, N]: the weighted_sum of the grouped_gemm. Choices of experts that are not held must have weight
    0."""
    return weighted_sum(grouped_gemm(x, weight, bias, routing), weights, addend)


@routed_sum.kernel
def _routed_sum(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, weights: Tensor, addend: Tensor | None = None
) -> Tensor:
    if len(weights) == 1:
        return lone_sum(x, weight, bias, routing.ids, routing.first, weights, addend)
    return routed_sum.twin(x, weight, bias, routing, weights, addend)
