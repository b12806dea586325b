"""gpt-oss: attention sinks, a window in every other layer, experts with biases and a clamped activation."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.feed_forward import FeedForward
from lightllm.common.basemodel.layer_infer.template.moe import MoeFeedForward
from lightllm.common.basemodel.layer_infer.template.routing import TopKRouter
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot, expert_slots
from lightllm.common.basemodel.layer_weights.slot import Expert, Part, Slot, column, router


@dataclass(frozen=True)
class ClampedSwiglu:
    alpha: float
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, 2F], gate first -> [T, F]."""
        gate, up = x.chunk(2, -1)
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


class GptOss(BaseModel):
    def attention_slots(self, i: int) -> dict[str, Slot]:
        sinks = Part("self_attn", self.config.num_attention_heads, leaf="sinks")
        return super().attention_slots(i) | {"sinks": column(sinks, inputs=None)}

    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        c, experts = self.config, self.config.raw.size("num_experts")
        size, hidden = c.intermediate_size, c.hidden_size
        gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"

        def parts(e: int) -> tuple[Part, Part, Part]:
            one = Expert(e, experts, transposed=True)
            gate, up = (Part(gate_up, size, slice(j, 2 * size, 2), 2 * size, leaf="", expert=one) for j in (0, 1))
            return gate, up, Part(down, hidden, leaf="", expert=one)

        slots = {"router": router("mlp.router", experts, hidden, bias=True)}
        return slots | expert_slots(self.parallel, experts, hidden, size, parts, bias=True)

    def feed_forward(self, i: int) -> FeedForward:
        raw = self.config.raw
        activation = ClampedSwiglu(raw.number("swiglu_alpha"), raw.number("swiglu_limit"))
        router = TopKRouter(raw.size("num_experts_per_tok"), renormalize=True)
        return MoeFeedForward(router, activation, self.parallel)
