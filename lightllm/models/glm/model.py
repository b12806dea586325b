"""GLM-4 in transformers' layouts: rotary pairs (2i, 2i + 1) in half of each head, gate and up in one tensor."""

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.template.residual import SandwichNorm


class Glm(BaseModel):
    """GLM-4-9b-chat-hf."""

    paired = True
    o_bias = False
    ffn_names = ("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj")


class Glm4(Glm):
    """GLM-4-0414: also norms behind attention and feed-forward."""

    norm_names = Glm.norm_names | {"attn_post_norm": "post_self_attn_layernorm", "ffn_post_norm": "post_mlp_layernorm"}
    residual_type = SandwichNorm
