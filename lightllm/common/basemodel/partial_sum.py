"""PartialSum: a sum over the ranks that nobody has taken yet; whoever needs it can take it together with more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lightllm.common.basemodel.halves import HalfOfLines, add_rmsnorm_by_halves, first_half
from lightllm.common.basemodel.normed import Lines, RMSNormed
from lightllm.common.basemodel.triton_kernel.all_reduce import sum_add_rmsnorm, sum_over_ranks
from lightllm.distributed.parallel_state import ParallelState

Kept = Tensor | HalfOfLines  # the residual [T, D], to which hidden states are added: whole, or this rank's half
HALVES_FROM = 3 << 21  # elements of a sum: with fewer, two halves of products cost more than waiting


@dataclass(frozen=True)
class PartialSum:
    """This rank's addend is product(x), [T, D], line by line; it is computed when it is needed, for the lines needed.

    add_normed(x, residual, norm, eps): the norm of residual + the sum, where the product takes the sum itself, or None.
    in_parts(x): product(x) in parts [S, T, D], where the product leaves it to others to add them, or None.
    What is linear may be done to the addends: the same on every rank.
    """

    x: Tensor
    parallel: ParallelState
    product: Callable[[Tensor], Tensor] = lambda x: x
    add_normed: Callable[[Tensor, Tensor, Tensor, float], RMSNormed | None] = lambda *_: None
    in_parts: Callable[[Tensor], Tensor | None] = lambda *_: None

    @cached_property
    def addend(self) -> Tensor:
        return self.product(self.x)

    def total(self) -> Tensor:
        """The sum over the ranks, [T, D], the same on all of them; taken once, for it may overwrite the addend."""
        return sum_over_ranks(self.addend, self.parallel)

    def add_rmsnorm(self, residual: Kept, weight: Tensor, eps: float) -> tuple[Lines, Kept]:
        """add_rmsnorm of the total, taken once; of many lines each rank takes its half."""
        peers, lines, width = self.parallel.peers, len(self.x), len(weight)
        copies = peers.copies if peers and peers.dtype == self.x.dtype else None
        if copies and lines * width >= HALVES_FROM and first_half(lines) * width <= copies.room:
            return add_rmsnorm_by_halves(self.x, self.product, residual, weight, eps, self.parallel, copies)
        assert isinstance(residual, Tensor)  # all sums of a step have as many lines, but for the last, of chosen lines
        if (normed := self.add_normed(self.x, residual, weight, eps)) is not None:
            return normed, normed.x
        parts = self.in_parts(self.x)
        return sum_add_rmsnorm(self.addend if parts is None else parts, residual, weight, eps, self.parallel)

    def __add__(self, other: PartialSum) -> PartialSum:
        return PartialSum(self.addend + other.addend, self.parallel)

    def __mul__(self, factor: float | Tensor) -> PartialSum:
        return PartialSum(self.addend * factor, self.parallel)

    def index_select(self, dim: int, index: Tensor) -> PartialSum:
        """Of chosen lines: a CUDA graph may begin with it, and must not with a product that exchanges (ADR 11)."""
        return PartialSum(self.x.index_select(dim, index), self.parallel, self.product, in_parts=self.in_parts)


def taken(x: Tensor) -> PartialSum:
    """A sum that has been taken."""
    return PartialSum(x, ParallelState())


def added(hidden: Kept | PartialSum, residual: Kept | None) -> Tensor:
    """The whole of both together; no residual yet counts as zero."""
    return total(hidden) if residual is None else total(residual) + total(hidden)


def total(x: Kept | PartialSum) -> Tensor:
    """x itself, or the whole that it stands for."""
    return x if isinstance(x, Tensor) else x.total()
