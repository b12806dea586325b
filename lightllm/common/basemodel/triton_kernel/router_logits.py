"""Scores of a mixture's experts: a small product in float32, whatever the dtype of the hidden states."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.triton_utils.dependent_launch import dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op

FEW_LINES = 16  # beyond them the library's product is faster than reading the weight again for every line


@op
def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, hidden], weight float32 [experts, hidden], bias float32 [experts] -> float32 [T, experts]."""
    return F.linear(x.float(), weight, bias)


@triton.jit
def _router_logits_kernel(
    X, W, Bias, Y, x_stride, E, K: tl.constexpr,
    BIAS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of experts, line)."""
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.minimum(e, E - 1)[:, None] * K
    wait_for_inputs(PDL)
    line = tl.program_id(1).to(tl.int64)
    acc = tl.zeros([BLOCK_E, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):  # unrolled: what is read does not wait for what was
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(X + line * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        acc += tl.load(W + row + k[None, :], mask=(k < K)[None, :], other=0.0) * x[None, :]
    y = tl.sum(acc, 1)
    if BIAS:
        y += tl.load(Bias + e, mask=e < E, other=0.0)
    tl.store(Y + line * E + e, y, mask=e < E)


@router_logits.kernel
def _router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not 0 < len(x) <= FEW_LINES:
        return router_logits.twin(x, weight, bias)
    experts, hidden = weight.shape
    logits = torch.empty(len(x), experts, dtype=torch.float32, device=x.device)
    _router_logits_kernel[(triton.cdiv(experts, 2), len(x))](
        x, weight, logits if bias is None else bias, logits, x.stride(0), experts,
        K=hidden, BIAS=bias is not None, BLOCK_E=2, BLOCK_K=min(1024, triton.next_power_of_2(hidden)),
        num_warps=4, **dependent_launch(x),
    )  # fmt: skip
    return logits
