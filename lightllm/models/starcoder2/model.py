"""StarCoder2: LayerNorm, biases everywhere, a feed-forward without a gate, a sliding window."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.feed_forward import FeedForward, PlainFeedForward
from lightllm.common.basemodel.layer_infer.template.norm import LayerNorm, Norm
from lightllm.common.basemodel.layer_weights.slot import Slot, row


class Starcoder2(BaseModel):
    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, bias = self.config, self.config.raw.flag("use_bias")
        return {
            "qkv": self.qkv_slot("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=bias),
            "o": row("self_attn.o_proj", c.hidden_size, c.num_attention_heads * c.head_dim, bias=bias),
        }

    def feed_forward_slots(self, i: int) -> dict[str, Slot]:
        return self.plain_slots("mlp.c_fc", "mlp.c_proj", bias=self.config.raw.flag("use_bias"))

    def norm(self) -> Norm:
        return LayerNorm(self.config.rms_norm_eps)

    def feed_forward(self, i: int) -> FeedForward:
        return PlainFeedForward(self.config.hidden_act)
