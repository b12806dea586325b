"""Runners: the work of a step as a function of its number of lines, run as it is or replayed from CUDA graphs."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from lightllm.common.triton_utils.timing import milliseconds
from lightllm.distributed.communication_op import all_gather
from lightllm.distributed.parallel_state import ParallelState
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)

SLOWER = 1.02  # times what a larger size takes, from which on a size is not worth having

Body = Callable[[int], None]
"""Computes that many lines, from buffers that stay where they are into buffers that stay where they are."""


class Runner:
    """Launches every kernel anew, without padding; what runs graphs instead may pad."""

    def __init__(self, body: Body) -> None:
        self._body = body

    def padded(self, lines: int) -> int | None:
        """How many lines are computed for so many that are wanted; None if the runner cannot hold them."""
        return lines

    def __call__(self, lines: int) -> None:
        """Queues the work of `lines` lines, a number that `padded` gave."""
        self._body(lines)

    def drop_slow(self, parallel: ParallelState) -> list[int]:
        """Pads to a larger number of lines where that is faster; gives the sizes that it dropped. All ranks call it at
        the same moment."""
        return []

    def drop(self, sizes: Sequence[int]) -> None:
        """Pads to a larger number of lines instead of these."""


class GraphRunner(Runner):
    """One CUDA graph for each of the `sizes`, captured here; all share one pool of memory, so one runs at a time.

    With several ranks, all must make theirs at the same moment: collectives are captured with the rest.
    """

    def __init__(self, body: Body, sizes: Sequence[int]) -> None:
        self._sizes = sorted(sizes)  # the body itself is needed no more, nor what it holds
        self._graphs = _capture(body, self._sizes)

    def padded(self, lines: int) -> int | None:
        place = bisect_left(self._sizes, lines)
        return self._sizes[place] if place < len(self._sizes) else None

    def __call__(self, lines: int) -> None:
        self._graphs[lines].replay()

    def drop_slow(self, parallel: ParallelState) -> list[int]:
        taken = torch.tensor([[milliseconds(self._graphs[size].replay, 2) for size in self._sizes]], device="cuda")
        slowest = all_gather(taken, parallel).view(parallel.size, -1).amax(0)
        kept = worth_having(dict(zip(self._sizes, slowest.tolist())))
        slow = sorted(set(self._sizes) - set(kept))
        if slow:
            logger.info("a larger CUDA graph is faster than those of %s lines, which are not used", slow)
        self.drop(slow)
        return slow

    def drop(self, sizes: Sequence[int]) -> None:
        self._graphs = {size: graph for size, graph in self._graphs.items() if size not in sizes}
        self._sizes = sorted(self._graphs)


def make_runner(body: Body, sizes: Sequence[int]) -> Runner:
    """With graphs of these sizes if there are any."""
    return GraphRunner(body, sizes) if sizes else Runner(body)


def worth_having(times: dict[int, float]) -> list[int]:
    """Of sizes, with the time that each takes, those that are not slower than a larger one: libraries have bad kernels
    for some numbers of lines (448 of an 8B's take cuBLAS 13.5 ms, 512 take 10.2)."""
    kept: list[int] = []
    for size in sorted(times, reverse=True):
        if not kept or times[size] < SLOWER * min(times[larger] for larger in kept):
            kept.append(size)
    return kept[::-1]


def ladder(largest: int) -> list[int]:
    """The sizes up to `largest`, which is one: 1, 2, 4, then every 8th to 128, every 16th to 256, every 32nd."""
    steps = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, largest, 32)]
    return [*(size for size in steps if size < largest), largest]


def token_ladder(largest: int) -> list[int]:
    """Numbers of tokens up to `largest`, which is one: 16, 32, then every 64th to 512, 128th to 1024, 256th."""
    steps = [16, 32, *range(64, 512, 64), *range(512, 1024, 128), *range(1024, largest, 256)]
    return [*(size for size in steps if size < largest), largest]


def _capture(body: Body, sizes: Sequence[int]) -> dict[int, torch.cuda.CUDAGraph]:
    """The largest first: the smaller ones then find room in its memory."""
    pool = torch.cuda.graph_pool_handle()
    graphs = {}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for size in reversed(sizes):
            body(size)  # compiles kernels and lets libraries take their workspaces, which a capture may not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may use the device
            body(size)
            graph.capture_end()
            graphs[size] = graph
        torch.cuda.synchronize()
    return graphs
