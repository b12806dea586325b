"""Phi-3 and Phi-4: q, k and v lie in one tensor, gate and up in another."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_weights.slot import Slot


class Phi3(BaseModel):
    def attention_slots(self, i: int) -> dict[str, Slot]:
        return super().attention_slots(i) | {"qkv": self.qkv_slot("self_attn.qkv_proj")}

    def feed_forward_slots(self, i: int) -> dict[str, Slot]:
        gate_up = "mlp.gate_up_proj"
        return self.gated_slots(gate_up, gate_up, "mlp.down_proj", self.config.intermediate_size)
