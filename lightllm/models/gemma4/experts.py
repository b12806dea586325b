"""The mixture of experts of Gemma 4: beside the dense block, with norms of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightllm.common.basemodel.layer_infer.template.feed_forward import GatedFeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward
from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_infer.template.residual import Branch, SandwichNorm, Stream
from lightllm.common.basemodel.layer_infer.template.routing import TopKRouter
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight


class LateNorm(SandwichNorm):
    """SandwichNorm whose feed-forward normalises its input itself."""

    def __call__(self, stream: Stream, w: dict[str, Weight], norm: Norm, attention: Branch, ffn: Branch) -> Stream:
        hidden, residual = norm.add(*stream, w["attn_norm"])
        total = residual + norm(attention(hidden), w["attn_post_norm"])
        return norm(ffn(total), w["ffn_post_norm"]), total


@dataclass(frozen=True)
class ScaledExperts(TopKRouter):
    def __call__(self, logits: Tensor, w: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        weights, ids = super().__call__(logits, w)
        return weights * w["expert_scale"].weight[ids], ids


@dataclass(frozen=True)
class DenseAndExperts:
    norm: Norm
    dense: GatedFeedForward
    moe: MoeFeedForward

    def __call__(self, x: Tensor, w: dict[str, Weight]) -> Tensor:
        dense = self.norm(self.dense(self.norm(x, w["ffn_norm"]), w), w["dense_post_norm"])
        choice = self.moe.route(self.norm(x, w["router_norm"]) * x.shape[-1] ** -0.5, w)
        routed = self.moe.apply(self.norm(x, w["experts_norm"]), *choice, w)
        return dense + self.norm(routed, w["experts_post_norm"])
