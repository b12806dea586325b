"""StarCoder2: LayerNorm, biases everywhere, a feed-forward without a gate, a sliding window."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.norm import LayerNorm


class Starcoder2(BaseModel):
    ffn_names = ("mlp.c_fc", "mlp.c_proj")
    qkv_bias = o_bias = ffn_bias = "use_bias"
    norm_type = LayerNorm
