"""Phi-1, 1.5 and 2: LayerNorm, attention and feed-forward side by side, biases everywhere, also on the head."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.norm import LayerNorm
from lightllm.common.basemodel.layer_infer.template.residual import ParallelResidual


class Phi(BaseModel):
    outer_names = BaseModel.outer_names | {"final_norm": "model.final_layernorm"}
    norm_names = {"attn_norm": "input_layernorm"}
    head_norm_names = ("self_attn.q_layernorm", "self_attn.k_layernorm")
    o_name = "self_attn.dense"
    ffn_names = ("mlp.fc1", "mlp.fc2")
    qkv_bias = o_bias = ffn_bias = head_bias = True
    norm_type = LayerNorm
    head_norms = "qk_layernorm"
    residual_type = ParallelResidual
