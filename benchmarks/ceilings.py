"""What the GPU gives at most, measured: the denominators of every fraction."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lightllm.common.triton_utils.timing import graph_microseconds, milliseconds

__all__ = ["Ceilings", "graph_microseconds", "measure", "milliseconds", "read_rate"]


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
