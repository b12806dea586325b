"""Lines gathered by the expert that they are routed to, in blocks of one expert each: the work list of grouped_gemm."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.triton_utils.dispatch import op


def most_blocks(lines: int, experts: int, block: int) -> int:
    """However the lines are routed: every expert that is hit may have one block that is not full."""
    return lines // block + min(lines, experts)


@op
def group_lines(ids: Tensor, first: int, experts: int, block: int) -> tuple[Tensor, Tensor]:
    """ids int32 [n], the expert of each line; those in first...first + experts - 1 are here.

    -> (lines int32 [blocks * block], expert int32 [blocks], counted from `first`): each block holds lines of one
    expert, in order, and n in places that are left over; blocks that are left over, at the end, hold `experts`. The
    number of blocks depends on shapes alone.
    """
    n = len(ids)
    blocks = most_blocks(n, experts, block)
    local = ids.long() - first
    absent = (local < 0) | (local >= experts)
    local = local.masked_fill(absent, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64).scatter_add_(0, local, torch.ones_like(local))
    padded = (counts + block - 1) // block * block
    ends = padded[:-1].cumsum(0)
    lines = torch.full((blocks * block,), n, dtype=torch.int32)
    order = local.argsort(stable=True)[: n - int(counts[experts])]
    expert = local[order]
    begins = counts.cumsum(0) - counts
    lines[torch.arange(len(order)) - begins[expert] + (ends - padded[:-1])[expert]] = order.int()
    return lines, torch.searchsorted(ends, torch.arange(blocks) * block, right=True).int()


@triton.jit(do_not_specialize=["n", "first", "blocks"])
def _group_lines_kernel(
    Ids, Lines, Expert, n, first, blocks,
    E: tl.constexpr, BINS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program e: count the lines of all experts, then write those of expert e; program E: blocks that are left over."""
    e = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, n, BLOCK):
        local = tl.load(Ids + start + i, mask=start + i < n, other=-1) - first
        held = (start + i < n) & (local >= 0) & (local < E)
        counts += tl.histogram(tl.where(held, local, BINS - 1), BINS)
    count = tl.sum(tl.where(bins == e, counts, 0), 0)
    block = tl.sum(tl.where(bins < e, tl.cdiv(counts, BLOCK_M), 0), 0)
    if e < E:
        place = block * BLOCK_M
        for start in range(0, n, BLOCK):
            local = tl.load(Ids + start + i, mask=start + i < n, other=-1) - first
            mine = (start + i < n) & (local == e)
            rank = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(Lines + place + rank - 1, start + i, mask=mine)
            place += tl.max(rank, 0)
        end = block + tl.cdiv(count, BLOCK_M)
        m = tl.arange(0, BLOCK_M)
        tl.store(Lines + place + m, n, mask=place + m < end * BLOCK_M)
        for start in range(block, end, BLOCK):
            tl.store(Expert + start + i, e, mask=start + i < end)
    else:
        for start in range(block, blocks, BLOCK):
            tl.store(Expert + start + i, E, mask=start + i < blocks)


@group_lines.kernel
def _group_lines(ids: Tensor, first: int, experts: int, block: int) -> tuple[Tensor, Tensor]:
    n = len(ids)
    blocks = most_blocks(n, experts, block)
    lines = torch.empty(blocks * block, dtype=torch.int32, device=ids.device)
    expert = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    _group_lines_kernel[(experts + 1,)](
        ids, lines, expert, n, first, blocks,
        E=experts, BINS=triton.next_power_of_2(experts + 1), BLOCK_M=block,
        BLOCK=min(2048, max(128, triton.next_power_of_2(n))),
        num_warps=4,
    )  # fmt: skip
    return lines, expert
