"""Sums of many lines of which each of two ranks takes a half, against sums of the whole: on GPUs, or over gloo."""

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from lightllm.common.basemodel import partial_sum
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.normed import tensor_of
from lightllm.common.basemodel.partial_sum import PartialSum, total
from lightllm.distributed.parallel_state import ParallelState
from lightllm.distributed.peer_memory import PeerMemory

WIDTH, EPS = 512, 1e-5
LINES = (256, 257, 300, 384, 1000)
Outcome = tuple[Tensor, ...]


class GlooCopies:
    """PeerCopies between two processes."""

    room = max(LINES) * WIDTH

    def __init__(self, parallel: ParallelState) -> None:
        self.rank, self._group, self._other = parallel.rank, parallel.group, 1 - parallel.rank
        self._sent: list = []
        self.received = 0

    def send(self, place: int, x: Tensor) -> None:
        self._sent.append(self._group.send([x], self._other, place))

    def receive(self, place: int, lines: int, width: int) -> Tensor:
        self.received += 1
        x = torch.empty(lines, width)
        self._group.recv([x], self._other, place).wait()
        return x

    def beside(self) -> nullcontext:
        return nullcontext(nullcontext())

    def finish(self) -> None:
        while self._sent:
            self._sent.pop().wait()


class Layers:
    """Three sums behind one another, with products between them, of random numbers: some on all ranks alike."""

    def __init__(self, lines: int, parallel: ParallelState, alike: torch.Generator, own: torch.Generator) -> None:
        draw = partial(torch.randn, device=own.device)
        self.x, self.residual = draw(lines, 2 * WIDTH, generator=own), draw(lines, WIDTH, generator=alike)
        self.norm = draw(WIDTH, generator=alike)
        down, up = (draw(*shape, generator=own) / WIDTH**0.5 for shape in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)))
        self.down = Weight(down, None, parallel)
        self.up = Weight(up, draw(2 * WIDTH, generator=alike))
        self.chosen = torch.tensor([0, lines - 1, 5, lines // 2, 5], device=own.device)

    def __call__(self, parallel: ParallelState) -> Outcome:
        hidden, kept = self.x, self.residual
        for gated in (False, True, False):
            normed, kept = PartialSum(hidden, parallel, self.down.apply).add_rmsnorm(kept, self.norm, EPS)
            hidden = self.up.apply(normed, gated)
            hidden = hidden.repeat(1, 2) if gated else hidden
        return hidden, self.up.apply(normed), tensor_of(normed), total(kept), kept.index_select(0, self.chosen)


def check_halves(parallel: ParallelState, also: Callable[[Callable[[], Outcome]], Outcome] | None = None) -> None:
    """`also` is another way to run the layers."""
    assert parallel.peers is not None
    device = parallel.peers.turns.device
    alike, own = (torch.Generator(device).manual_seed(seed) for seed in (9, parallel.rank))
    skew = random.Random(parallel.rank)
    with mock.patch.object(partial_sum, "HALVES_FROM", min(LINES) * WIDTH), torch.inference_mode():
        for lines in LINES:
            layers = Layers(lines, parallel, alike, own)
            wanted = layers(replace(parallel, peers=None))
            for way in (lambda call: call(), also or (lambda call: call())):
                time.sleep(skew.random() * 0.02)
                for found, right in zip(way(partial(layers, parallel)), wanted, strict=True):
                    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def over_gloo(rank: int, size: int, meet: str) -> None:
    torch.set_num_threads(1)
    parallel = ParallelState.init(rank, size, "gloo", meet)
    copies, nothing = GlooCopies(parallel), torch.zeros(1, dtype=torch.int64)
    check_halves(
        replace(parallel, peers=PeerMemory(nothing, nothing, 0, WIDTH, torch.float32, 0, nothing, copies=copies))
    )
    assert copies.received == 2 * 2 * 3 * len(LINES)
