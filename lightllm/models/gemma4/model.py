"""Gemma 4, its text part: larger heads in layers without a window, normalised values, and a scale for each layer."""

import math
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.layer_infer.template.attention import Attention
from lightllm.common.basemodel.layer_infer.template.norm import Norm, RMSNorm
from lightllm.common.basemodel.layer_infer.template.position import Position, make_rope
from lightllm.common.basemodel.layer_infer.template.residual import Attended, Branch, Residual, SandwichNorm, Stream
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.layer_weights.slot import Slot, whole
from lightllm.common.basemodel.normed import Lines
from lightllm.common.basemodel.partial_sum import added
from lightllm.models.gemma3.model import Gemma3


class NormedValues(Attention):
    def project(self, x: Lines, w: Weights) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(self.qk_norm, RMSNorm)
        q, k, v = super().project(x, w)
        return q, k, F.rms_norm(v, v.shape[-1:], eps=self.qk_norm.eps)


class ScaledSum(SandwichNorm):
    def feed(self, attended: Attended, w: Weights, norm: Norm, ffn: Branch) -> Stream:
        return added(*super().feed(attended, w, norm, ffn)) * w["scalar"].weight, None


class Gemma4(Gemma3):
    norm_type = RMSNorm
    residual_type: type[Residual] = ScaledSum
    attention_type = NormedValues

    def heads_of(self, i: int) -> tuple[int, int, int]:
        c, own = self.config, self.config.raw.of_layer("per_layer_config", i) or {}
        kv_heads = own.get("num_key_value_heads") or c.num_key_value_heads
        return kv_heads, math.lcm(kv_heads, self.parallel.size) // kv_heads, own.get("head_dim") or c.head_dim

    def norm_slots(self, i: int) -> dict[str, Slot]:
        return super().norm_slots(i) | {"scalar": whole("layer_scalar", 1, leaf="")}

    def attention_slots(self, i: int) -> dict[str, Slot]:
        slots = super().attention_slots(i)
        if self.config.raw.flag("attention_k_eq_v") and self.config.windows[i] is None:
            q, k, v = slots["qkv"].parts
            slots["qkv"] = replace(slots["qkv"], parts=(q, k, replace(v, name=k.name)))
        return slots

    def make_position(self) -> Position:
        c = self.config
        super().make_position()  # that of layers with a window
        return make_rope(c.rope, self.heads_of(c.windows.index(None))[2], c.max_position_embeddings, self.device)

    def attention_spec(self, i: int) -> AttentionSpec:
        return AttentionSpec(1.0, self.config.windows[i])
