"""GLM-4 in transformers' layouts: rotary pairs (2i, 2i + 1) in half of each head, gate and up in one tensor."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.residual import Residual, SandwichNorm
from lightllm.common.basemodel.layer_weights.slot import Slot, row


class Glm(BaseModel):
    """GLM-4-9b-chat-hf."""

    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, names = self.config, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return {
            "qkv": self.qkv_slot(*names, bias=c.attention_bias, paired=True),
            "o": row("self_attn.o_proj", c.hidden_size, c.num_attention_heads * c.head_dim),
        }

    def feed_forward_slots(self, i: int) -> dict[str, Slot]:
        gate_up = "mlp.gate_up_proj"
        return self.gated_slots(gate_up, gate_up, "mlp.down_proj", self.config.intermediate_size)


class Glm4(Glm):
    """GLM-4-0414: also norms behind attention and feed-forward."""

    def norm_slots(self, i: int) -> dict[str, Slot]:
        return super().norm_slots(i) | {
            "attn_post_norm": self.norm_slot("post_self_attn_layernorm"),
            "ffn_post_norm": self.norm_slot("post_mlp_layernorm"),
        }

    def residual(self) -> Residual:
        return SandwichNorm()
