"""GLM-4.5 and 4.6: LLaMA with rotary embeddings of half of each head, biased sigmoid routing and a shared expert."""

from collections.abc import Mapping

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.attention import AttentionBlock
from lightllm.common.basemodel.layer_infer.template.feed_forward import FeedForward
from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_weights.experts import ExpertSlot
from lightllm.common.basemodel.layer_weights.slot import Slot, row, vector
from lightllm.models.deepseek.moe import deepseek_moe, deepseek_moe_slots, is_mtp_block, v3_router


class Glm4Moe(BaseModel):
    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, names = self.config, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        slots = {
            "qkv": self.qkv_slot(*names, bias=c.attention_bias),
            "o": row("self_attn.o_proj", c.hidden_size, c.num_attention_heads * c.head_dim),
        }
        if c.raw.flag("use_qk_norm"):
            slots["q_norm"] = vector("self_attn.q_norm", c.head_dim)
            slots["k_norm"] = vector("self_attn.k_norm", c.head_dim)
        return slots

    def feed_forward_slots(self, i: int) -> Mapping[str, Slot | ExpertSlot]:
        if i < self.config.raw.count("first_k_dense_replace"):
            return super().feed_forward_slots(i)
        return deepseek_moe_slots(self, biased=True)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or is_mtp_block(self.config, name)

    def attention(self, i: int, qk_norm: Norm | None = None) -> AttentionBlock:
        return super().attention(i, self.norm() if self.config.raw.flag("use_qk_norm") else None)

    def feed_forward(self, i: int) -> FeedForward:
        if i < self.config.raw.count("first_k_dense_replace"):
            return super().feed_forward(i)
        return deepseek_moe(self, v3_router(self.config))
