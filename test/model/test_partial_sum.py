"""PartialSum: what is linear commutes with the sum, lines that nobody wants are not computed, and how it is cut."""

from __future__ import annotations

import pytest
import torch

from lightllm.common.basemodel.partial_sum import MOST_PIECES, SHORTEST_PIECE, PartialSum, total, whole
from lightllm.distributed.parallel_state import ParallelState
from lightllm.distributed.peer_memory import PeerMemory

ALONE = ParallelState()


class Doubling:
    """A product that counts the lines it computes."""

    def __init__(self) -> None:
        self.lines = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.lines += len(x)
        return 2 * x


def test_what_is_linear_is_done_to_the_addends() -> None:
    x = torch.arange(12.0).view(4, 3)
    part = PartialSum(x, ALONE, Doubling())
    assert torch.equal((part + whole(x)).total(), 3 * x)
    assert torch.equal((part * 0.5).total(), x)
    assert torch.equal((part * x[:, :1]).total(), 2 * x * x[:, :1])
    assert torch.equal(total(part), 2 * x) and total(x) is x


def test_only_the_lines_that_are_wanted_are_computed() -> None:
    product = Doubling()
    chosen = PartialSum(torch.arange(12.0).view(4, 3), ALONE, product).index_select(0, torch.tensor([3, 1]))
    assert product.lines == 0
    assert chosen.total().tolist() == [[18.0, 20.0, 22.0], [6.0, 8.0, 10.0]]
    assert chosen.addend is chosen.addend and product.lines == 2


@pytest.mark.parametrize("room", [SHORTEST_PIECE - 1, SHORTEST_PIECE, 1500, 4096])
def test_pieces_cover_all_lines_and_find_room(room: int) -> None:
    none = torch.empty(0, dtype=torch.int32)
    peers = PeerMemory(none, none, room, 8, torch.float32, room, none)
    parallel = ParallelState(0, 2, peers=peers)
    for lines in (1, SHORTEST_PIECE, 2 * SHORTEST_PIECE - 1, 2 * SHORTEST_PIECE, 4999, 8192, 12345):
        x = torch.empty(lines, 8)
        pieces = PartialSum(x, parallel, Doubling())._pieces(x)
        assert torch.equal(torch.cat([torch.arange(lines)[piece] for piece in pieces]), torch.arange(lines))
        if lines < 2 * SHORTEST_PIECE or room < SHORTEST_PIECE:
            assert len(pieces) == 1
        else:
            assert 1 < len(pieces) <= max(MOST_PIECES, -(-lines // room))
            assert all(piece.stop - piece.start <= room for piece in pieces)
        assert len(PartialSum(x, parallel)._pieces(x)) == 1, "nothing is left to compute"
        assert len(PartialSum(x, ALONE, Doubling())._pieces(x)) == 1
