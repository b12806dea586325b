"""The mixture of experts of Gemma 4: beside the dense block, with norms of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED, FeedForward, GatedFeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward
from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_infer.template.residual import Branch, SandwichNorm, Stream
from lightllm.common.basemodel.layer_infer.template.routing import TopKRouter
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot, expert_slots, fused_experts
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, router
from lightllm.common.basemodel.partial_sum import PartialSum, whole


class LateNorm(SandwichNorm):
    """SandwichNorm whose feed-forward normalises its input itself."""

    def __call__(self, stream: Stream, w: dict[str, Weight], norm: Norm, attention: Branch, ffn: Branch) -> Stream:
        hidden, residual = norm.add(*stream, w["attn_norm"])
        summed = residual + norm(attention(hidden).total(), w["attn_post_norm"])
        return norm(ffn(summed).total(), w["ffn_post_norm"]), summed


@dataclass(frozen=True)
class ScaledExperts(TopKRouter):
    def __call__(self, logits: Tensor, w: dict[str, Weight]) -> tuple[Tensor, Tensor]:
        weights, ids = super().__call__(logits, w)
        return weights * w["expert_scale"].weight[ids], ids


@dataclass(frozen=True)
class DenseAndExperts:
    norm: Norm
    dense: FeedForward
    moe: MoeFeedForward

    def __call__(self, x: Tensor, w: dict[str, Weight]) -> PartialSum:
        dense = self.norm(self.dense(self.norm(x, w["ffn_norm"]), w).total(), w["dense_post_norm"])
        choice = self.moe.route(self.norm(x, w["router_norm"]) * x.shape[-1] ** -0.5, w)
        routed = self.moe.apply(self.norm(x, w["experts_norm"]), *choice, w)
        return whole(dense + self.norm(routed.total(), w["experts_post_norm"]))


def dense_and_experts(model: BaseModel) -> DenseAndExperts:
    act, router = model.config.hidden_act, ScaledExperts(model.config.raw.size("top_k_experts"), renormalize=True)
    return DenseAndExperts(model.norm(), GatedFeedForward(act), MoeFeedForward(router, GATED[act], model.parallel))


def expert_side_slots(model: BaseModel) -> dict[str, Slot | ExpertSlot]:
    """Slots of one layer beside those of the dense block."""
    hidden, raw = model.config.hidden_size, model.config.raw
    experts, size = raw.size("num_experts"), raw.size("moe_intermediate_size")
    return {
        "dense_post_norm": model.norm_slot("post_feedforward_layernorm_1"),
        "experts_norm": model.norm_slot("pre_feedforward_layernorm_2"),
        "experts_post_norm": model.norm_slot("post_feedforward_layernorm_2"),
        "router": router("router.proj", experts, hidden),
        "router_norm": Slot((Part("router.scale", hidden, leaf=""),), None),
        "expert_scale": Slot((Part("router.per_expert_scale", experts, leaf=""),), None),
        **expert_slots(model.parallel, experts, hidden, size, fused_experts("experts", experts, hidden, size)),
    }
