"""ChatGLM2, ChatGLM3 and GLM-4 in the layout of their remote code: GLM with other names, q, k and v in one tensor."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_weights.slot import Slot, row, vocabulary
from lightllm.common.basemodel.model_config import ConfigError


class ChatGLM(BaseModel):
    layer_prefix = "transformer.encoder.layers.{}."

    def outer_slots(self) -> dict[str, Slot]:
        c = self.config
        if not c.raw.flag("rmsnorm", True) or c.raw.flag("apply_residual_connection_post_layernorm", False):
            raise ConfigError("config.json: chatglm is supported with rmsnorm and pre-norm residuals only")
        return {
            "embed": vocabulary("transformer.embedding.word_embeddings", c.vocab_size, c.hidden_size),
            "final_norm": self.norm_slot("transformer.encoder.final_layernorm"),
            "head": vocabulary("transformer.output_layer", c.vocab_size, c.hidden_size),
        }

    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, name = self.config, "self_attention.query_key_value"
        bias = c.raw.flag("add_bias_linear", False)
        return {
            "qkv": self.qkv_slot(name, bias=bias or c.raw.flag("add_qkv_bias", False), paired=True),
            "o": row("self_attention.dense", c.hidden_size, c.num_attention_heads * c.head_dim, bias=bias),
        }

    def feed_forward_slots(self, i: int) -> dict[str, Slot]:
        c, up = self.config, "mlp.dense_h_to_4h"
        bias = c.raw.flag("add_bias_linear", False)
        return self.gated_slots(up, up, "mlp.dense_4h_to_h", c.intermediate_size, bias)

    def ignores(self, name: str) -> bool:
        return name == "transformer.rotary_pos_emb.inv_freq"
