"""gpt-oss: attention sinks, a window in every other layer, experts with biases and a clamped activation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightllm.common.basemodel.layer_infer.template.feed_forward import Activation
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, column
from lightllm.models.mixture import Mixture


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


class GptOss(Mixture):
    router_name = "mlp.router"
    expert_bias = True
    fused = {"transposed": True, "alternating": True}
    size_word = "intermediate_size"

    def attention_slots(self, i: int) -> dict[str, Slot]:
        sinks = Part("self_attn", self.config.num_attention_heads, leaf="sinks")
        return super().attention_slots(i) | {"sinks": column(sinks, inputs=None)}

    def expert_activation(self) -> Activation:
        return ClampedSwiglu(self.config.raw.number("swiglu_alpha"), self.config.raw.number("swiglu_limit"))
