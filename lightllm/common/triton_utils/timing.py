"""Times of calls on the GPU, for those who choose between kernels."""

import statistics
from collections.abc import Callable, Sequence

import torch


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
            graph.capture_begin(capture_error_mode="thread_local")
            for call in calls:
                call()
            graph.capture_end()
        return 1e3 * milliseconds(graph.replay, 7) / len(calls)
