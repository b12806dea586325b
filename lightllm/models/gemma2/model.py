"""Gemma 2: Gemma with norms behind both branches, soft-caps, a scale of its own, and a window in every other layer."""

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.layer_infer.post_layer_infer import PostLayerInfer
from lightllm.common.basemodel.layer_infer.template.residual import Residual, SandwichNorm
from lightllm.models.gemma.model import Gemma


class Gemma2(Gemma):
    norm_names = {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    }
    residual_type: type[Residual] = SandwichNorm

    def attention_spec(self, i: int) -> AttentionSpec:
        c = self.config
        scale = c.raw.number("query_pre_attn_scalar") ** -0.5
        return AttentionSpec(scale, c.windows[i], softcap=c.raw.optional_number("attn_logit_softcapping"))

    def post_layer(self) -> PostLayerInfer:
        return PostLayerInfer(self.norm(), softcap=self.config.raw.optional_number("final_logit_softcapping"))
