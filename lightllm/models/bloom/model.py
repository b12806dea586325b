"""BLOOM: ALiBi instead of positions, LayerNorm also on the embeddings, q, k and v fused head by head, gelu."""

from torch import Tensor

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.infer_struct import InferStateInfo
from lightllm.common.basemodel.layer_infer.pre_layer_infer import PreLayerInfer
from lightllm.common.basemodel.layer_infer.template.norm import LayerNorm, Norm
from lightllm.common.basemodel.layer_infer.template.residual import Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.layer_weights.slot import Slot
from lightllm.common.basemodel.model_config import ConfigError


class NormedEmbeddings(PreLayerInfer):
    def __init__(self, norm: Norm) -> None:
        self.norm = norm

    def forward(self, ids: Tensor, w: Weights, state: InferStateInfo) -> Stream:
        return self.norm(w["embed"].lookup(ids), w["embed_norm"]), None


class Bloom(BaseModel):
    layer_prefix = "transformer.h.{}."
    outer_names = {"embed": "transformer.word_embeddings", "final_norm": "transformer.ln_f", "head": "lm_head"}
    qkv_names = ("self_attention.query_key_value",)
    grouped = True
    o_name = "self_attention.dense"
    ffn_names = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    qkv_bias = o_bias = ffn_bias = True
    norm_type = LayerNorm

    def tensor_name(self, stored: str) -> str:
        """The first checkpoints were saved without a head, and without the prefix."""
        return stored if stored.startswith(("transformer.", "lm_head.")) else f"transformer.{stored}"

    def outer_slots(self) -> dict[str, Slot]:
        if self.config.raw.flag("apply_residual_connection_post_layernorm"):
            raise ConfigError("config.json: apply_residual_connection_post_layernorm is not supported for bloom")
        return super().outer_slots() | {"embed_norm": self.norm_slot("transformer.word_embeddings_layernorm")}

    def alibi(self) -> bool:
        return True

    def pre_layer(self) -> PreLayerInfer:
        return NormedEmbeddings(self.norm())
