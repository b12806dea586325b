"""InternLM 2 and 2.5: LLaMA with other names, and q, k and v fused KV group by KV group."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_weights.slot import Slot, row, vocabulary


class InternLM2(BaseModel):
    def outer_slots(self) -> dict[str, Slot]:
        c = self.config
        return super().outer_slots() | {
            "embed": vocabulary("model.tok_embeddings", c.vocab_size, c.hidden_size),
            "head": vocabulary("output", c.vocab_size, c.hidden_size),
        }

    def norm_slots(self, i: int) -> dict[str, Slot]:
        return {"attn_norm": self.norm_slot("attention_norm"), "ffn_norm": self.norm_slot("ffn_norm")}

    def attention_slots(self, i: int) -> dict[str, Slot]:
        c = self.config
        return {
            "qkv": self.qkv_slot("attention.wqkv", bias=c.attention_bias, grouped=True),
            "o": row("attention.wo", c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.attention_bias),
        }

    def feed_forward_slots(self, i: int) -> dict[str, Slot]:
        names = "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"
        return self.gated_slots(*names, self.config.intermediate_size)
