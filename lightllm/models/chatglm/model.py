"""ChatGLM2, ChatGLM3 and GLM-4 in the layout of their remote code: GLM with other names, q, k and v in one tensor."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_weights.slot import Slot
from lightllm.common.basemodel.model_config import ConfigError


class ChatGLM(BaseModel):
    layer_prefix = "transformer.encoder.layers.{}."
    outer_names = {
        "embed": "transformer.embedding.word_embeddings",
        "final_norm": "transformer.encoder.final_layernorm",
        "head": "transformer.output_layer",
    }
    qkv_names = ("self_attention.query_key_value",)
    paired = True
    o_name = "self_attention.dense"
    ffn_names = ("mlp.dense_h_to_4h", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    o_bias = ffn_bias = "add_bias_linear"

    def outer_slots(self) -> dict[str, Slot]:
        raw = self.config.raw
        if not raw.flag("rmsnorm", True) or raw.flag("apply_residual_connection_post_layernorm"):
            raise ConfigError("config.json: chatglm is supported with rmsnorm and pre-norm residuals only")
        return super().outer_slots()

    def ignores(self, name: str) -> bool:
        return name == "transformer.rotary_pos_emb.inv_freq"
