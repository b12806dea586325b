"""PartialSum: what is linear commutes with the sum, lines that nobody wants are not computed, and how it is cut."""

from __future__ import annotations

import pytest
import torch

from lightllm.common.basemodel.partial_sum import MANY_WAVES, PartialSum, total, whole
from lightllm.distributed.parallel_state import ParallelState

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


@pytest.mark.parametrize("wave, length", [(127, 0), (128, 128), (844, 768), (1056, 1024)])
def test_pieces_cover_all_lines_and_fill_the_gpu(wave: int, length: int) -> None:
    for lines in (1, 1024, 1025, 2048, 4999, 8192, 12345):
        x = torch.empty(lines, 8)
        pieces = PartialSum(x, ALONE, Doubling())._pieces(wave)
        assert torch.equal(torch.cat([torch.arange(lines)[piece] for piece in pieces]), torch.arange(lines))
        longest = 2 * wave // 128 * 128 if lines >= MANY_WAVES * wave else length
        assert all(piece.stop - piece.start == longest for piece in pieces[:-1])
        assert (len(pieces) > 1) == (0 < longest < lines)
        assert len(PartialSum(x, ALONE)._pieces(wave)) == 1, "nothing is left to compute"
