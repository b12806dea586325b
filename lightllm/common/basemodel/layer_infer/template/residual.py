"""Axis 2: how attention and feed-forward hang on the residual stream."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.normed import Lines
from lightllm.common.basemodel.partial_sum import Kept, PartialSum

Branch = Callable[[Lines], PartialSum]
Stream = tuple[Tensor | PartialSum, Kept | None]


class Residual(Protocol):
    def __call__(self, stream: Stream, w: dict[str, Weight], norm: Norm, attention: Branch, ffn: Branch) -> Stream:
        """One layer. The stream is (hidden, residual), both [T, D], whose sum is the hidden state: the addition, and
        the sum over the ranks before it, are left to the norm that follows, which does all at once."""


class PreNorm:
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __call__(self, stream: Stream, w: dict[str, Weight], norm: Norm, attention: Branch, ffn: Branch) -> Stream:
        hidden, residual = norm.add(*stream, w["attn_norm"])
        hidden, residual = norm.add(attention(hidden), residual, w["ffn_norm"])
        return ffn(hidden), residual


@dataclass(frozen=True)
class ScaledPreNorm:
    """PreNorm in which both branches are scaled before they are added."""

    scale: float

    def __call__(self, stream: Stream, w: dict[str, Weight], norm: Norm, attention: Branch, ffn: Branch) -> Stream:
        hidden, residual = norm.add(*stream, w["attn_norm"])
        hidden, residual = norm.add(attention(hidden) * self.scale, residual, w["ffn_norm"])
        return ffn(hidden) * self.scale, residual


class SandwichNorm:
    """x + norm(attention(norm(x))), then x + norm(ffn(norm(x)))."""

    def __call__(self, stream: Stream, w: dict[str, Weight], norm: Norm, attention: Branch, ffn: Branch) -> Stream:
        hidden, residual = norm.add(*stream, w["attn_norm"])
        normed = norm(attention(hidden).total(), w["attn_post_norm"])
        hidden, residual = norm.add(normed, residual, w["ffn_norm"])
        return norm(ffn(hidden).total(), w["ffn_post_norm"]), residual


class ParallelResidual:
    """x + attention(norm(x)) + ffn(norm(x)), one norm for both."""

    def __call__(self, stream: Stream, w: dict[str, Weight], norm: Norm, attention: Branch, ffn: Branch) -> Stream:
        hidden, residual = norm.add(*stream, w["attn_norm"])
        return attention(hidden) + ffn(hidden), residual
