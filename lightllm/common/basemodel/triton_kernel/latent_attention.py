"""Decode of multi-head latent attention: all heads of a query over one latent vector per token."""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel.decode_plan import DecodePlan, PlanSize, plan_decode
from lightllm.common.triton_utils.dependent_launch import dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op
from lightllm.common.triton_utils.shared_memory import shared_memory


@op
def latent_attention(
    turned: Tensor,
    absorbed: Tensor,
    latents: Tensor,
    req_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    scale: float,
    plan: DecodePlan | None = None,
) -> Tensor:
    """Queries in two parts, turned [B, H, rope] and absorbed [B, H, rank] -> [B, H, rank]: attention over latents
    [slot, rope + rank] of row i's first kv_lens[i] positions. A whole latent is the key of every head, its last `rank`
    features are the value.

    req_table is int32 [rows, length], every kv_lens >= 1. The kernel follows a plan of `latent_plan`, or makes its own.
    """
    q, rope = torch.cat((turned, absorbed), -1), turned.shape[-1]
    out = q.new_empty(absorbed.shape)
    for i, (row, end) in enumerate(zip(rows.tolist(), kv_lens.tolist())):
        keys = latents.index_select(0, req_table[row, :end])[None]
        out[i] = F.scaled_dot_product_attention(q[None, i], keys, keys[..., rope:], scale=scale)[0]
    return out


@triton.jit
def _latent_attention_kernel(
    Turned, Absorbed, Latents, Table, Items, Partial, Lse, Out,
    turned_stride, turned_head, absorbed_stride, absorbed_head, slot_stride, table_stride, scale,
    H: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, item of the plan): online softmax (base 2) over its keys.

    Everything is transposed, keys and features in the rows and heads in the columns: a tensor core takes 64 rows at a
    time, and there may be only 16 heads. Keys beyond the item are read from its last slot (always finite) and masked.
    """
    wait_for_inputs(PDL)
    item = tl.program_id(1)
    items = tl.num_programs(1)
    row = tl.load(Items + item).to(tl.int64)
    low = tl.load(Items + items + item)
    high = tl.load(Items + 2 * items + item)
    count = tl.load(Items + 4 * items + item)
    Table += tl.load(Items + 5 * items + item).to(tl.int64) * table_stride
    if row >= 0:
        head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
        e = tl.arange(0, BLOCK_ROPE)[None, :]
        d = tl.arange(0, BLOCK_RANK)[None, :]
        real = (head < H)[:, None]
        q = Turned + row * turned_stride + head[:, None] * turned_head
        turned = tl.trans(tl.load(q + e, mask=real & (e < ROPE), other=0.0))
        q = Absorbed + row * absorbed_stride + head[:, None] * absorbed_head
        absorbed = tl.trans(tl.load(q + d, mask=real & (d < RANK), other=0.0))
        peak = tl.full([BLOCK_H], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_RANK, BLOCK_H], tl.float32)
        for start in range(low, high, BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            at = Latents + tl.load(Table + tl.minimum(j, high - 1)).to(tl.int64)[:, None] * slot_stride
            if RANK == BLOCK_RANK:
                latent = tl.load(at + ROPE + d)
            else:
                latent = tl.load(at + ROPE + d, mask=d < RANK, other=0.0)
            if ROPE == BLOCK_ROPE:
                rope = tl.load(at + e)
            else:
                rope = tl.load(at + e, mask=e < ROPE, other=0.0)
            score = tl.dot(latent, absorbed, input_precision="ieee")
            score = tl.dot(rope, turned, score, input_precision="ieee")
            score = tl.where(j[:, None] < high, score, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(score, 0) * scale)
            p = tl.exp2(score * scale - new_peak[None, :])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(p, 0)
            acc = tl.dot(tl.trans(latent), p.to(latent.dtype), acc * shrink[None, :], input_precision="ieee")
            peak = new_peak

        answer = tl.trans(acc / total[None, :])
        mask = real & (d < RANK)
        if count == 1:
            tl.store(Out + (row * H + head[:, None]) * RANK + d, answer.to(Out.dtype.element_ty), mask=mask)
        else:
            part = item * H + head
            tl.store(Partial + part[:, None] * RANK + d, answer, mask=mask)
            tl.store(Lse + part, peak + tl.log2(total), mask=head < H)


@triton.jit
def _join_kernel(
    Partial, Lse, Items, Out, items,
    H: tl.constexpr, RANK: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_I: tl.constexpr, PARTS: tl.constexpr, BLOCK_RANK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, HEADS heads): joins the answers of the row's items where it has several, PARTS at a time."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK_I)
    mine = tl.load(Items + i, mask=i < items, other=-1) == row
    count = tl.sum(mine.to(tl.int32), 0)
    if count > 1:
        first = tl.min(tl.where(mine, i, items), 0)
        d = tl.arange(0, BLOCK_RANK)
        for head in range(tl.program_id(1) * HEADS, (tl.program_id(1) + 1) * HEADS):
            peak, total = -1.0e30, 0.0
            acc = tl.zeros([BLOCK_RANK], tl.float32)
            for start in range(0, count, PARTS):
                j = start + tl.arange(0, PARTS)
                part = (first + j) * H + head
                lse = tl.load(Lse + part, mask=j < count, other=-1.0e30)
                mask = (j < count)[:, None] & (d < RANK)[None, :]
                answer = tl.load(Partial + part[:, None] * RANK + d[None, :], mask=mask, other=0.0)
                new_peak = tl.maximum(peak, tl.max(lse, 0))
                weight = tl.exp2(lse - new_peak)
                shrink = tl.exp2(peak - new_peak)
                total = total * shrink + tl.sum(weight, 0)
                acc = acc * shrink + tl.sum(answer * weight[:, None], 0)
                peak = new_peak
            to = Out + (row.to(tl.int64) * H + head) * RANK + d
            tl.store(to, (acc / total).to(Out.dtype.element_ty), mask=d < RANK)


def latent_config(absorbed: Tensor) -> dict[str, int]:
    """Tile and launch sizes: in 16 bits the best of benchmarks/kernels/tune_families.py on an H200, where shared memory
    allows; else such that keep registers in bounds."""
    tile = 64 * absorbed.element_size() * triton.next_power_of_2(absorbed.shape[2])
    roomy = shared_memory(absorbed.device) >= 3 * tile
    return {"BLOCK_H": 16, "BLOCK_N": 64 if roomy else 16, "num_warps": 4, "num_stages": 1 if torch.version.hip else 2}


PROGRAMS = 128  # that fill a GPU: one has a multiprocessor's shared memory for itself
SPARE_PROGRAMS = 64  # by which long rows are cut where rows alone fill it
MANY_ROWS = 128  # that fill a GPU while one program joins all heads


def latent_plan(absorbed: Tensor, rows: Tensor, kv_lens: Tensor) -> DecodePlan:
    """A plan for calls of `latent_attention` with these shapes, rows and kv_lens."""
    config = latent_config(absorbed)
    blocks = triton.cdiv(absorbed.shape[1], config["BLOCK_H"])
    size = PlanSize(PROGRAMS // blocks, SPARE_PROGRAMS // blocks)
    return plan_decode(kv_lens, rows, AttentionSpec(1.0), blocks, max(64, config["BLOCK_N"]), size)


@latent_attention.kernel
def _latent_attention(
    turned: Tensor,
    absorbed: Tensor,
    latents: Tensor,
    req_table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    scale: float,
    plan: DecodePlan | None = None,
    config: dict[str, int] | None = None,
) -> Tensor:
    batch, heads, rank = absorbed.shape
    out = torch.empty(batch, heads, rank, dtype=absorbed.dtype, device=absorbed.device)
    if batch == 0:
        return out
    plan = plan or latent_plan(absorbed, rows, kv_lens)
    config = config or latent_config(absorbed)
    items, block_rank = plan.items.shape[1], max(16, triton.next_power_of_2(rank))
    partial = torch.empty(items, heads, rank, dtype=torch.float32, device=absorbed.device)
    lse = torch.empty(items, heads, dtype=torch.float32, device=absorbed.device)
    _latent_attention_kernel[(triton.cdiv(heads, config["BLOCK_H"]), items)](
        turned, absorbed, latents, req_table, plan.items, partial, lse, out,
        turned.stride(0), turned.stride(1), absorbed.stride(0), absorbed.stride(1),
        latents.stride(0), req_table.stride(0), scale * math.log2(math.e),
        H=heads, ROPE=turned.shape[2], RANK=rank, BLOCK_ROPE=max(16, triton.next_power_of_2(turned.shape[2])),
        BLOCK_RANK=block_rank,
        **config, **dependent_launch(absorbed),
    )  # fmt: skip
    together = heads if batch > MANY_ROWS else 1
    _join_kernel[(batch, heads // together)](
        partial, lse, plan.items, out, items,
        H=heads, RANK=rank, HEADS=together, BLOCK_I=triton.next_power_of_2(items), PARTS=8, BLOCK_RANK=block_rank,
        num_warps=4, **dependent_launch(absorbed),
    )  # fmt: skip
    return out
