"""Gemma 4, its text part: larger heads in layers without a window, normalised values, and a scale for each layer."""

import math

import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.layer_infer.template.attention import Attention
from lightllm.common.basemodel.layer_infer.template.norm import Norm, RMSNorm
from lightllm.common.basemodel.layer_infer.template.position import Position, make_rope
from lightllm.common.basemodel.layer_infer.template.residual import Attended, Branch, Residual, SandwichNorm, Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.layer_weights.qkv_rows import qkv_parts
from lightllm.common.basemodel.layer_weights.slot import Part, Slot, column, row, vector
from lightllm.common.basemodel.normed import Lines
from lightllm.common.basemodel.partial_sum import total
from lightllm.models.gemma3.model import Gemma3


class NormedValues(Attention):
    def project(self, x: Lines, w: dict[str, Weight]) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(self.qk_norm, RMSNorm)
        q, k, v = super().project(x, w)
        return q, k, F.rms_norm(v, v.shape[-1:], eps=self.qk_norm.eps)


class ScaledSum(SandwichNorm):
    def feed(self, attended: Attended, w: dict[str, Weight], norm: Norm, ffn: Branch) -> Stream:
        branch, residual = super().feed(attended, w, norm, ffn)
        assert residual is not None
        return (total(residual) + total(branch)) * w["scalar"].weight, None


class Gemma4(Gemma3):
    def heads_of(self, i: int) -> tuple[int, int, int]:
        """(KV heads, copies of each, head_dim) of layer i."""
        c, own = self.config, self.config.raw.of_layer("per_layer_config", i) or {}
        kv_heads = own.get("num_key_value_heads") or c.num_key_value_heads
        return kv_heads, math.lcm(kv_heads, self.parallel.size) // kv_heads, own.get("head_dim") or c.head_dim

    def slot_shape(self, i: int) -> tuple[int, ...]:
        kv_heads, copies, head_dim = self.heads_of(i)
        return self.parallel.share(kv_heads * copies), 2, head_dim

    def norm_slots(self, i: int) -> dict[str, Slot]:
        return super().norm_slots(i) | {"scalar": Slot((Part("layer_scalar", 1, leaf=""),), None)}

    def attention_slots(self, i: int) -> dict[str, Slot]:
        c, heads, (kv_heads, copies, head_dim) = self.config, self.config.num_attention_heads, self.heads_of(i)
        same = c.raw.flag("attention_k_eq_v") and c.windows[i] is None
        names = "self_attn.q_proj", "self_attn.k_proj", "self_attn.k_proj" if same else "self_attn.v_proj"
        parts = qkv_parts(names, heads, kv_heads, head_dim, copies, grouped=False, paired_dim=0)
        return {
            "qkv": column(*parts, inputs=c.hidden_size),
            "q_norm": vector("self_attn.q_norm", head_dim),
            "k_norm": vector("self_attn.k_norm", head_dim),
            "o": row("self_attn.o_proj", c.hidden_size, heads * head_dim),
        }

    def norm(self) -> Norm:
        return RMSNorm(self.config.rms_norm_eps)

    def residual(self) -> Residual:
        return ScaledSum()

    def make_position(self) -> Position:
        c = self.config
        super().make_position()  # that of layers with a window
        return make_rope(c.rope, self.heads_of(c.windows.index(None))[2], c.max_position_embeddings, self.device)

    def attention(self, i: int, qk_norm: Norm | None = None) -> Attention:
        kv_heads, copies, head_dim = self.heads_of(i)
        held, spec = self.parallel.share(kv_heads * copies), AttentionSpec(1.0, self.config.windows[i])
        return NormedValues(i, self.heads, held, head_dim, self.position_of(i), spec, self.norm())
