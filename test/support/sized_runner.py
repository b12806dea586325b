"""SizedRunner: pads as a runner with CUDA graphs does, and launches every kernel anew."""

from bisect import bisect_left
from collections.abc import Sequence

from lightllm.common.basemodel.cuda_graph import Body, Runner


class SizedRunner(Runner):
    def __init__(self, body: Body, sizes: Sequence[int]) -> None:
        super().__init__(body)
        self._sizes = sizes
        self.ran: list[int] = []

    def padded(self, lines: int) -> int | None:
        place = bisect_left(self._sizes, lines)
        return self._sizes[place] if place < len(self._sizes) else None

    def __call__(self, lines: int) -> None:
        self.ran.append(lines)
        super().__call__(lines)
