"""Qwen3: every head of q and k is normalised."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.attention import AttentionBlock
from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_weights.slot import Slot, vector


class Qwen3(BaseModel):
    def attention_slots(self, i: int) -> dict[str, Slot]:
        return super().attention_slots(i) | {
            "q_norm": vector("self_attn.q_norm", self.head_dim),
            "k_norm": vector("self_attn.k_norm", self.head_dim),
        }

    def attention(self, i: int, qk_norm: Norm | None = None) -> AttentionBlock:
        return super().attention(i, self.norm())
