"""Weights of the product that comes next, fetched into the GPU's cache while its memory has nothing else to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MOST_LINES = 128  # products of more lines wait for arithmetic
FETCHED = 16 << 20  # bytes, a part of the cache
PIECE = 512  # bytes that one thread asks for
THREADS = 512


@dataclass(frozen=True)
class FetchAhead:
    """What `programs` programs fetch that call `fetch_ahead`: the first `parts` pieces of each row."""

    weight: torch.Tensor
    rows: int
    parts: int

    @property
    def row_bytes(self) -> int:
        return self.weight.shape[1] * self.weight.itemsize

    @property
    def programs(self) -> int:
        return triton.cdiv(self.rows * self.parts, THREADS)


def plan_fetch(weight: torch.Tensor | None, lines: int) -> FetchAhead | None:
    """What to fetch of weight [outputs, inputs] before a product with so many lines: the beginning of each row, since
    the programs of a product begin there. None where nothing is gained or the GPU cannot."""
    if weight is None or lines > MOST_LINES or weight.dim() != 2 or not weight.is_contiguous() or not weight.is_cuda:
        return None
    if torch.version.hip or torch.cuda.get_device_capability(weight.device) < (9, 0):
        return None
    rows, row_bytes = len(weight), weight.shape[1] * weight.itemsize
    parts = min(FETCHED // (rows * PIECE), row_bytes // PIECE)
    return FetchAhead(weight, rows, parts) if parts and row_bytes % PIECE == 0 else None


@triton.jit
def fetch_ahead(W, program, rows, row_bytes, PARTS: tl.constexpr):
    """PARTS 0: nothing, for GPUs that cannot."""
    if PARTS > 0:
        item = program * 512 + tl.arange(0, 512)
        row = tl.minimum(item // PARTS, rows - 1).to(tl.int64)
        at = W.to(tl.int64) + row * row_bytes + item % PARTS * 512
        fetch(at, 512)


@triton.jit
def fetch(at, size: tl.constexpr):
    """The `size` bytes behind each address, into the GPU's cache; both are multiples of 16."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [at, tl.full(at.shape, size, tl.int32)], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
