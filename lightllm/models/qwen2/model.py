"""Qwen2 and Qwen2.5: biases on q, k and v, whatever the config says; a sliding window in some layers if switched on."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_weights.slot import Slot


class Qwen2(BaseModel):
    def attention_slots(self, i: int) -> dict[str, Slot]:
        qkv = self.qkv_slot("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=True)
        return super().attention_slots(i) | {"qkv": qkv}
