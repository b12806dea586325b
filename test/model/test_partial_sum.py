"""PartialSum: what is linear commutes with the sum, and lines that nobody wants are not computed."""

import torch

from lightllm.common.basemodel.partial_sum import PartialSum, taken, total
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
    assert torch.equal((part + taken(x)).total(), 3 * x)
    assert torch.equal((part * 0.5).total(), x)
    assert torch.equal((part * x[:, :1]).total(), 2 * x * x[:, :1])
    assert torch.equal(total(part), 2 * x) and total(x) is x


def test_only_the_lines_that_are_wanted_are_computed() -> None:
    product = Doubling()
    chosen = PartialSum(torch.arange(12.0).view(4, 3), ALONE, product).index_select(0, torch.tensor([3, 1]))
    assert product.lines == 0
    assert chosen.total().tolist() == [[18.0, 20.0, 22.0], [6.0, 8.0, 10.0]]
    assert chosen.addend is chosen.addend and product.lines == 2
