"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and one more that every token takes, scaled by a gate of its own."""

from dataclasses import dataclass

from lightllm.common.basemodel.layer_infer.template.feed_forward import GatedFeedForward
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot
from lightllm.common.basemodel.layer_weights.slot import Slot, whole
from lightllm.common.basemodel.normed import Lines
from lightllm.common.basemodel.partial_sum import PartialSum
from lightllm.models.qwen2.model import Qwen2
from lightllm.models.qwen3_moe.model import QwenMixture


@dataclass(frozen=True)
class GatedSharedExpert(GatedFeedForward):
    def __call__(self, x: Lines, w: Weights) -> PartialSum:
        return super().__call__(x, w) * w["shared_gate"].apply(x).sigmoid()


class Qwen2Moe(QwenMixture, Qwen2):
    shared_name = "mlp.shared_expert"

    def shared_size(self) -> int:
        return self.config.raw.size("shared_expert_intermediate_size")

    def shared_expert(self) -> GatedFeedForward:
        return GatedSharedExpert(self.config.hidden_act, prefix="shared_")

    def mixture_slots(self) -> dict[str, Slot | ExpertSlot]:
        gate = whole("mlp.shared_expert_gate", 1, self.config.hidden_size)
        return super().mixture_slots() | {"shared_gate": gate}
