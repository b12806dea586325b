"""What families share whose layers hold a mixture of experts, all or some of them."""

from collections.abc import Mapping

import torch

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.feed_forward import GATED, Activation, FeedForward, GatedFeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward, SumFeedForward, TopKRouter
from lightllm.common.basemodel.layer_weights.experts import (
    ExpertParts,
    ExpertSlot,
    expert_slots,
    fused_experts,
    named_experts,
)
from lightllm.common.basemodel.layer_weights.slot import Slot, whole


class Mixture(BaseModel):
    """A layer that `is_sparse` has experts in place of the feed-forward, and perhaps one beside them that every token
    takes, of `shared_size`."""

    router_name = "mlp.gate"
    experts_name = "mlp.experts"
    shared_name = "mlp.shared_experts"
    projections = ("gate_proj", "up_proj", "down_proj")  # of an expert
    expert_bias = False  # of router and experts
    fused: dict[str, bool] | None = None  # where experts lie in one tensor of all: how, for fused_experts
    top_k_word = "num_experts_per_tok"
    size_word = "moe_intermediate_size"
    moe_type: type[MoeFeedForward] = MoeFeedForward

    def is_sparse(self, i: int) -> bool:
        return True

    @property
    def num_experts(self) -> int:
        return self.config.raw.size("num_experts")

    @property
    def expert_size(self) -> int:
        return self.config.raw.size(self.size_word)

    @property
    def top_k(self) -> int:
        """How many experts a token takes."""
        return self.config.raw.size(self.top_k_word)

    def shared_size(self) -> int:
        """0 where no token takes anything beside its experts."""
        return 0

    def expert_parts(self) -> ExpertParts:
        sizes = self.config.hidden_size, self.expert_size
        if self.fused is not None:
            return fused_experts(self.experts_name, self.num_experts, *sizes, **self.fused)
        return named_experts(self.experts_name, self.projections, *sizes)

    def router(self) -> TopKRouter:
        return TopKRouter(self.top_k, renormalize=True)

    def expert_activation(self) -> Activation:
        return GATED[self.config.hidden_act]

    def experts(self) -> MoeFeedForward:
        return self.moe_type(self.router(), self.expert_activation(), self.parallel)

    def shared_expert(self) -> GatedFeedForward:
        return GatedFeedForward(self.config.hidden_act, prefix="shared_")

    def mixture_slots(self) -> dict[str, Slot | ExpertSlot]:
        hidden, experts, bias = self.config.hidden_size, self.num_experts, self.expert_bias
        slots = expert_slots(self.parallel, experts, hidden, self.expert_size, self.expert_parts(), bias)
        shared = [f"{self.shared_name}.{projection}" for projection in self.projections]
        size = self.shared_size()
        return {
            # in float32, where small differences decide
            "router": whole(self.router_name, experts, hidden, bias, dtype=torch.float32),
            **slots,
            **(self.ffn_slots(shared, size, prefix="shared_") if size else {}),
        }

    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        return self.mixture_slots() if self.is_sparse(i) else super().feed_forward_slots(i)

    def feed_forward(self, i: int) -> FeedForward:
        if not self.is_sparse(i):
            return super().feed_forward(i)
        return SumFeedForward(self.experts(), self.shared_expert()) if self.shared_size() else self.experts()
