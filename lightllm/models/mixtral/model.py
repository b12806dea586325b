"""Mixtral: Mistral with eight experts in every layer, two of which a token takes."""

from collections.abc import Mapping

from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED, FeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward
from lightllm.common.basemodel.layer_infer.template.routing import TopKRouter
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot, expert_slots
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, router
from lightllm.models.mistral.model import Mistral


class Mixtral(Mistral):
    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        c, experts = self.config, self.config.raw.size("num_experts")
        size, hidden, moe = c.intermediate_size, c.hidden_size, "block_sparse_moe"

        def parts(e: int) -> tuple[Part, Part, Part]:
            name = f"{moe}.experts.{e}"
            return Part(f"{name}.w1", size), Part(f"{name}.w3", size), Part(f"{name}.w2", hidden)

        slots = {"router": router(f"{moe}.gate", experts, hidden)}
        return slots | expert_slots(self.parallel, experts, hidden, size, parts)

    def feed_forward(self, i: int) -> FeedForward:
        c = self.config
        router = TopKRouter(c.raw.size("num_experts_per_tok"), renormalize=True)
        return MoeFeedForward(router, GATED[c.hidden_act], self.parallel)
