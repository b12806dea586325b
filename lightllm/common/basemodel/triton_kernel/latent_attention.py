"""Decode of multi-head latent attention: all heads of a query over one latent vector per token."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel.decode_plan import DecodePlan, plan_decode
from lightllm.common.triton_utils.dependent_launch import dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op
from lightllm.common.triton_utils.shared_memory import shared_memory


@dataclass(frozen=True)
class LatentPlan(DecodePlan):
    """A row is the first of up to `tokens` tokens that follow each other in a row of the request table."""

    tokens: int


@op
def latent_attention(
    turned: torch.Tensor,
    absorbed: torch.Tensor,
    latents: torch.Tensor,
    req_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    plan: LatentPlan | None = None,
) -> torch.Tensor:
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
def run_of(Rows, KvLens, row, token, tokens, TOKENS: tl.constexpr):
    """(keys that each token sees, whether it belongs to the run that begins with token `row`)."""
    behind = (token - row).to(tl.int32)
    here = (token < tokens) & (row % TOKENS + behind < TOKENS)
    limit = tl.load(KvLens + token, mask=here, other=0)
    same = (tl.load(Rows + token, mask=here, other=-1) == tl.load(Rows + row)) & (
        limit == tl.load(KvLens + row) + behind
    )
    return limit, here & same


@triton.jit
def _latent_attention_kernel(
    Turned, Absorbed, Latents, Table, Rows, KvLens, Items, Partial, Lse, Out, tokens,
    turned_stride, turned_head, absorbed_stride, absorbed_head, slot_stride, table_stride, scale,
    H: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, item of the plan): online softmax (base 2) over its keys, of the heads of a run of up to
    TOKENS tokens, the plan's row being its first.

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
        column = tl.arange(0, TOKENS * BLOCK_H)
        head = tl.program_id(0) * BLOCK_H + column % BLOCK_H
        token = row + column // BLOCK_H
        limit, here = run_of(Rows, KvLens, row, token, tokens, TOKENS)
        e = tl.arange(0, BLOCK_ROPE)[None, :]
        d = tl.arange(0, BLOCK_RANK)[None, :]
        real = (here & (head < H))[:, None]
        q = Turned + token[:, None] * turned_stride + head[:, None] * turned_head
        turned = tl.trans(tl.load(q + e, mask=real & (e < ROPE), other=0.0))
        q = Absorbed + token[:, None] * absorbed_stride + head[:, None] * absorbed_head
        absorbed = tl.trans(tl.load(q + d, mask=real & (d < RANK), other=0.0))
        peak = tl.full([TOKENS * BLOCK_H], -1.0e30, tl.float32)
        total = tl.zeros([TOKENS * BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_RANK, TOKENS * BLOCK_H], tl.float32)
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
            score = tl.where(j[:, None] < tl.minimum(limit, high)[None, :], score, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(score, 0) * scale)
            p = tl.exp2(score * scale - new_peak[None, :])
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + tl.sum(p, 0)
            acc = tl.dot(tl.trans(latent), p.to(latent.dtype), acc * shrink[None, :], input_precision="ieee")
            peak = new_peak

        if TOKENS > 1:  # all of an item's keys may lie behind a token
            total = tl.maximum(total, 1.0e-30)
        answer = tl.trans(acc / total[None, :])
        mask = real & (d < RANK)
        if count == 1:
            tl.store(Out + (token * H + head)[:, None] * RANK + d, answer.to(Out.dtype.element_ty), mask=mask)
        else:
            part = (item * TOKENS + column // BLOCK_H) * H + head
            tl.store(Partial + part[:, None] * RANK + d, answer, mask=mask)
            tl.store(Lse + part, peak + tl.log2(total), mask=here & (head < H))


@triton.jit
def _join_kernel(
    Partial, Lse, Rows, KvLens, Items, Out, tokens, items,
    H: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_I: tl.constexpr, PARTS: tl.constexpr, BLOCK_RANK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, COLUMNS heads of its run's tokens): joins the answers of the row's items where there are several,
    PARTS at a time."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK_I)
    mine = tl.load(Items + i, mask=i < items, other=-1) == row
    count = tl.sum(mine.to(tl.int32), 0)
    if count > 1:
        first = tl.min(tl.where(mine, i, items), 0)
        d = tl.arange(0, BLOCK_RANK)
        for column in range(tl.program_id(1) * COLUMNS, (tl.program_id(1) + 1) * COLUMNS):
            token = row + column // H
            _, here = run_of(Rows, KvLens, row, token, tokens, TOKENS)
            peak, total = -1.0e30, 0.0
            acc = tl.zeros([BLOCK_RANK], tl.float32)
            for start in range(0, count, PARTS):
                j = start + tl.arange(0, PARTS)
                part = (first + j) * (TOKENS * H) + column
                lse = tl.load(Lse + part, mask=j < count, other=-1.0e30)
                mask = (j < count)[:, None] & (d < RANK)[None, :]
                answer = tl.load(Partial + part[:, None] * RANK + d[None, :], mask=mask, other=0.0)
                new_peak = tl.maximum(peak, tl.max(lse, 0))
                weight = tl.exp2(lse - new_peak)
                shrink = tl.exp2(peak - new_peak)
                total = total * shrink + tl.sum(weight, 0)
                acc = acc * shrink + tl.sum(answer * weight[:, None], 0)
                peak = new_peak
            to = Out + (token.to(tl.int64) * H + column % H) * RANK + d
            tl.store(to, (acc / total).to(Out.dtype.element_ty), mask=here & (d < RANK))


def _roomy(absorbed: torch.Tensor) -> bool:
    """Whether shared memory holds long tiles."""
    tile = 64 * absorbed.element_size() * triton.next_power_of_2(absorbed.shape[2])
    return shared_memory(absorbed.device) >= 3 * tile


def latent_config(absorbed: torch.Tensor, tokens: int = 1) -> dict[str, int]:
    """Tile and launch sizes: in 16 bits the best of benchmarks/kernels/tune_families.py on an H200, where shared memory
    allows; else such that keep registers in bounds."""
    return {
        "BLOCK_H": 16,
        "BLOCK_N": 64 if _roomy(absorbed) else 16,
        "num_warps": 4 if tokens == 1 else 8,
        "num_stages": 1 if torch.version.hip else 2,
    }


SHARE = 4  # of the programs that fill a GPU: one has a multiprocessor's shared memory for itself
MANY_ROWS = 128  # that fill a GPU while one program joins all heads


def latent_plan(absorbed: torch.Tensor, rows: torch.Tensor, kv_lens: torch.Tensor, tokens: int = 1) -> LatentPlan:
    """A plan for calls of `latent_attention` with these shapes, rows and kv_lens. Up to `tokens`, a power of two, that
    follow each other read their latents together where shared memory allows."""
    tokens = tokens if _roomy(absorbed) else 1
    ends = ends_of_runs(rows, kv_lens, tokens) if tokens > 1 else kv_lens
    config = latent_config(absorbed, tokens)
    blocks = triton.cdiv(absorbed.shape[1], config["BLOCK_H"])
    plan = plan_decode(ends, rows, AttentionSpec(1.0), SHARE * blocks, max(64, config["BLOCK_N"]))
    return LatentPlan(plan.items, plan.arrived, tokens)


def ends_of_runs(rows: torch.Tensor, kv_lens: torch.Tensor, most: int) -> torch.Tensor:
    """For the first of up to `most` tokens that follow each other the last one's kv_len, for others 0. Runs do not
    cross multiples of `most`."""
    index = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
    follows = (rows == rows.roll(1)) & (kv_lens == kv_lens.roll(1) + 1) & (index % most != 0)
    last, next_follows = kv_lens, follows.roll(-1)
    for _ in range(most - 1):
        last = torch.where(next_follows, last.roll(-1), kv_lens)
    return last.masked_fill(follows, 0)


@latent_attention.kernel
def _latent_attention(
    turned: torch.Tensor,
    absorbed: torch.Tensor,
    latents: torch.Tensor,
    req_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    plan: LatentPlan | None = None,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    batch, heads, rank = absorbed.shape
    out = torch.empty(batch, heads, rank, dtype=absorbed.dtype, device=absorbed.device)
    if batch == 0:
        return out
    plan = plan or latent_plan(absorbed, rows, kv_lens)
    config, tokens = config or latent_config(absorbed, plan.tokens), plan.tokens
    items, block_rank = plan.items.shape[1], max(16, triton.next_power_of_2(rank))
    partial = torch.empty(items, tokens, heads, rank, dtype=torch.float32, device=absorbed.device)
    lse = torch.empty(items, tokens, heads, dtype=torch.float32, device=absorbed.device)
    _latent_attention_kernel[(triton.cdiv(heads, config["BLOCK_H"]), items)](
        *(turned, absorbed, latents, req_table, rows, kv_lens, plan.items, partial, lse, out, batch),
        *(turned.stride(0), turned.stride(1), absorbed.stride(0), absorbed.stride(1)),
        *(latents.stride(0), req_table.stride(0), scale * math.log2(math.e)),
        H=heads,
        ROPE=turned.shape[2],
        RANK=rank,
        TOKENS=tokens,
        BLOCK_ROPE=max(16, triton.next_power_of_2(turned.shape[2])),
        BLOCK_RANK=block_rank,
        **config,
        **dependent_launch(absorbed),
    )
    columns = tokens * heads
    together = columns if batch > MANY_ROWS else 1
    _join_kernel[(batch, columns // together)](
        *(partial, lse, rows, kv_lens, plan.items, out, batch, items),
        H=heads,
        RANK=rank,
        TOKENS=tokens,
        COLUMNS=together,
        BLOCK_I=triton.next_power_of_2(items),
        PARTS=8,
        BLOCK_RANK=block_rank,
        num_warps=4,
        **dependent_launch(absorbed),
    )
    return out
