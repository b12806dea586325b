"""Axis 1: how hidden states are normalised, alone and together with the residual addition before it."""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.normed import Lines, RMSNormed
from lightllm.common.basemodel.partial_sum import Kept, PartialSum, added, total
from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm, rmsnorm


class Norm(Protocol):
    @property
    def bias(self) -> bool:
        """Whether its slot has one."""

    def __call__(self, x: Tensor, w: Weight) -> Tensor:
        """x [..., D] -> the same shape."""

    def add(self, hidden: Tensor | PartialSum, residual: Kept | None, w: Weight) -> tuple[Lines, Kept]:
        """(norm of hidden + residual, hidden + residual); no residual yet counts as zero."""


@dataclass(frozen=True)
class RMSNorm:
    eps: float
    bias = False

    def __call__(self, x: Tensor, w: Weight) -> Tensor:
        return rmsnorm(x, w.weight, self.eps)

    def add(self, hidden: Tensor | PartialSum, residual: Kept | None, w: Weight) -> tuple[Lines, Kept]:
        if residual is None:
            hidden = total(hidden)
            return RMSNormed(hidden, w.weight, self.eps), hidden
        if isinstance(hidden, PartialSum):
            return hidden.add_rmsnorm(residual, w.weight, self.eps)
        return add_rmsnorm(hidden, total(residual), w.weight, self.eps)


@dataclass(frozen=True)
class UnitOffsetRMSNorm:
    """Gemma's: weights are stored minus 1 and applied in float32, before the rounding."""

    eps: float
    bias = False

    def __call__(self, x: Tensor, w: Weight) -> Tensor:
        return rmsnorm(x, w.weight, self.eps, minus_one=True)

    def add(self, hidden: Tensor | PartialSum, residual: Kept | None, w: Weight) -> tuple[Tensor, Tensor]:
        if residual is None:
            hidden = total(hidden)
            return self(hidden, w), hidden
        return add_rmsnorm(total(hidden), total(residual), w.weight, self.eps, minus_one=True)


@dataclass(frozen=True)
class LayerNorm:
    """Mean and variance; one vector of weights for all, or (per head) one line for each head of x [T, heads, D]."""

    eps: float
    bias: bool = True

    def __call__(self, x: Tensor, w: Weight) -> Tensor:
        if w.weight.dim() == 1:
            return F.layer_norm(x, x.shape[-1:], w.weight, w.bias, self.eps)
        return (F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * w.weight.float()).to(x.dtype)

    def add(self, hidden: Tensor | PartialSum, residual: Kept | None, w: Weight) -> tuple[Tensor, Tensor]:
        summed = added(hidden, residual)
        return self(summed, w), summed
