"""Axis 2: how attention and feed-forward hang on the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from lightllm.common.basemodel.layer_infer.template.norm import Norm
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weights
from lightllm.common.basemodel.normed import Lines, tensor_of
from lightllm.common.basemodel.partial_sum import Kept, PartialSum, total

Branch = Callable[[Lines], PartialSum]
Stream = tuple[Tensor | PartialSum, Kept | None]


@dataclass(frozen=True)
class Attended:
    """A layer behind its attention: what the rest of it needs of each line, [T, ...]."""

    answer: PartialSum
    residual: Kept | None = None
    normed: Lines | None = None  # beside a residual, where feed-forward takes what attention took

    def index_select(self, index: Tensor) -> Attended:
        """Of the lines index int64 [S]."""
        residual = None if self.residual is None else self.residual.index_select(0, index)
        normed = None if self.normed is None else tensor_of(self.normed).index_select(0, index)
        return Attended(self.answer.index_select(0, index), residual, normed)

    @property
    def tensors(self) -> list[Tensor]:
        """Its numbers, for `with_tensors`."""
        residual = [] if self.residual is None else [total(self.residual)]
        return [self.answer.x, *residual, *([] if self.normed is None else [tensor_of(self.normed)])]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Attended:
        """The same of other numbers, as many as its own."""
        x, *rest = tensors
        return Attended(replace(self.answer, x=x), *rest)


class Residual(Protocol):
    """One layer in two halves, for of the last one many lines end with the first.

    The stream is (hidden, residual), both [T, D], whose sum is the hidden state: the addition, and the sum over the
    ranks before it, are left to the norm that follows, which does all at once.
    """

    def attend(self, stream: Stream, w: Weights, norm: Norm, attention: Branch) -> Attended:
        """Up to attention, included."""

    def feed(self, attended: Attended, w: Weights, norm: Norm, ffn: Branch) -> Stream:
        """The rest, of as many lines as are given."""


class PreNorm:
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def attend(self, stream: Stream, w: Weights, norm: Norm, attention: Branch) -> Attended:
        hidden, residual = norm.add(*stream, w["attn_norm"])
        return Attended(attention(hidden), residual)

    def feed(self, attended: Attended, w: Weights, norm: Norm, ffn: Branch) -> Stream:
        hidden, residual = norm.add(attended.answer, attended.residual, w["ffn_norm"])
        return ffn(hidden), residual


@dataclass(frozen=True)
class ScaledPreNorm(PreNorm):
    """PreNorm in which both branches are scaled before they are added."""

    scale: float

    def feed(self, attended: Attended, w: Weights, norm: Norm, ffn: Branch) -> Stream:
        hidden, residual = norm.add(attended.answer * self.scale, attended.residual, w["ffn_norm"])
        return ffn(hidden) * self.scale, residual


class SandwichNorm(PreNorm):
    """x + norm(attention(norm(x))), then x + norm(ffn(norm(x)))."""

    def feed(self, attended: Attended, w: Weights, norm: Norm, ffn: Branch) -> Stream:
        normed = norm(attended.answer.total(), w["attn_post_norm"])
        hidden, residual = norm.add(normed, attended.residual, w["ffn_norm"])
        return norm(ffn(hidden).total(), w["ffn_post_norm"]), residual


class ParallelResidual:
    """x + attention(norm(x)) + ffn(norm(x)), one norm for both."""

    def attend(self, stream: Stream, w: Weights, norm: Norm, attention: Branch) -> Attended:
        hidden, residual = norm.add(*stream, w["attn_norm"])
        return Attended(attention(hidden), residual, hidden)

    def feed(self, attended: Attended, w: Weights, norm: Norm, ffn: Branch) -> Stream:
        assert attended.normed is not None
        return attended.answer + ffn(attended.normed), attended.residual
