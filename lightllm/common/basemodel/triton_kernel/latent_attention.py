"""Decode of multi-head latent attention: all heads of a query over one latent vector per token."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lightllm.common.basemodel.triton_kernel.combine_splits import combine_splits
from lightllm.common.triton_utils.dispatch import op


@op
def latent_attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    req_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    max_kv: int,
    rope_dim: int,
    scale: float,
) -> torch.Tensor:
    """q [B, H, rope_dim + rank] -> [B, H, rank]: attention over latents [slot, rope_dim + rank] of row i's first
    kv_lens[i] positions. A whole latent is the key of every head, its last `rank` features are the value.

    req_table is int32 [rows, length], max_kv >= every kv_lens >= 1.
    """
    out = q.new_empty(*q.shape[:2], q.shape[2] - rope_dim)
    for i, (row, end) in enumerate(zip(rows.tolist(), kv_lens.tolist())):
        keys = latents.index_select(0, req_table[row, :end])[None]
        out[i] = F.scaled_dot_product_attention(q[None, i], keys, keys[..., rope_dim:], scale=scale)[0]
    return out


@triton.jit
def _latent_attention_kernel(
    Q, Latents, Table, Rows, KvLens, Partial, Lse, Out, q_stride, slot_stride, table_stride, scale,
    H: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, row, split): online softmax (base 2) over its share of the keys.

    Keys beyond the share are read from its last slot (always finite) and masked.
    """
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    e = tl.arange(0, BLOCK_ROPE)[None, :]
    d = tl.arange(0, BLOCK_RANK)[None, :]
    real = (head < H)[:, None]

    end = tl.load(KvLens + row)
    share = tl.cdiv(tl.cdiv(end, SPLITS), BLOCK_N) * BLOCK_N
    low = split * share
    high = tl.minimum(low + share, end)

    q = Q + row * q_stride + head[:, None] * (ROPE + RANK)
    q_rope = tl.load(q + e, mask=real & (e < ROPE), other=0.0)
    q_latent = tl.load(q + ROPE + d, mask=real & (d < RANK), other=0.0)
    Table += tl.load(Rows + row).to(tl.int64) * table_stride
    peak = tl.full([BLOCK_H], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_RANK], tl.float32)
    for start in range(low, high, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        at = Latents + tl.load(Table + tl.minimum(j, high - 1)).to(tl.int64)[:, None] * slot_stride
        rope = tl.load(at + e, mask=e < ROPE, other=0.0)
        latent = tl.load(at + ROPE + d, mask=d < RANK, other=0.0)
        score = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
        score = tl.dot(q_latent, tl.trans(latent), score, input_precision="ieee")
        score = tl.where(j[None, :] < high, score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak

    total = tl.where(total > 0, total, 1.0)  # an empty share leaves acc 0 and a log-sum-exp that weighs nothing
    mask = real & (d < RANK)
    if SPLITS == 1:
        to = Out + (row * H + head[:, None]) * RANK + d
        tl.store(to, (acc / total[:, None]).to(Out.dtype.element_ty), mask=mask)
    else:
        part = (row * SPLITS + split) * H + head
        tl.store(Partial + part[:, None] * RANK + d, acc / total[:, None], mask=mask)
        tl.store(Lse + part, peak + tl.log2(total), mask=head < H)


def latent_config(batch: int, heads: int, rank: int, itemsize: int, max_kv: int) -> dict[str, int]:
    """Tile, split and launch sizes that keep registers and shared memory in bounds; not tuned yet."""
    block_rank = max(16, triton.next_power_of_2(rank))
    block_n = max(16, min(64, 32768 // (itemsize * block_rank)))
    wanted = triton.cdiv(256, batch * triton.cdiv(heads, 16))
    return {
        "SPLITS": max(1, min(wanted, 32, triton.cdiv(max_kv, block_n))),
        "BLOCK_H": 16,
        "BLOCK_N": block_n,
        "BLOCK_RANK": block_rank,
        "num_warps": 8 if block_rank >= 256 else 4,
        "num_stages": 1 if torch.version.hip else 2,
    }


@latent_attention.kernel
def _latent_attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    req_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    max_kv: int,
    rope_dim: int,
    scale: float,
) -> torch.Tensor:
    batch, heads, width = q.shape
    rank = width - rope_dim
    out = torch.empty(batch, heads, rank, dtype=q.dtype, device=q.device)
    if batch == 0:
        return out
    config = latent_config(batch, heads, rank, q.element_size(), max_kv)
    splits = config["SPLITS"]
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(batch, splits, heads, rank, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, splits, heads, dtype=torch.float32, device=q.device)
    _latent_attention_kernel[(triton.cdiv(heads, config["BLOCK_H"]), batch, splits)](
        *(q, latents, req_table, rows, kv_lens, partial, lse, out),
        *(q.stride(0), latents.stride(0), req_table.stride(0), scale * math.log2(math.e)),
        H=heads,
        ROPE=rope_dim,
        RANK=rank,
        BLOCK_ROPE=max(16, triton.next_power_of_2(rope_dim)),
        **config,
    )
    if splits > 1:
        combine_splits(partial, lse, out)
    return out
