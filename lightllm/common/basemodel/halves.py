"""Of many lines each of two ranks adds, norms and keeps one half; the halves travel while products are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.all_reduce import add_received_rmsnorm, select_over_ranks, sum_over_ranks
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul
from lightllm.distributed.parallel_state import ParallelState
from lightllm.distributed.peer_copies import ADDENDS, NORMED, PeerCopies

if TYPE_CHECKING:
    from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight

TILE = 128  # lines that a processor computes at a time


def first_half(lines: int) -> int:
    """How many of the lines are rank 0's: whole tiles."""
    return -(-lines // (2 * TILE)) * TILE


def _half(lines: int, rank: int) -> slice:
    return slice(first_half(lines), lines) if rank else slice(0, first_half(lines))


@dataclass(frozen=True)
class HalfOfLines:
    """Lines [T, D] of which each of two ranks holds a half; x is this rank's."""

    x: Tensor
    lines: int
    parallel: ParallelState

    @property
    def own(self) -> slice:
        return _half(self.lines, self.parallel.rank)

    def total(self) -> Tensor:
        """All lines, on both ranks."""
        whole = self.x.new_zeros(self.lines, self.x.shape[1])
        whole[self.own] = self.x
        return sum_over_ranks(whole, self.parallel)

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """As a Tensor's, along dim 0: lines [S, D] of index int64 [S], whichever rank holds them."""
        return select_over_ranks(self.x, self.own.start, index, self.parallel)


class HalfNormed:
    """A Normed [T, D] of which this rank has computed one half; the other half is on its way."""

    def __init__(self, own: Tensor, addend: Tensor, lines: int, copies: PeerCopies) -> None:
        """own: this rank's half of the `lines`. It is being sent, as is `addend`: both stay until that is finished."""
        self._own, self._addend, self._lines, self._copies = own, addend, lines, copies

    def __len__(self) -> int:
        return self._lines

    @cached_property
    def tensor(self) -> Tensor:
        whole = self._own.new_empty(self._lines, self._own.shape[1])
        own, other = self._halves(whole)
        own.copy_(self._own)
        other.copy_(self._received)
        self._copies.finish()
        return whole

    def product(self, by: Weight, gated: bool) -> Tensor:
        fused = gated and by.fuses_silu(self._lines)
        y = self._own.new_empty(self._lines, len(by.weight) // (1 + fused))
        own, other = self._halves(y)
        with self._copies.beside() as beside:
            by.product_into(self._own, own, fused)
            with beside:
                by.product_into(self._received, other, fused)
        self._copies.finish()
        return silu_and_mul(y) if gated and not fused else y

    @cached_property
    def _received(self) -> Tensor:
        return self._copies.receive(NORMED, self._lines - len(self._own), self._own.shape[1])

    def _halves(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's and the other's."""
        return whole[_half(self._lines, self._copies.rank)], whole[_half(self._lines, 1 - self._copies.rank)]


def add_rmsnorm_by_halves(
    x: Tensor,
    product: Callable[[Tensor], Tensor],
    residual: Tensor | HalfOfLines,
    weight: Tensor,
    eps: float,
    parallel: ParallelState,
    copies: PeerCopies,
) -> tuple[HalfNormed, HalfOfLines]:
    """add_rmsnorm of the sum of product(x), taken line by line, over two ranks: x [T, inputs], residual [T, D].

    The addends of the other rank's half are computed first, so that they travel while those of this rank's half are
    computed. The norm of this half travels while the next product of it is computed.
    """
    lines, rank = len(x), parallel.rank
    theirs = product(x[_half(lines, 1 - rank)])
    copies.send(ADDENDS, theirs)
    parallel.progress.collectives += 1
    mine = product(x[_half(lines, rank)])
    residual = residual.x if isinstance(residual, HalfOfLines) else residual[_half(lines, rank)]
    received = copies.receive(ADDENDS, *mine.shape)
    normed, total = torch.empty_like(mine), torch.empty_like(mine)
    add_received_rmsnorm(mine, received, residual, weight, eps, normed, total)
    copies.send(NORMED, normed)
    return HalfNormed(normed, theirs, lines, copies), HalfOfLines(total, lines, parallel)
