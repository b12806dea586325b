"""Qwen3-MoE: Qwen3 with experts in every layer that the config does not except."""

from collections.abc import Mapping

from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED, FeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward
from lightllm.common.basemodel.layer_infer.template.routing import Router, TopKRouter
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot, expert_slots, named_experts
from lightllm.common.basemodel.layer_weights.slot import Slot, router
from lightllm.common.basemodel.model_config import ModelConfig
from lightllm.models.qwen3.model import Qwen3


def is_sparse(config: ModelConfig, i: int) -> bool:
    """Whether layer i of a Qwen MoE has experts."""
    return i not in config.raw.layers("mlp_only_layers") and (i + 1) % config.raw.size("decoder_sparse_step") == 0


def qwen_router(config: ModelConfig) -> Router:
    return TopKRouter(config.raw.size("num_experts_per_tok"), renormalize=config.raw.flag("norm_topk_prob"))


class Qwen3Moe(Qwen3):
    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        c, raw = self.config, self.config.raw
        if not is_sparse(c, i):
            return super().feed_forward_slots(i)
        experts, size = raw.size("num_experts"), raw.size("moe_intermediate_size")
        parts = named_experts("mlp.experts", c.hidden_size, size)
        slots = {"router": router("mlp.gate", experts, c.hidden_size)}
        return slots | expert_slots(self.parallel, experts, c.hidden_size, size, parts)

    def feed_forward(self, i: int) -> FeedForward:
        if not is_sparse(self.config, i):
            return super().feed_forward(i)
        return MoeFeedForward(qwen_router(self.config), GATED[self.config.hidden_act], self.parallel)
