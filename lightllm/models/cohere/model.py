"""Cohere (Command R): LayerNorm without bias, attention and feed-forward side by side, scaled logits."""

import torch

from lightllm.common.basemodel.basemodel import BaseModel
from lightllm.common.basemodel.layer_infer.post_layer_infer import PostLayerInfer
from lightllm.common.basemodel.layer_infer.template.attention import AttentionBlock
from lightllm.common.basemodel.layer_infer.template.norm import LayerNorm, Norm
from lightllm.common.basemodel.layer_infer.template.residual import ParallelResidual, Residual
from lightllm.common.basemodel.layer_weights.qkv_rows import paired_rows
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, column


class Cohere(BaseModel):
    def norm_slots(self, i: int) -> dict[str, Slot]:
        return {"attn_norm": self.norm_slot("input_layernorm")}

    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, names = self.config, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        slots = super().attention_slots(i) | {"qkv": self.qkv_slot(*names, bias=c.attention_bias, paired=True)}
        if self._qk_norm():  # a line for each head
            k_norm = Part("self_attn.k_norm", c.num_key_value_heads, copies=self.kv_copies)
            slots["q_norm"] = column(Part("self_attn.q_norm", c.num_attention_heads), inputs=c.head_dim)
            slots["k_norm"] = column(k_norm, inputs=c.head_dim)
        return slots

    def prepare(self) -> None:
        """The norms of heads in the order of features that `paired` gives q and k."""
        order = paired_rows(torch.arange(self.head_dim), self.head_dim, self.config.rotary_dim).to(self.device)
        for w in self.layer_weights if self._qk_norm() else ():
            w["q_norm"].weight, w["k_norm"].weight = w["q_norm"].weight[:, order], w["k_norm"].weight[:, order]

    def norm(self) -> Norm:
        return LayerNorm(self.config.rms_norm_eps, bias=False)

    def residual(self) -> Residual:
        return ParallelResidual()

    def attention(self, i: int, qk_norm: Norm | None = None) -> AttentionBlock:
        return super().attention(i, self.norm() if self._qk_norm() else None)

    def post_layer(self) -> PostLayerInfer:
        return PostLayerInfer(self.norm(), scale=self.config.raw.number("logit_scale"))

    def _qk_norm(self) -> bool:
        return self.config.raw.flag("use_qk_norm", False)
