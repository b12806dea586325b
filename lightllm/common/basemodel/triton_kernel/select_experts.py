"""How a mixture of experts chooses: a router's logits to k experts and their weights."""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.triton_utils.dependent_launch import dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op


@dataclass(frozen=True)
class TopK:
    """The k best experts, weighted with their scores; `renormalize`: with their scores among themselves.

    With a bias the best are those of the largest score + bias, else those of the largest logits; both make the `rank`.
    With groups, the best experts of the best groups: a group is as good as the sum of its `judges` largest ranks.
    """

    k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    scaling: float = 1.0
    groups: int = 1
    best_groups: int = 1
    judges: int = 1


@op
def select_experts(logits: Tensor, bias: Tensor | None, rule: TopK) -> tuple[Tensor, Tensor]:
    """logits float32 [T, experts], bias float32 [experts] -> (weights float32 [T, k], ids int32 [T, k])."""
    scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
    rank = logits if bias is None else scores + bias
    if rule.groups > 1:
        grouped = rank.unflatten(-1, (rule.groups, -1))
        best = grouped.topk(rule.judges, -1).values.sum(-1).topk(rule.best_groups, -1).indices
        keep = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        rank = grouped.masked_fill(~keep[..., None], -torch.inf).flatten(1)
    ids = rank.topk(rule.k, -1).indices
    weights = scores.gather(1, ids)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * rule.scaling, ids.int()


@triton.jit
def _scores(logits, peak, total, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        return tl.exp(logits - peak) / total
    else:
        return 1 / (1 + tl.exp(-logits))


@triton.jit
def _select_experts_kernel(
    Logits, Bias, Weights, Ids, scaling,
    E: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr, BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, BEST_GROUPS: tl.constexpr, JUDGES: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a token: the best again and again, each struck out when it is found."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    wait_for_inputs(PDL)
    logits = tl.load(Logits + token * E + e, mask=e < E, other=-float("inf"))
    peak = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - peak), 0)
    rank = logits
    if BIAS:
        scores = _scores(logits, peak, total, SOFTMAX)
        rank = tl.where(e < E, scores + tl.load(Bias + e, mask=e < E, other=0.0), -float("inf"))
    if GROUPS > 1:
        SIZE: tl.constexpr = E // GROUPS
        g = tl.arange(0, BLOCK_G)
        quality = tl.full([BLOCK_G], -float("inf"), tl.float32)
        for group in tl.static_range(GROUPS):
            left = tl.where(e // SIZE == group, rank, -float("inf"))
            good = 0.0
            for _ in tl.static_range(JUDGES):
                good += tl.max(left, 0)
                left = tl.where(e == tl.argmax(left, 0), -float("inf"), left)
            quality = tl.where(g == group, good, quality)
        keep = e < 0
        for _ in tl.static_range(BEST_GROUPS):
            best = tl.argmax(quality, 0)
            keep = keep | (e // SIZE == best)
            quality = tl.where(g == best, -float("inf"), quality)
        rank = tl.where(keep, rank, -float("inf"))
    k = tl.arange(0, BLOCK_K)
    weights = tl.zeros([BLOCK_K], tl.float32)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for j in tl.static_range(K):
        most, best = tl.max(rank, 0, return_indices=True)
        if BIAS:
            score = tl.sum(tl.where(e == best, scores, 0.0), 0)
        else:
            score = _scores(most, peak, total, SOFTMAX)
        weights = tl.where(k == j, score, weights)
        ids = tl.where(k == j, best, ids)
        rank = tl.where(e == best, -float("inf"), rank)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(Weights + token * K + k, weights * scaling, mask=k < K)
    tl.store(Ids + token * K + k, ids, mask=k < K)


@select_experts.kernel
def _select_experts(logits: Tensor, bias: Tensor | None, rule: TopK) -> tuple[Tensor, Tensor]:
    tokens, experts = logits.shape
    weights = torch.empty(tokens, rule.k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, rule.k, dtype=torch.int32, device=logits.device)
    if tokens:
        _select_experts_kernel[(tokens,)](
            logits, logits if bias is None else bias, weights, ids, rule.scaling,
            E=experts, K=rule.k, SOFTMAX=rule.score == "softmax", BIAS=bias is not None, RENORMALIZE=rule.renormalize,
            GROUPS=rule.groups, BEST_GROUPS=rule.best_groups, JUDGES=rule.judges,
            BLOCK_E=triton.next_power_of_2(experts), BLOCK_G=triton.next_power_of_2(rule.groups),
            BLOCK_K=triton.next_power_of_2(rule.k),
            num_warps=1, **dependent_launch(logits),
        )  # fmt: skip
    return weights, ids
