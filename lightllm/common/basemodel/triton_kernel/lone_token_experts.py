"""The experts of a lone token: products with one line, which only stream the weights of the few experts chosen."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.triton_utils.dependent_launch import dependent_launch, wait_for_inputs


@triton.jit
def _add_products(acc, X, W, n, factor, here, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """acc [outputs, BLOCK_K] plus factor times the line X times rows n of W, still to be summed along the line; nothing
    is read unless `here`."""
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = here & (k < K)
        x = tl.load(X + k, mask=inside, other=0.0).to(tl.float32) * factor
        w = tl.load(W + n[:, None] * K + k[None, :], mask=inside[None, :], other=0.0)
        acc += w.to(tl.float32) * x[None, :]
    return acc


@triton.jit(do_not_specialize=["first", "held"])
def _product_kernel(
    X, W, Bias, Y, Ids, x_stride, first, held,
    N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, choice)."""
    wait_for_inputs(PDL)
    choice = tl.program_id(1)
    expert = tl.load(Ids + choice).to(tl.int64) - first
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    here = (expert >= 0) & (expert < held)
    if here:
        ROWS: tl.constexpr = 2 if GATED else 1
        X += choice * x_stride
        W += expert * ROWS * N * K
        zero = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        acc = _add_products(zero, X, W, row, 1.0, here, K, BLOCK_K)
        if GATED:
            up = tl.sum(_add_products(zero, X, W + N * K, row, 1.0, here, K, BLOCK_K), 1)
        y = tl.sum(acc, 1)
        if BIAS:
            at = Bias + expert * ROWS * N + row
            y += tl.load(at).to(tl.float32)
            if GATED:
                up += tl.load(at + N).to(tl.float32)
        y = y.to(Y.dtype.element_ty)
        if GATED:  # rounded wherever silu_and_mul rounds
            gate = y.to(tl.float32)
            act = (gate / (1 + tl.exp(-gate))).to(y.dtype).to(tl.float32)
            y = (act * up.to(y.dtype).to(tl.float32)).to(y.dtype)
        tl.store(Y + choice * N + n, y, mask=n < N)


@triton.jit(do_not_specialize=["first", "held"])
def _sum_kernel(
    X, W, Bias, Addend, Y, Ids, Weights, x_stride, first, held,
    N: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs): of all choices."""
    wait_for_inputs(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    rest = tl.zeros([BLOCK_N], tl.float32)
    if ADD:
        rest += tl.load(Addend + row).to(tl.float32)
    for choice in tl.static_range(CHOICES):
        expert = tl.load(Ids + choice).to(tl.int64) - first
        weight = tl.load(Weights + choice)
        here = (expert >= 0) & (expert < held) & (weight != 0)
        acc = _add_products(acc, X + choice * x_stride, W + expert * N * K, row, weight, here, K, BLOCK_K)
        if BIAS:
            rest += weight * tl.load(Bias + expert * N + row, mask=here, other=0.0).to(tl.float32)
    tl.store(Y + n, (tl.sum(acc, 1) + rest).to(Y.dtype.element_ty), mask=n < N)


@dataclass(frozen=True)
class LoneConfig:
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int


PRODUCT, SUM = LoneConfig(2, 2048, 4), LoneConfig(2, 1024, 2)  # the best of tune_families.py on an H200


def _fitting(config: LoneConfig, inputs: int) -> LoneConfig:
    return replace(config, BLOCK_K=min(config.BLOCK_K, triton.next_power_of_2(inputs)))


def lone_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, first: int, gated: bool, config: LoneConfig = PRODUCT
) -> Tensor:
    """grouped_gemm of ids int32 [1, k]."""
    experts, outputs, inputs = weight.shape
    outputs //= 2 if gated else 1
    out = torch.empty(ids.shape[1], outputs, dtype=x.dtype, device=x.device)
    config = _fitting(config, inputs)
    _product_kernel[(triton.cdiv(outputs, config.BLOCK_N), ids.shape[1])](
        x, weight, x if bias is None else bias, out, ids, x.stride(0) if len(x) > 1 else 0, first, experts,
        N=outputs, K=inputs, BIAS=bias is not None, GATED=gated,
        **vars(config), **dependent_launch(ids),
    )  # fmt: skip
    return out


def lone_sum(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    first: int,
    weights: Tensor,
    addend: Tensor | None = None,
    config: LoneConfig = SUM,
) -> Tensor:
    """routed_sum of ids int32 [1, k], not rounded in between."""
    experts, outputs, inputs = weight.shape
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    config = _fitting(config, inputs)
    _sum_kernel[(triton.cdiv(outputs, config.BLOCK_N),)](
        x, weight, x if bias is None else bias, x if addend is None else addend, out,
        ids, weights, x.stride(0), first, experts,
        N=outputs, K=inputs, CHOICES=ids.shape[1], BIAS=bias is not None, ADD=addend is not None,
        **vars(config), **dependent_launch(ids),
    )  # fmt: skip
    return out
