"""Phi-3 and Phi-4: q, k and v lie in one tensor, gate and up in another."""

from lightllm.common.basemodel.basemodel import BaseModel


class Phi3(BaseModel):
    qkv_names = ("self_attn.qkv_proj",)
    ffn_names = ("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj")
