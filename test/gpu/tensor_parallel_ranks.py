"""What every rank of test/gpu/test_tensor_parallel.py runs."""

import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path

import torch
from distributed.halves_ranks import check_halves, silu_by_the_product
from kernel.all_reduce_ranks import WIDTH, join
from support.step_driver import StepDriver, make_runner, random_prompts

from lightllm.common.basemodel.triton_kernel.all_reduce import sum_over_ranks
from lightllm.distributed.communication_op import all_reduce
from lightllm.distributed.parallel_state import ParallelState

VOCAB = 321
GRAPHS, MIXED = (1, 2, 4, 8), (16, 64, 128)  # rows of decode steps, tokens of steps with prompts
WISHES = {
    "greedy": {"do_sample": False},
    "seeded": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5},
    "penalties": {"do_sample": False, "repetition_penalty": 1.2, "logprobs": 3},  # more than a draw
}
LENGTHS = (33, 1, 2, 60, 17, 9, 5, 40)
Tokens = dict[str, list[list[int]]]


def answers(path: Path, parallel: ParallelState, device: torch.device, graphs: tuple[int, ...]) -> Tokens:
    """Tokens of rows that end one after the other, so that steps of all sizes follow each other."""
    found = {}
    mixed = MIXED if graphs else ()
    runner = make_runner(path, max_rows=8, device=device, graph_sizes=graphs, mixed_sizes=mixed, parallel=parallel)
    for name, wishes in WISHES.items():
        driver = StepDriver(runner, 16, max_rows=8)
        prompts = random_prompts(LENGTHS, vocab=VOCAB)
        rows = [driver.sequence(prompt, max_new_tokens=4 + 2 * i, **wishes) for i, prompt in enumerate(prompts)]
        driver.run(rows)
        found[name] = [row.tokens for row in rows]
    return found


def tokens_main(rank: int, size: int, directory: str) -> None:
    """Saves {(through shared memory, with graphs): tokens} of the model there."""
    torch.set_num_threads(1)
    on_gpus = torch.cuda.device_count() >= size
    meet = Path(directory) / "meet"
    if on_gpus:
        shared = join(rank, size, meet, torch.float32)
        ways = [(shared, True, GRAPHS), (shared, True, ()), (dataclasses.replace(shared, peers=None), False, GRAPHS)]
    else:
        ways = [(ParallelState.init(rank, size, "gloo", meet), False, ())]
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    found = {
        (peers, bool(graphs)): answers(Path(directory), parallel, device, graphs) for parallel, peers, graphs in ways
    }
    torch.save(found, f"{directory}/tokens-{rank}.pt")
    leave()


def sums_main(rank: int, size: int, directory: str) -> None:
    parallel = join(rank, size, Path(directory) / "meet", torch.float32, lines=1024)
    replay_in_any_order(parallel, 3000)
    check_halves(parallel, captured)
    leave()


def halves_main(rank: int, size: int, directory: str) -> None:
    with silu_by_the_product():
        check_halves(join(rank, size, Path(directory) / "meet", torch.bfloat16), captured)
    leave()


def leave() -> None:
    """Ends the process without the clean-up of NCCL, which waits forever for CUDA graphs that hold its communicator."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    os._exit(0)


def captured(call: Callable[[], tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """What the call gives as a CUDA graph, replayed for the third time in a row."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        outcome = call()
        graph.capture_end()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        return [part.clone() for part in outcome]


def replay_in_any_order(parallel: ParallelState, replays: int) -> None:
    """Graphs of sums of several sizes, replayed in a random order that the ranks share, against NCCL."""
    sizes = [1, 3, 64, 1024]
    order = random.Random(0).choices(sizes, k=replays)
    starts = {lines: torch.randn(lines, WIDTH, device="cuda") for lines in sizes}

    def advance(x: torch.Tensor, total: torch.Tensor) -> None:
        x.copy_(total * (0.9 / parallel.size) + (parallel.rank + 1) * 0.01)

    graphs, states = {}, {}
    torch.cuda.synchronize()
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for lines in sizes:
            x = states[lines] = starts[lines].clone()
            sum_over_ranks(x, parallel)
            graphs[lines] = graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(3):
                advance(x, sum_over_ranks(x, parallel))
            graph.capture_end()
        for lines in order:
            graphs[lines].replay()
        for lines in sizes:
            x = starts[lines].clone()
            for _ in range(3 * order.count(lines)):
                advance(x, all_reduce(x.clone(), parallel))
            torch.testing.assert_close(states[lines], x, rtol=1e-5, atol=1e-5)
