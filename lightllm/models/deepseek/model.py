"""DeepSeek V2, V2-Lite, V3 and R1: latent attention, experts behind the first dense layers, MTP blocks left aside."""

from collections.abc import Mapping

from lightllm.common.basemodel.layer_infer.template.feed_forward import FeedForward
from lightllm.common.basemodel.layer_infer.template.routing import Router
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot
from lightllm.common.basemodel.layer_weights.slot import Slot
from lightllm.models.deepseek.latent import LatentModel
from lightllm.models.deepseek.moe import deepseek_moe, deepseek_moe_slots, is_mtp_block, v2_router, v3_router


class DeepseekV2(LatentModel):
    biased_router = False

    def router(self) -> Router:
        return v2_router(self.config)

    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        if i < self.config.raw.count("first_k_dense_replace"):
            return super().feed_forward_slots(i)
        return deepseek_moe_slots(self, self.biased_router)

    def feed_forward(self, i: int) -> FeedForward:
        if i < self.config.raw.count("first_k_dense_replace"):
            return super().feed_forward(i)
        return deepseek_moe(self, self.router())


class DeepseekV3(DeepseekV2):
    biased_router = True

    def router(self) -> Router:
        return v3_router(self.config)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or is_mtp_block(self.config, name)
