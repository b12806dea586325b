"""How a mixture of experts chooses: each variant turns the router's logits into k experts and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight


class Router(Protocol):
    def __call__(self, logits: Tensor, w: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        """logits float32 [T, experts] -> (weights float32 [T, k], ids int64 [T, k])."""
        ...


@dataclass(frozen=True)
class SoftmaxTopK:
    """The k most probable experts, each weighted with its probability."""

    k: int

    def __call__(self, logits: Tensor, w: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        weights, ids = logits.softmax(-1).topk(self.k, -1)
        return weights, ids


@dataclass(frozen=True)
class RenormalizedTopK:
    """The k best experts, their probabilities among themselves."""

    k: int

    def __call__(self, logits: Tensor, w: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        best, ids = logits.topk(self.k, -1)
        return best.softmax(-1), ids


@dataclass(frozen=True)
class SigmoidTopK:
    """The k best experts, each weighted with the sigmoid of its logit."""

    k: int

    def __call__(self, logits: Tensor, w: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        best, ids = logits.topk(self.k, -1)
        return best.sigmoid(), ids


@dataclass(frozen=True)
class GroupLimitedSoftmax:
    """DeepSeek V2: the k most probable experts of the best groups, a group being as good as its best expert."""

    k: int
    groups: int
    best_groups: int
    scaling: float

    def __call__(self, logits: Tensor, w: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        scores = logits.softmax(-1)
        quality = scores.unflatten(-1, (self.groups, -1)).amax(-1)
        weights, ids = _of_best_groups(scores, quality, self.best_groups, 0.0).topk(self.k, -1)
        return weights * self.scaling, ids


@dataclass(frozen=True)
class BiasedSigmoid:
    """DeepSeek V3: sigmoid scores; a bias (slot "router_bias") steers the choice but not the weights. A group is as
    good as its best two experts together."""

    k: int
    groups: int
    best_groups: int
    renormalize: bool
    scaling: float

    def __call__(self, logits: Tensor, w: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        choice = scores + w["router_bias"].weight
        quality = choice.unflatten(-1, (self.groups, -1)).topk(2, -1).values.sum(-1)
        ids = _of_best_groups(choice, quality, self.best_groups, -torch.inf).topk(self.k, -1).indices
        weights = scores.gather(1, ids)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scaling, ids


def _of_best_groups(scores: Tensor, quality: Tensor, count: int, other: float) -> Tensor:
    """scores [T, experts] with those outside the `count` best groups (quality [T, groups]) replaced."""
    keep = torch.zeros_like(quality, dtype=torch.bool).scatter_(1, quality.topk(count, -1).indices, True)
    return scores.unflatten(-1, (quality.shape[1], -1)).masked_fill(~keep[..., None], other).flatten(1)
