"""What the GPU gives at most, measured: the denominators of every fraction."""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lightllm.common.triton_utils.timing import graph_microseconds, milliseconds

__all__ = ["PRODUCT", "Ceilings", "graph_microseconds", "matrix_rate", "measure", "milliseconds", "read_rate"]

SIZE = 8192  # of a product's matrices
PRODUCT = 2 * SIZE**3  # operations


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


@functools.cache
def _factors() -> torch.Tensor:
    return torch.randn(2, SIZE, SIZE, dtype=torch.bfloat16, device="cuda")


def matrix_rate(products: int = 10) -> float:
    """bf16 operations per second of so many products, one behind the other."""
    a, b = _factors()
    return 1e3 * PRODUCT / milliseconds(lambda: a @ b.t(), products)


def measure() -> Ceilings:
    matrix = matrix_rate()
    q, k, v = torch.randn(3, 1, 32, 16384, 128, dtype=torch.bfloat16, device="cuda")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        time = milliseconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return Ceilings(read_rate(), matrix, 1e3 * 2 * 32 * 16384**2 * 128 / time)
