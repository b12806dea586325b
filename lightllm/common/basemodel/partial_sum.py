"""PartialSum: a sum over the ranks that nobody has taken yet; whoever needs it can take it together with more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.all_reduce import one_shot, sum_add_rmsnorm, sum_over_ranks
from lightllm.distributed.parallel_state import ParallelState

SHORTEST_PIECE = 1024  # lines for which a product fills a GPU
MOST_PIECES = 4  # unless one must be cut smaller to fit into shared memory


def _itself(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class PartialSum:
    """This rank's addend is product(x), [T, D], line by line; it is computed when it is needed, for the lines needed.

    What is linear may be done to the addends: the same on every rank.
    """

    x: Tensor
    parallel: ParallelState
    product: Callable[[Tensor], Tensor] = _itself

    @cached_property
    def addend(self) -> Tensor:
        return self.product(self.x)

    def total(self) -> Tensor:
        """The sum over the ranks, [T, D], the same on all of them; taken once, for it may overwrite the addend."""
        return sum_over_ranks(self.addend, self.parallel)

    def add_rmsnorm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """add_rmsnorm of the total, taken once; of many lines the sums of some are taken while others are computed."""
        pieces = self._pieces(residual)
        if len(pieces) > 1:
            return self._add_rmsnorm_of(pieces, residual, weight, eps)
        return sum_add_rmsnorm(self.addend, residual, weight, eps, self.parallel)

    def __add__(self, other: PartialSum) -> PartialSum:
        return PartialSum(self.addend + other.addend, self.parallel)

    def __mul__(self, factor: float | Tensor) -> PartialSum:
        return PartialSum(self.addend * factor, self.parallel)

    def index_select(self, dim: int, index: Tensor) -> PartialSum:
        return replace(self, x=self.x.index_select(dim, index))

    def _pieces(self, residual: Tensor) -> list[slice]:
        """Lines that are computed and then sent together; residual is like the sum."""
        peers, lines = self.parallel.peers, len(self.x)
        short = lines < 2 * SHORTEST_PIECE or self.product is _itself
        if short or peers is None or not peers.takes(residual[:SHORTEST_PIECE]):
            return [slice(0, lines)]
        count = max(-(-lines // peers.most_lines), min(MOST_PIECES, lines // SHORTEST_PIECE))
        length = -(-lines // count)
        return [slice(begin, min(begin + length, lines)) for begin in range(0, lines, length)]

    def _add_rmsnorm_of(
        self, pieces: list[slice], residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        peers = self.parallel.peers
        assert peers is not None and peers.stream is not None
        computing, sending = torch.cuda.current_stream(), peers.stream
        normed, total = torch.empty_like(residual), torch.empty_like(residual)
        addends = []  # their memory is free again when `computing` has waited for `sending`
        for lines in pieces:
            addends.append(self.product(self.x[lines]))
            sending.wait_stream(computing)
            with torch.cuda.stream(sending):
                out = normed[lines], total[lines]
                one_shot(addends[-1], residual[lines], weight, eps, self.parallel, peers, out)
        computing.wait_stream(sending)
        return normed, total


def whole(x: Tensor) -> PartialSum:
    """A sum that has been taken."""
    return PartialSum(x, ParallelState())


def total(x: Tensor | PartialSum) -> Tensor:
    """x itself, or the sum that it stands for."""
    return x.total() if isinstance(x, PartialSum) else x
