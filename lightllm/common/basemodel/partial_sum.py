"""PartialSum: a sum over the ranks that nobody has taken yet; whoever needs it can take it together with more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.all_reduce import add_received_rmsnorm, sum_add_rmsnorm, sum_over_ranks
from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm
from lightllm.distributed.parallel_state import ParallelState
from lightllm.distributed.peer_copies import MOST_WAVES, UNDER_WAY, PeerCopies

TILE_LINES = 128  # that a processor computes at a time


def _itself(x: Tensor) -> Tensor:
    return x


def _never(x: Tensor) -> None:
    return None


@dataclass(frozen=True)
class PartialSum:
    """This rank's addend is product(x), [T, D], line by line; it is computed when it is needed, for the lines needed.
    in_parts(x) is the same in parts [S, T, D] of float32, where a kernel computes them so; None where not.

    What is linear may be done to the addends: the same on every rank.
    """

    x: Tensor
    parallel: ParallelState
    product: Callable[[Tensor], Tensor] = _itself
    in_parts: Callable[[Tensor], Tensor | None] = _never

    @cached_property
    def addend(self) -> Tensor:
        return self.product(self.x)

    def total(self) -> Tensor:
        """The sum over the ranks, [T, D], the same on all of them; taken once, for it may overwrite the addend."""
        return sum_over_ranks(self.addend, self.parallel)

    def add_rmsnorm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """add_rmsnorm of the total, taken once; of many lines some are sent while others are computed."""
        if self.parallel.size == 1 and (parts := self.in_parts(self.x)) is not None:
            return add_rmsnorm(parts, residual, weight, eps)
        peers = self.parallel.peers
        copies = peers.copies if peers and peers.dtype == residual.dtype else None
        if copies and len(pieces := self._pieces(copies.wave // residual.shape[1])) > 1:
            return self._add_rmsnorm_of(pieces, residual, weight, eps, copies)
        return sum_add_rmsnorm(self.addend, residual, weight, eps, self.parallel)

    def __add__(self, other: PartialSum) -> PartialSum:
        return PartialSum(self.addend + other.addend, self.parallel)

    def __mul__(self, factor: float | Tensor) -> PartialSum:
        return PartialSum(self.addend * factor, self.parallel)

    def index_select(self, dim: int, index: Tensor) -> PartialSum:
        return replace(self, x=self.x.index_select(dim, index))

    def _pieces(self, wave: int) -> list[slice]:
        """Lines that are computed and then sent together; the product computes `wave` lines at a time."""
        lines = len(self.x)
        length = lines if self.product is _itself else _piece_length(lines, wave) or lines
        return [slice(begin, min(begin + length, lines)) for begin in range(0, lines, length)]

    def _add_rmsnorm_of(
        self, pieces: list[slice], residual: Tensor, weight: Tensor, eps: float, copies: PeerCopies
    ) -> tuple[Tensor, Tensor]:
        normed, total = torch.empty_like(residual), torch.empty_like(residual)
        sent: deque[tuple[slice, Tensor, int]] = deque()
        addends = []  # stay until they are sent

        def receive() -> None:
            lines, addend, place = sent.popleft()
            received = copies.receive(place, addend)
            add_received_rmsnorm(addend, received, residual[lines], weight, eps, normed[lines], total[lines])

        try:
            for lines in pieces:
                addends.append(self.product(self.x[lines]))
                sent.append((lines, addends[-1], copies.send(addends[-1])))
                self.parallel.progress.collectives += 1
                if len(sent) == UNDER_WAY:
                    receive()
        finally:  # all ranks may fail at the same product and go on
            while sent:
                receive()
            copies.finish()
        return normed, total


def _piece_length(lines: int, wave: int) -> int:
    """Few pieces cost least, but behind the last of them nothing is computed while it is sent: it should be short."""
    for waves in MOST_WAVES, MOST_WAVES // 2, 1:
        length = waves * wave // TILE_LINES * TILE_LINES
        if 2 * length < lines or length < lines <= 1.5 * length:
            break
    return length


def whole(x: Tensor) -> PartialSum:
    """A sum that has been taken."""
    return PartialSum(x, ParallelState())


def total(x: Tensor | PartialSum) -> Tensor:
    """x itself, or the sum that it stands for."""
    return x.total() if isinstance(x, PartialSum) else x
