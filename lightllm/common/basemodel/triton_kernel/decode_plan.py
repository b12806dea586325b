"""DecodePlan: the keys of all decode rows cut into items of like size, once per step for all layers of a kind."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel.context_attention import oldest_key
from lightllm.common.triton_utils.dispatch import op

MOST_PROGRAMS = 512  # what fills a large GPU: more items would only add to the work of joining them
FEWEST_PROGRAMS = 128
KEYS_PER_PROGRAM = 64  # below that many, splitting a lone row further gains nothing
PROGRAMS_PER_ROW = 32


@dataclass(frozen=True)
class DecodePlan:
    """`items` int32 [6, N]: row, first key, key behind the last, first item of the row, number of items of the row, row
    of the request table. Items of a row are neighbours; unused ones at the end are -1. `arrived` int32 [rows * heads]
    is zero: for each row and head, how many of its items are done.
    """

    items: torch.Tensor
    arrived: torch.Tensor


def _capacity(rows: int, heads: int) -> int:
    """Each row has at most one item more than its share of the most."""
    return max(1, MOST_PROGRAMS // heads) + rows


@op
def plan_decode(kv_lens: torch.Tensor, rows: torch.Tensor, spec: AttentionSpec, heads: int, block: int) -> DecodePlan:
    """kv_lens int32 [B], at the query's position kv_lens - 1, of these rows of the request table; rows of no keys have
    no items. Every item is computed by `heads` programs, in blocks of `block` keys. The number of items depends on B
    alone, so that a CUDA graph can run them."""
    ends = kv_lens.long()
    begins = torch.as_tensor(spec.oldest(ends - 1)).clamp(min=0).expand(len(ends))
    spans = ends - begins
    keys, queries = int(spans.sum()), int((spans > 0).sum())
    programs = min(MOST_PROGRAMS, max(FEWEST_PROGRAMS, PROGRAMS_PER_ROW * queries, keys // KEYS_PER_PROGRAM))
    tile = max(block, _round_up(-(-keys // max(1, programs // heads)), block))
    shares = _round_up(-(-spans // (-(-spans // tile)).clamp(min=1)), block).clamp(min=1)
    counts = -(-spans // shares)
    first = counts.cumsum(0) - counts
    items = torch.full((6, _capacity(len(ends), heads)), -1, dtype=torch.int32)
    columns = torch.stack((begins, ends, shares, counts, first, rows), 1)
    for i, (begin, end, share, count, at, row) in enumerate(columns.tolist()):
        for j in range(count):
            low = begin + j * share
            items[:, at + j] = torch.tensor([i, low, min(low + share, end), at, count, row])
    return DecodePlan(items, torch.zeros(len(ends) * heads, dtype=torch.int32))


def _round_up(number, block: int):
    return -(-number // block) * block


@triton.jit(do_not_specialize=["KvLens", "Rows", "rows", "capacity", "heads"])
def _plan_decode_kernel(
    KvLens, Rows, Items, Arrived, rows, capacity, heads,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    MOST: tl.constexpr, FEWEST: tl.constexpr, PER_PROGRAM: tl.constexpr, PER_ROW: tl.constexpr,
):  # fmt: skip
    """One program for all rows."""
    i = tl.arange(0, ROWS)
    mask = i < rows
    end = tl.load(KvLens + i, mask=mask, other=0)
    row = tl.load(Rows + i, mask=mask, other=0)
    begin = tl.zeros([ROWS], tl.int32)
    if WINDOW > 0 or CHUNK > 0:
        begin = tl.maximum(oldest_key(end - 1, WINDOW, CHUNK), 0)
    span = tl.where(mask, end - begin, 0)
    keys = tl.sum(span, 0)
    queries = tl.sum((span > 0).to(tl.int32), 0)
    programs = tl.minimum(MOST, tl.maximum(tl.maximum(FEWEST, PER_ROW * queries), keys // PER_PROGRAM))
    tile = tl.maximum(tl.cdiv(tl.cdiv(keys, tl.maximum(programs // heads, 1)), BLOCK), 1) * BLOCK
    share = tl.cdiv(tl.cdiv(span, tl.maximum(tl.cdiv(span, tile), 1)), BLOCK) * BLOCK
    count = tl.cdiv(span, tl.maximum(share, 1))
    first = tl.cumsum(count, 0) - count
    for j in range(0, tl.max(count, 0)):
        used = mask & (j < count)
        low = begin + j * share
        to = Items + first + j
        tl.store(to, i, mask=used)
        tl.store(to + capacity, low, mask=used)
        tl.store(to + 2 * capacity, tl.minimum(low + share, end), mask=used)
        tl.store(to + 3 * capacity, first, mask=used)
        tl.store(to + 4 * capacity, count, mask=used)
        tl.store(to + 5 * capacity, row, mask=used)
    for start in range(tl.sum(count, 0), capacity, ROWS):
        for k in tl.static_range(6):
            tl.store(Items + k * capacity + start + i, -1, mask=start + i < capacity)
    for start in range(0, rows * heads, ROWS):
        tl.store(Arrived + start + i, 0, mask=start + i < rows * heads)


@plan_decode.kernel
def _plan_decode(kv_lens: torch.Tensor, rows: torch.Tensor, spec: AttentionSpec, heads: int, block: int) -> DecodePlan:
    count = len(kv_lens)
    capacity = _capacity(count, heads)
    items = torch.empty(6, capacity, dtype=torch.int32, device=kv_lens.device)
    arrived = torch.empty(count * heads, dtype=torch.int32, device=kv_lens.device)
    _plan_decode_kernel[(1,)](
        *(kv_lens, rows, items, arrived, count, capacity, heads),
        WINDOW=spec.window or 0,
        CHUNK=spec.chunk or 0,
        BLOCK=block,
        ROWS=max(512, triton.next_power_of_2(count)),
        MOST=MOST_PROGRAMS,
        FEWEST=FEWEST_PROGRAMS,
        PER_PROGRAM=KEYS_PER_PROGRAM,
        PER_ROW=PROGRAMS_PER_ROW,
        num_warps=4,
    )
    return DecodePlan(items, arrived)
