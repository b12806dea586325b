"""Phi-1, 1.5 and 2: LayerNorm, attention and feed-forward side by side, biases everywhere, also on the head."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.attention import AttentionBlock
from lightllm.common.basemodel.layer_infer.template.feed_forward import FeedForward, PlainFeedForward
from lightllm.common.basemodel.layer_infer.template.norm import LayerNorm, Norm
from lightllm.common.basemodel.layer_infer.template.residual import ParallelResidual, Residual
from lightllm.common.basemodel.layer_weights.slot import Slot, row, vector, vocabulary


class Phi(BaseModel):
    def outer_slots(self) -> dict[str, Slot]:
        c = self.config
        return super().outer_slots() | {
            "final_norm": self.norm_slot("model.final_layernorm"),
            "head": vocabulary("lm_head", c.vocab_size, c.hidden_size, bias=True),
        }

    def norm_slots(self, i: int) -> dict[str, Slot]:
        return {"attn_norm": self.norm_slot("input_layernorm")}

    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, names = self.config, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        slots = {
            "qkv": self.qkv_slot(*names, bias=True),
            "o": row("self_attn.dense", c.hidden_size, c.num_attention_heads * c.head_dim, bias=True),
        }
        if c.raw.flag("qk_layernorm"):
            slots["q_norm"] = vector("self_attn.q_layernorm", c.head_dim, bias=True)
            slots["k_norm"] = vector("self_attn.k_layernorm", c.head_dim, bias=True)
        return slots

    def feed_forward_slots(self, i: int) -> dict[str, Slot]:
        return self.plain_slots("mlp.fc1", "mlp.fc2")

    def norm(self) -> Norm:
        return LayerNorm(self.config.rms_norm_eps)

    def residual(self) -> Residual:
        return ParallelResidual()

    def attention(self, i: int, qk_norm: Norm | None = None) -> AttentionBlock:
        return super().attention(i, self.norm() if self.config.raw.flag("qk_layernorm") else None)

    def feed_forward(self, i: int) -> FeedForward:
        return PlainFeedForward(self.config.hidden_act)
