"""Gemma 4 26B-A4B: experts beside the dense block of every layer, each with norms of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightllm.common.basemodel.layer_infer.template.feed_forward import FeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward, TopKRouter
from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_infer.template.residual import Attended, Branch, PreNorm, Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot
from lightllm.common.basemodel.layer_weights.slot import Slot, whole
from lightllm.common.basemodel.normed import Lines, tensor_of
from lightllm.common.basemodel.partial_sum import PartialSum, added, taken
from lightllm.models.gemma4.model import Gemma4
from lightllm.models.mixture import Mixture


class LateNorm(PreNorm):
    """ScaledSum whose feed-forward normalises its input itself."""

    def feed(self, attended: Attended, w: Weights, norm: Norm, ffn: Branch) -> Stream:
        summed = added(norm(attended.answer.total(), w["attn_post_norm"]), attended.residual)
        return (summed + norm(ffn(summed).total(), w["ffn_post_norm"])) * w["scalar"].weight, None


@dataclass(frozen=True)
class ScaledExperts(TopKRouter):
    def __call__(self, logits: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        weights, ids = super().__call__(logits, w)
        return weights * w["expert_scale"].weight[ids], ids


@dataclass(frozen=True)
class DenseAndExperts:
    norm: Norm
    dense: FeedForward
    moe: MoeFeedForward

    def __call__(self, x: Lines, w: Weights) -> PartialSum:
        x = tensor_of(x)
        dense = self.norm(self.dense(self.norm(x, w["ffn_norm"]), w).total(), w["dense_post_norm"])
        choice = self.moe.route(self.norm(x, w["router_norm"]) * x.shape[-1] ** -0.5, w)
        routed = self.moe.apply(self.norm(x, w["experts_norm"]), *choice, w)
        return taken(dense + self.norm(routed.total(), w["experts_post_norm"]))


class Gemma4Moe(Mixture, Gemma4):
    residual_type = LateNorm
    router_name = "router.proj"
    experts_name = "experts"
    fused = {"transposed": False}
    top_k_word = "top_k_experts"

    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        return {
            **Gemma4.feed_forward_slots(self, i),
            **self.mixture_slots(),
            "dense_post_norm": self.norm_slot("post_feedforward_layernorm_1"),
            "experts_norm": self.norm_slot("pre_feedforward_layernorm_2"),
            "experts_post_norm": self.norm_slot("post_feedforward_layernorm_2"),
            "router_norm": whole("router.scale", self.config.hidden_size, leaf=""),
            "expert_scale": whole("router.per_expert_scale", self.num_experts, leaf=""),
        }

    def router(self) -> TopKRouter:
        return ScaledExperts(self.top_k, renormalize=True)

    def feed_forward(self, i: int) -> FeedForward:
        return DenseAndExperts(self.norm(), Gemma4.feed_forward(self, i), self.experts())
