"""Normed: lines whose norm nobody has computed yet; a product of them may compute it on its way, or piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from lightllm.common.basemodel.triton_kernel.rmsnorm import rmsnorm
from lightllm.common.basemodel.triton_kernel.skinny_linear import skinny_config, skinny_linear

if TYPE_CHECKING:
    from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight


class Normed(Protocol):
    def __len__(self) -> int:
        """How many lines."""

    @property
    def tensor(self) -> Tensor:
        """The norm of the lines, [T, D]; computed at the first look."""

    def product(self, by: Weight, gated: bool) -> Tensor:
        """by.product(self.tensor, gated)."""


Lines = Tensor | Normed
"""Lines [T, D] as blocks of a layer take them: a Weight multiplies both, who else needs the numbers calls tensor_of."""


def tensor_of(x: Lines) -> Tensor:
    return x if isinstance(x, Tensor) else x.tensor


@dataclass(frozen=True)
class RMSNormed:
    """rmsnorm of x [T, D], with weight [D]. A product norms x itself if the one before it gave the `parts`, (scaled,
    squares) of add_skinny_linear."""

    x: Tensor
    weight: Tensor
    eps: float
    parts: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def tensor(self) -> Tensor:
        return rmsnorm(self.x, self.weight, self.eps)

    def product(self, by: Weight, gated: bool) -> Tensor:
        if self.parts and (config := skinny_config(len(self.x), by.weight, gated)):
            scaled, squares = self.parts
            return skinny_linear(scaled, by.weight, by.bias, config, squares, self.eps, gated)
        return by.product(self.tensor, gated)
