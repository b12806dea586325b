"""What every rank of the tests of all_reduce.py runs: on GPUs, or interpreted on memory that processes share."""

import math
import random
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
from support.kernel_cases import HOPPER

from lightllm.common.basemodel.triton_kernel.all_gather import join_columns
from lightllm.common.basemodel.triton_kernel.all_reduce import sum_add_rmsnorm, sum_over_ranks
from lightllm.common.basemodel.triton_kernel.ring_linear import RingConfig
from lightllm.common.basemodel.triton_kernel.skinny_linear import SkinnyConfig, add_skinny_linear
from lightllm.distributed.communication_op import all_gather
from lightllm.distributed.parallel_state import ParallelState
from lightllm.distributed.peer_memory import EXCHANGED_LINES, Boxes, PeerMemory

LINES, WIDTH, EPS = 8, 512, 1e-5
COPIED = 512 * WIDTH  # elements that a copy may have
EXCHANGING = [  # configurations, fewest and most lines
    *((SkinnyConfig(*fields, 1, False, 4, ahead), 1, 1) for *fields, ahead in ((8, 512, 1), (4, 256, 4))),
    *((SkinnyConfig(*fields, True, 4, 4), 1, EXCHANGED_LINES) for fields in ((32, 128, 2), (64, 128, 1))),
]
if HOPPER:
    rings = RingConfig(64, 9, 2, 4), RingConfig(32, 16, 1, 4, stack=2)
    EXCHANGING += [(config, 2, EXCHANGED_LINES) for config in rings]
MAPPED: list[torch.Tensor] = []  # memory of other ranks, which only pointers name
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative and absolute


def join(rank: int, size: int, meet: Path, dtype: torch.dtype, lines: int = LINES) -> ParallelState:
    """The group with its PeerMemory, on GPUs or, where there are not enough of them, in mapped files."""
    if torch.cuda.device_count() >= size:
        torch.cuda.set_device(rank)
        parallel = ParallelState.init(rank, size, "nccl", meet).with_peers(lines, WIDTH, dtype, COPIED)
        assert parallel.peers is not None
        return parallel
    from support.triton_interpreter_bf16 import install

    install()
    parallel = ParallelState.init(rank, size, "gloo", meet)
    elements = 2 * size * LINES * WIDTH
    memories = [torch.from_file(f"{meet}-{r}", True, elements, dtype=dtype) for r in range(size)]
    memories[rank].fill_(-0.0)
    all_gather(torch.zeros(1, 1), parallel)  # nobody writes before all is empty
    pointers = torch.tensor([memory.data_ptr() for memory in memories])
    turns = torch.zeros(LINES, dtype=torch.int32)
    boxes = mapped_boxes(rank, meet, parallel) if size == 2 and dtype == torch.bfloat16 else None
    peers = PeerMemory(pointers, turns, LINES, WIDTH, dtype, LINES, memories[rank], boxes)
    MAPPED.extend(memories)
    return ParallelState(rank, size, parallel.group, store=parallel.store, peers=peers)


def mapped_boxes(rank: int, meet: Path, parallel: ParallelState) -> Iterator[Boxes]:
    shape = 2, EXCHANGED_LINES, WIDTH
    boxes = [torch.from_file(f"{meet}-boxes-{r}", True, math.prod(shape), dtype=torch.int16) for r in range(2)]
    boxes[rank].fill_(-(1 << 15))
    all_gather(torch.zeros(1, 1), parallel)
    return cycle([*zip(boxes[1 - rank].view(shape), boxes[rank].view(shape))])


class Inputs:
    """Random ones of every rank, which each rank can draw without asking the others."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, lines: int, width: int) -> torch.Tensor:
        """[ranks, lines, width], among them zeros of both signs."""
        x = torch.randn(self.size, lines, width, generator=self.generator)
        x[torch.rand(x.shape, generator=self.generator) < 0.1] = -0.0
        x[torch.rand(x.shape, generator=self.generator) < 0.1] = 0.0
        return x.to(self.device, self.dtype)


def same_everywhere(x: torch.Tensor, parallel: ParallelState) -> bool:
    every = all_gather(x.reshape(1, -1), parallel).view(parallel.size, -1)
    return all(torch.equal(every[0], other) for other in every)


def check(x: torch.Tensor, wanted: torch.Tensor, parallel: ParallelState, bound: float | None = None) -> None:
    bound = bound or BOUNDS[x.dtype]
    torch.testing.assert_close(x.double(), wanted, rtol=bound, atol=bound)
    assert same_everywhere(x, parallel)


def check_exchanges(parallel: ParallelState, inputs: Inputs, skew: random.Random, calls: int) -> None:
    """Products of few lines that add over two ranks themselves."""
    assert add_skinny_linear.launcher
    rank, plan = parallel.rank, random.Random(2)
    for _ in range(calls):
        config, fewest, most = plan.choice(EXCHANGING)
        lines = plan.randint(fewest, most)
        x, matrix = inputs.draw(lines, 1024), inputs.draw(WIDTH, 1024) / 32
        residual, norm = inputs.draw(lines, WIDTH)[0], inputs.draw(1, WIDTH)[0, 0]
        if skew.random() < 0.2:
            time.sleep(skew.random() * 0.01)
        bias = norm if rank else None
        total, scaled, squares = add_skinny_linear.launcher(
            x[rank].clone(), matrix[rank].contiguous(), bias, residual, norm, config, parallel.next_boxes()
        )
        products = x.double() @ matrix.double().transpose(1, 2)
        check(total, products.sum(0) + residual.double() + norm.double(), parallel, 3e-2)
        check(scaled, total.double() * norm.double(), parallel)
        torch.testing.assert_close(squares.sum(0), total.float().square().sum(1))
    _, inbox = parallel.next_boxes()
    all_gather(torch.zeros(1, 1, device=inbox.device), parallel)
    assert (inbox == -(1 << 15)).all()


def rank_main(rank: int, size: int, directory: str, dtype: torch.dtype, calls: int) -> None:
    torch.set_num_threads(1)
    parallel = join(rank, size, Path(directory) / f"meet-{dtype}", dtype)
    assert parallel.peers is not None
    kernels = sum_over_ranks.launcher, sum_add_rmsnorm.launcher, join_columns.launcher
    assert kernels[0] and kernels[1] and kernels[2]
    device = parallel.peers.turns.device
    inputs, plan, skew = Inputs(size, dtype, device), random.Random(1), random.Random(rank)
    for _ in range(calls):
        lines, width = plan.randint(1, LINES), plan.choice((1, 5, 128, 320, WIDTH))
        x = inputs.draw(lines, width)
        if skew.random() < 0.2:
            time.sleep(skew.random() * 0.01)
        check(kernels[0](x[rank].clone(), parallel), x.double().sum(0), parallel)
        residual, weight = inputs.draw(lines, width)[0], inputs.draw(1, width)[0, 0]
        addends = x
        if plan.random() < 0.5:  # as a product of several programs leaves them
            addends = torch.stack([inputs.draw(lines, width) for _ in range(3)], 1).float()
            x = addends.sum(1).to(dtype)
        normed, total = kernels[1](addends[rank].clone(), residual, weight, EPS, parallel)
        wanted = x.double().sum(0) + residual.double()
        check(total, wanted, parallel)
        norm = total.double() / (total.double().square().mean(-1, keepdim=True) + EPS).sqrt()
        check(normed, norm * weight.double(), parallel)
        parts = inputs.draw(min(lines, LINES // 2), plan.choice((1, 7, WIDTH, WIDTH + 1)))
        joined, columns = parts.transpose(0, 1).flatten(1), size * parts.shape[2] - plan.randint(0, 1)
        assert torch.equal(kernels[2](parts[rank], columns, parallel), joined[:, :columns])
    if parallel.peers.boxes:
        check_exchanges(parallel, inputs, skew, calls)
    wide = torch.ones(LINES, WIDTH + 1, dtype=dtype, device=device)  # finds no room there
    assert torch.equal(kernels[0](wide.clone(), parallel), torch.full_like(wide, size))
    assert torch.equal(kernels[2](wide, size * (WIDTH + 1), parallel), wide.repeat(1, size))
    assert (parallel.peers.memory.view(torch.int32 if dtype == torch.float32 else torch.int16) < 0).all()  # empty again
