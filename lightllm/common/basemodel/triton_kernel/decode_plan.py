"""DecodePlan: the keys of all decode rows cut into items of like size, once per step for all layers of a kind."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel.context_attention import oldest_key
from lightllm.common.triton_utils.dependent_launch import EARLY_LINES, dependent_launch, wait_for_writes
from lightllm.common.triton_utils.dispatch import op

LENGTHS = tl.constexpr(8)  # classes of length by which items are sorted
ITEMS_PER_PROGRAM = 32  # of the kernel that makes the plan
FEW_ROWS = 128  # up to so many that kernel looks at FEW_ROWS rows, beyond at 512 or the next power of two


@dataclass(frozen=True)
class DecodePlan:
    """`items` int32 [6, N]: row, first key, key behind the last, first item of the row, number of items of the row, row
    of the request table. Items of a row are neighbours, rows of long items come first; unused ones at the end are
    -1, 0, .... `arrived` int32 [rows * heads] is zero: for each row and head, how many of its items are done.
    """

    items: torch.Tensor
    arrived: torch.Tensor


@dataclass(frozen=True)
class PlanSize:
    """How many items rows with keys are cut into at most: `few`, or if that is more two for each, but within `wave`; as
    many rows as that have `spare` items more than there are rows. Rows without keys do not count: of a graph's lines a
    step may use few."""

    few: int
    spare: int
    wave: int = 0

    def most(self, rows: int) -> int:
        return max(1, self.few, min(2 * rows, self.wave if rows < self.wave else rows + self.spare))


@op
def plan_decode(
    kv_lens: torch.Tensor, rows: torch.Tensor, spec: AttentionSpec, heads: int, block: int, size: PlanSize
) -> DecodePlan:
    """kv_lens int32 [B], at the query's position kv_lens - 1, of these rows of the request table; rows of no keys have
    no items. Every item is computed by `heads` programs, in blocks of `block` keys; the longest has as few of them as
    the number of items allows. The plan has as many columns whatever the lengths, so that a CUDA graph can follow it.
    """
    ends = kv_lens.long()
    begins = torch.as_tensor(spec.oldest(ends - 1)).clamp(min=0).expand(len(ends))
    blocks = -(-(ends - begins) // block)
    longest = _fewest_blocks(blocks, size.most(int((blocks > 0).sum())))
    counts = -(-blocks // longest)
    shares = -(-blocks // counts.clamp(min=1))
    order = (-(-shares * LENGTHS.value // longest)).sort(descending=True, stable=True).indices
    first = torch.empty_like(counts)
    first[order] = counts[order].cumsum(0) - counts[order]
    items = torch.tensor([-1, 0, 0, 0, 0, 0], dtype=torch.int32)[:, None].repeat(1, size.most(len(ends)))
    columns = torch.stack((begins, ends, shares, counts, first, rows), 1)
    for i, (begin, end, share, count, at, row) in enumerate(columns.tolist()):
        for j in range(count):
            low = begin + j * share * block
            items[:, at + j] = torch.tensor([i, low, min(low + share * block, end), at, count, row])
    return DecodePlan(items, torch.zeros(len(ends) * heads, dtype=torch.int32))


def _fewest_blocks(blocks: torch.Tensor, most: int) -> int:
    """In the longest item, if there are `most` for rows of so many blocks."""
    longest = max(1, -(-int(blocks.sum()) // most))
    while int((-(-blocks // longest)).sum()) > most:
        longest += 1
    return longest


@triton.jit
def _find_fewest_blocks(blocks, most):
    least = tl.maximum(tl.cdiv(tl.sum(blocks, 0), most), 1)
    enough = tl.maximum(tl.max(blocks, 0), least)
    while least < enough:
        middle = (least + enough) // 2
        fits = tl.sum(tl.cdiv(blocks, middle), 0) <= most
        enough = tl.where(fits, middle, enough)
        least = tl.where(fits, least, middle + 1)
    return least


@triton.jit
def _blocks(end, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """(first key, number of blocks) of rows whose keys end there."""
    begin = tl.zeros_like(end)
    if WINDOW > 0 or CHUNK > 0:
        begin = tl.maximum(oldest_key(end - 1, WINDOW, CHUNK), 0)
    return begin, tl.cdiv(end - begin, BLOCK)


@triton.jit(do_not_specialize=["KvLens", "Rows", "rows", "heads", "few", "spare", "wave", "columns"])
def _plan_decode_kernel(
    KvLens, Rows, Items, Arrived, rows, heads, few, spare, wave, columns,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ITEMS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (ITEMS items): finds for itself how long items are, and which rows its own belong to. What it reads was
    there before the step's first layer began, so that only its writes wait for the kernel before it."""
    i = tl.arange(0, ROWS)
    end = tl.load(KvLens + i, mask=i < rows, other=0)
    begin, blocks = _blocks(end, WINDOW, CHUNK, BLOCK)
    live = tl.sum((blocks > 0).to(tl.int32), 0)
    most = tl.minimum(2 * live, tl.where(live < wave, wave, live + spare))
    longest = _find_fewest_blocks(blocks, tl.maximum(tl.maximum(few, 1), most))
    count = tl.cdiv(blocks, longest)
    share = tl.cdiv(blocks, tl.maximum(count, 1))
    length = LENGTHS - tl.cdiv(share * LENGTHS, longest)
    of_length = length[None, :] == tl.arange(0, LENGTHS)[:, None]
    stops = tl.cumsum(tl.reshape(tl.where(of_length, count[None, :], 0), [LENGTHS * ROWS]), 0)
    stop = tl.sum(tl.where(of_length, tl.reshape(stops, [LENGTHS, ROWS]), 0), 0)

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    mine = ((stop - count)[None, :] <= item[:, None]) & (item[:, None] < stop[None, :])
    row = tl.sum(tl.where(mine, i[None, :] + 1, 0), 1) - 1
    first = tl.sum(tl.where(mine, (stop - count)[None, :], 0), 1)
    end = tl.load(KvLens + row, mask=row >= 0, other=0)
    of_table = tl.load(Rows + row, mask=row >= 0, other=0)
    begin, blocks = _blocks(end, WINDOW, CHUNK, BLOCK)
    count = tl.cdiv(blocks, longest)
    share = tl.cdiv(blocks, tl.maximum(count, 1)) * BLOCK
    low = begin + (item - first) * share
    wait_for_writes(PDL)
    to, mask = Items + item, item < columns
    tl.store(to, row, mask=mask)
    tl.store(to + columns, low, mask=mask)
    tl.store(to + 2 * columns, tl.minimum(low + share, end), mask=mask)
    tl.store(to + 3 * columns, first, mask=mask)
    tl.store(to + 4 * columns, count, mask=mask)
    tl.store(to + 5 * columns, of_table, mask=mask)
    for start in range(tl.program_id(0) * ROWS, rows * heads, tl.num_programs(0) * ROWS):
        tl.store(Arrived + start + i, 0, mask=start + i < rows * heads)


@plan_decode.kernel
def _plan_decode(
    kv_lens: torch.Tensor, rows: torch.Tensor, spec: AttentionSpec, heads: int, block: int, size: PlanSize
) -> DecodePlan:
    count = len(kv_lens)
    block_rows = FEW_ROWS if count <= FEW_ROWS else max(512, triton.next_power_of_2(count))
    columns = size.most(count)
    items = torch.empty(6, columns, dtype=torch.int32, device=kv_lens.device)
    arrived = torch.empty(count * heads, dtype=torch.int32, device=kv_lens.device)
    _plan_decode_kernel[(triton.cdiv(columns, ITEMS_PER_PROGRAM),)](
        *(kv_lens, rows, items, arrived, count, heads, size.few, size.spare, size.wave, columns),
        WINDOW=spec.window or 0,
        CHUNK=spec.chunk or 0,
        BLOCK=block,
        ROWS=block_rows,
        ITEMS=ITEMS_PER_PROGRAM,
        num_warps=min(16, max(4, block_rows // 64)),
        **dependent_launch(kv_lens, EARLY_LINES),
    )
    return DecodePlan(items, arrived)
