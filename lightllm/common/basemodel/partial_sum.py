"""PartialSum: a sum over the ranks that nobody has taken yet; whoever needs it can take it together with more."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lightllm.common.basemodel.triton_kernel.all_reduce import sum_over_ranks
from lightllm.distributed.parallel_state import ParallelState


@dataclass(frozen=True)
class PartialSum:
    """`addend` [T, D] of this rank. What is linear may be done to the addends: the same on every rank."""

    addend: Tensor
    parallel: ParallelState

    def total(self) -> Tensor:
        """The sum over the ranks, [T, D], the same on all of them; takes it anew at each call."""
        return sum_over_ranks(self.addend, self.parallel)

    def __add__(self, other: PartialSum) -> PartialSum:
        return replace(self, addend=self.addend + other.addend)

    def __mul__(self, factor: float | Tensor) -> PartialSum:
        return replace(self, addend=self.addend * factor)

    def index_select(self, dim: int, index: Tensor) -> PartialSum:
        return replace(self, addend=self.addend.index_select(dim, index))


def whole(x: Tensor) -> PartialSum:
    """A sum that has been taken."""
    return PartialSum(x, ParallelState())


def total(x: Tensor | PartialSum) -> Tensor:
    """x itself, or the sum that it stands for."""
    return x.total() if isinstance(x, PartialSum) else x
