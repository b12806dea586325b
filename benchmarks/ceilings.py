"""What the GPU gives at most, measured: the denominators of every fraction."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@triton.jit
def _read_kernel(X, Out, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK * ROUNDS
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(ROUNDS):
        total += tl.load(X + start + i * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(Out + tl.program_id(0), tl.sum(total))


@dataclass(frozen=True)
class Ceilings:
    read: float  # bytes per second
    matrix: float  # bf16 operations per second
    attention: float  # bf16 operations per second, causal, cuDNN


def milliseconds(work: Callable[[], object], repeats: int = 10) -> float:
    """Median time of the work between two events, warm."""
    work()
    pairs = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def graph_microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one of the calls, captured together in one CUDA graph. For memory-bound work give each its own
    buffers, together several times the cache."""
    with torch.inference_mode():
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin()
            for call in calls:
                call()
            graph.capture_end()
        return 1e3 * milliseconds(graph.replay, 7) / len(calls)


def read_rate() -> float:
    """Bytes per second."""
    x = torch.randn(1 << 32, dtype=torch.bfloat16, device="cuda")
    programs = len(x) // (8192 * 8)
    sums = torch.empty(programs, device="cuda")
    time = milliseconds(lambda: _read_kernel[(programs,)](x, sums, BLOCK=8192, ROUNDS=8, num_warps=8))
    return 1e3 * 2 * len(x) / time


def measure() -> Ceilings:
    x = torch.randn(1 << 28, dtype=torch.bfloat16, device="cuda")
    a, b = x[: 1 << 26].view(8192, 8192), x[1 << 26 : 1 << 27].view(8192, 8192)
    matrix = 2 * 8192**3 / milliseconds(lambda: a @ b.t())
    q, k, v = x[: 3 << 26].view(3, 1, 32, 16384, 128)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        time = milliseconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return Ceilings(read_rate(), 1e3 * matrix, 1e3 * 2 * 32 * 16384**2 * 128 / time)
