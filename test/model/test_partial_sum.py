"""PartialSum: what is linear commutes with the sum, lines that nobody wants are not computed, and how it is cut."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Queue

import pytest
import torch

from lightllm.common.basemodel.partial_sum import PartialSum, total, whole
from lightllm.common.basemodel.triton_kernel.rmsnorm import add_rmsnorm
from lightllm.distributed.parallel_state import ParallelState
from lightllm.distributed.peer_copies import PLACES
from lightllm.distributed.peer_memory import PeerMemory

ALONE = ParallelState()
FAILING = 7  # lines of a product that raises


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


@pytest.mark.parametrize("wave", [31, 128, 844, 1056])
def test_pieces_cover_all_lines_and_fill_the_gpu(wave: int) -> None:
    for lines in (1, 1024, 1025, 2048, 4999, 8192, 12345):
        x = torch.empty(lines, 8)
        pieces = PartialSum(x, ALONE, Doubling())._pieces(wave)
        assert torch.equal(torch.cat([torch.arange(lines)[piece] for piece in pieces]), torch.arange(lines))
        assert all(piece.stop - piece.start in [n * wave // 128 * 128 for n in (4, 2, 1)] for piece in pieces[:-1])
        assert (len(pieces) > 1) == (0 < wave // 128 * 128 < lines)
        assert len(PartialSum(x, ALONE)._pieces(wave)) == 1, "nothing is left to compute"


@pytest.mark.parametrize(
    "lines, wave, lengths",
    [
        (8192, 844, [3328, 3328, 1536]),
        (2048, 844, [1664, 384]),
        (8192, 1056, [2048] * 4),
        (2048, 1056, [1024, 1024]),
        (1056, 1056, [1024, 32]),
    ],
)
def test_pieces_are_few_and_the_last_is_short(lines: int, wave: int, lengths: list[int]) -> None:
    pieces = PartialSum(torch.empty(lines, 8), ALONE, Doubling())._pieces(wave)
    assert [piece.stop - piece.start for piece in pieces] == lengths


@dataclass
class ThreadCopies:
    """PeerCopies of a rank that is a thread; raises Full where a place is written before it has been read."""

    inbox: list[Queue[torch.Tensor]]
    outbox: list[Queue[torch.Tensor]]
    wave: int
    sent: int = 0

    def send(self, x: torch.Tensor) -> int:
        place, self.sent = self.sent % PLACES, self.sent + 1
        self.outbox[place].put_nowait(x.clone())
        return place

    def receive(self, place: int, x: torch.Tensor) -> torch.Tensor:
        received = self.inbox[place].get(timeout=60)
        assert received.shape == x.shape
        return received

    def finish(self) -> None:
        pass


def test_two_ranks_sum_what_they_send_each_other_in_pieces_also_after_a_failure() -> None:
    width, sums = 16, (129, 1000, 2000, 300, 5000)
    boxes = [[Queue[torch.Tensor](1) for _ in range(PLACES)] for _ in range(2)]
    none = torch.empty(0, dtype=torch.int32)
    xs = [torch.randn(2, lines, width, dtype=torch.float64) for lines in sums]
    residual, weight = torch.randn(max(sums), width, dtype=torch.float64), torch.randn(width, dtype=torch.float64)

    def rank(mine: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        copies = ThreadCopies(boxes[mine], boxes[1 - mine], 128 * width)
        peers = PeerMemory(none, none, 0, width, torch.float64, 0, none, copies)
        parallel, pause = ParallelState(mine, 2, peers=peers), random.Random(mine)

        def product(x: torch.Tensor) -> torch.Tensor:
            time.sleep(pause.random() * 0.003)
            if len(x) == FAILING:
                raise MemoryError
            return 2 * x

        with pytest.raises(MemoryError):
            PartialSum(torch.ones(4 * 128 + FAILING, width), parallel, product).add_rmsnorm(residual, weight, 1e-5)

        return [PartialSum(x[mine], parallel, product).add_rmsnorm(residual[: x.shape[1]], weight, 1e-5) for x in xs]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rank, range(2)))
    assert not any(place.qsize() for box in boxes for place in box)
    for x, *pairs in zip(xs, *found):
        wanted = add_rmsnorm(2 * x.sum(0), residual[: x.shape[1]], weight, 1e-5)
        for pair in pairs:
            for got, right in zip(pair, wanted):
                torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
