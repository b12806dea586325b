"""Axis 1: how hidden states are normalised, alone and together with the residual addition before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm, rmsnorm


class Norm(Protocol):
    def __call__(self, x: Tensor, w: Weight) -> Tensor:
        """x [..., D] -> the same shape."""
        ...

    def add(self, hidden: Tensor, residual: Tensor | None, w: Weight) -> tuple[Tensor, Tensor]:
        """(norm of hidden + residual, hidden + residual); no residual yet counts as zero."""
        ...


@dataclass(frozen=True)
class RMSNorm:
    eps: float

    def __call__(self, x: Tensor, w: Weight) -> Tensor:
        return rmsnorm(x, w.weight, self.eps)

    def add(self, hidden: Tensor, residual: Tensor | None, w: Weight) -> tuple[Tensor, Tensor]:
        if residual is None:
            return rmsnorm(hidden, w.weight, self.eps), hidden
        return add_rmsnorm(hidden, residual, w.weight, self.eps)
