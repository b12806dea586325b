"""Cohere (Command R): LayerNorm without bias, attention and feed-forward side by side, scaled logits."""

import torch

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.post_layer_infer import PostLayerInfer
from lightllm.common.basemodel.layer_infer.template.norm import LayerNorm, Norm
from lightllm.common.basemodel.layer_infer.template.residual import ParallelResidual
from lightllm.common.basemodel.layer_weights.qkv_rows import paired_rows
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, column


class Cohere(BaseModel):
    norm_names = {"attn_norm": "input_layernorm"}
    paired = True
    head_norms = "use_qk_norm"
    residual_type = ParallelResidual

    def head_norm_slots(self, i: int, norm: Norm) -> dict[str, Slot]:
        """A line for each head."""
        c, (q_name, k_name) = self.config, self.head_norm_names
        q, k = Part(q_name, c.num_attention_heads), Part(k_name, c.num_key_value_heads, copies=self.kv_copies)
        return {"q_norm": column(q, inputs=c.head_dim), "k_norm": column(k, inputs=c.head_dim)}

    def prepare(self) -> None:
        """The norms of heads in the order of features that `paired` gives q and k."""
        order = paired_rows(torch.arange(self.head_dim), self.head_dim, self.config.rotary_dim).to(self.device)
        for w in self.layer_weights if self.head_norm() else ():
            w["q_norm"].weight, w["k_norm"].weight = w["q_norm"].weight[:, order], w["k_norm"].weight[:, order]

    def norm(self) -> Norm:
        return LayerNorm(self.config.rms_norm_eps, bias=False)

    def post_layer(self) -> PostLayerInfer:
        return PostLayerInfer(self.norm(), scale=self.config.raw.number("logit_scale"))
