"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and one more that every token takes, scaled by a gate of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED, FeedForward, GatedFeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward, SumFeedForward
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot, expert_slots, named_experts
from lightllm.common.basemodel.layer_weights.slot import Slot, router, whole
from lightllm.common.basemodel.normed import Lines
from lightllm.common.basemodel.partial_sum import PartialSum
from lightllm.models.qwen2.model import Qwen2
from lightllm.models.qwen3_moe.model import is_sparse, qwen_router


@dataclass(frozen=True)
class GatedSharedExpert(GatedFeedForward):
    def __call__(self, x: Lines, w: dict[str, Weight]) -> PartialSum:
        return super().__call__(x, w) * w["shared_gate"].apply(x).sigmoid()


class Qwen2Moe(Qwen2):
    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        c, raw = self.config, self.config.raw
        if not is_sparse(c, i):
            return super().feed_forward_slots(i)
        hidden, experts, size = c.hidden_size, raw.size("num_experts"), raw.size("moe_intermediate_size")
        names = "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"
        return {
            "router": router("mlp.gate", experts, hidden),
            **expert_slots(self.parallel, experts, hidden, size, named_experts("mlp.experts", hidden, size)),
            **self.gated_slots(*names, raw.size("shared_expert_intermediate_size"), prefix="shared_"),
            "shared_gate": whole("mlp.shared_expert_gate", 1, hidden),
        }

    def feed_forward(self, i: int) -> FeedForward:
        act = self.config.hidden_act
        if not is_sparse(self.config, i):
            return super().feed_forward(i)
        routed = MoeFeedForward(qwen_router(self.config), GATED[act], self.parallel)
        return SumFeedForward(routed, GatedSharedExpert(act, prefix="shared_"))
