"""Sums of many lines of which each of two ranks takes a half, against sums of the whole: on GPUs, or over gloo."""

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from lightllm.common.basemodel import partial_sum
from lightllm.common.basemodel.layer_weights import base_layer_weight
from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.normed import tensor_of
from lightllm.common.basemodel.partial_sum import PartialSum, total
from lightllm.distributed.parallel_state import ParallelState
from lightllm.distributed.peer_memory import PeerMemory

WIDTH, EPS = 512, 1e-5
LINES = (256, 257, 300, 384, 1000)
# Relative and absolute. Halves round in another order: three times, numbers of up to 19.
BOUNDS = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-2, 0.25)}
Outcome = tuple[Tensor, ...]


class GlooCopies:
    """PeerCopies between two processes."""

    room = max(LINES) * WIDTH

    def __init__(self, parallel: ParallelState, dtype: torch.dtype) -> None:
        self.rank, self._group, self._other = parallel.rank, parallel.group, 1 - parallel.rank
        self._dtype = dtype
        self._sent: list = []
        self.received = 0

    def send(self, place: int, x: Tensor) -> None:
        self._sent.append(self._group.send([x.view(torch.uint8)], self._other, place))

    def receive(self, place: int, lines: int, width: int) -> Tensor:
        self.received += 1
        x = torch.empty(lines, width, dtype=self._dtype)
        self._group.recv([x.view(torch.uint8)], self._other, place).wait()
        return x

    def beside(self) -> nullcontext:
        return nullcontext(nullcontext())

    def finish(self) -> None:
        while self._sent:
            self._sent.pop().wait()


class Layers:
    """Three sums behind one another, with products between them, of random numbers: some on all ranks alike."""

    def __init__(self, lines: int, parallel: ParallelState, alike: torch.Generator, own: torch.Generator) -> None:
        assert parallel.peers is not None
        draw = partial(torch.randn, device=own.device, dtype=parallel.peers.dtype)
        self.x, self.residual = draw(lines, 2 * WIDTH, generator=own), draw(lines, WIDTH, generator=alike)
        self.norm = draw(WIDTH, generator=alike)
        down, up = (draw(*shape, generator=own) / WIDTH**0.5 for shape in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)))
        self.down = Weight(down, None, parallel)
        self.up, self.gate_up = Weight(up, draw(2 * WIDTH, generator=alike)), Weight(up, None)
        self.chosen = torch.tensor([0, lines - 1, 5, lines // 2, 5], device=own.device)

    def __call__(self, parallel: ParallelState) -> Outcome:
        hidden, kept = self.x, self.residual
        for gated in (False, True, False):
            normed, kept = PartialSum(hidden, parallel, self.down.apply).add_rmsnorm(kept, self.norm, EPS)
            hidden = self.gate_up.apply(normed, gated).repeat(1, 2) if gated else self.up.apply(normed)
        return hidden, self.up.apply(normed, True), tensor_of(normed), total(kept), kept.index_select(0, self.chosen)


def check_halves(parallel: ParallelState, also: Callable[[Callable[[], Outcome]], Outcome] | None = None) -> None:
    """`also` is another way to run the layers."""
    assert parallel.peers is not None
    device, (rtol, atol) = parallel.peers.turns.device, BOUNDS[parallel.peers.dtype]
    alike, own = (torch.Generator(device).manual_seed(seed) for seed in (9, parallel.rank))
    skew = random.Random(parallel.rank)
    with mock.patch.object(partial_sum, "HALVES_FROM", min(LINES) * WIDTH), torch.inference_mode():
        for lines in LINES:
            layers = Layers(lines, parallel, alike, own)
            wanted = layers(replace(parallel, peers=None))
            for way in (lambda call: call(), also or (lambda call: call())):
                time.sleep(skew.random() * 0.02)
                for found, right in zip(way(partial(layers, parallel)), wanted, strict=True):
                    torch.testing.assert_close(found, right, rtol=rtol, atol=atol)


def silu_by_the_product() -> AbstractContextManager:
    """Products of gate and up end with silu, of any size."""
    return mock.patch.object(base_layer_weight, "suits_many_lines", lambda lines, weight: True)


def over_gloo(rank: int, size: int, meet: str) -> None:
    torch.set_num_threads(1)
    parallel = ParallelState.init(rank, size, "gloo", meet)
    nothing = torch.zeros(1, dtype=torch.int64)
    for dtype, how in ((torch.float32, nullcontext()), (torch.bfloat16, silu_by_the_product())):
        copies = GlooCopies(parallel, dtype)
        peers = PeerMemory(nothing, nothing, 0, WIDTH, dtype, 0, nothing, copies=copies)
        with how:
            check_halves(replace(parallel, peers=peers))
        assert copies.received == 2 * 2 * 3 * len(LINES)
