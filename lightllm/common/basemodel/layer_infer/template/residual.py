"""Axis 2: how attention and feed-forward hang on the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight

Branch = Callable[[Tensor], Tensor]
Stream = tuple[Tensor, Tensor | None]


class Residual(Protocol):
    def __call__(self, stream: Stream, w: dict[str, Weight], norm: Norm, attention: Branch, ffn: Branch) -> Stream:
        """One layer. The stream is (hidden, residual), both [T, D], whose sum is the hidden state: the addition is
        left to the norm that follows, which does both at once."""
        ...


class PreNorm:
    def __call__(self, stream: Stream, w: dict[str, Weight], norm: Norm, attention: Branch, ffn: Branch) -> Stream:
        hidden, residual = norm.add(*stream, w["attn_norm"])
        hidden, residual = norm.add(attention(hidden), residual, w["ffn_norm"])
        return ffn(hidden), residual
