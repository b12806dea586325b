"""Attention of one query per row over the row's KV slots (decode)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel.context_attention import cap_score, oldest_key
from lightllm.common.basemodel.triton_kernel.softmax_attention import alibi_mask, softmax_attention
from lightllm.common.triton_utils.dispatch import op

_MAX_PADDING = 1024  # keys of padding that cost as much on a CPU as one more call of scaled_dot_product_attention


def _alike(lengths: list[int]) -> list[list[int]]:
    """Indices of `lengths`, longest first, in groups that need at most _MAX_PADDING keys of padding each."""
    groups: list[list[int]] = []
    padding = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        padding += lengths[groups[-1][0]] - lengths[i] if groups else 0
        if not groups or padding > _MAX_PADDING:
            groups.append([])
            padding = 0
        groups[-1].append(i)
    return groups


def _attend(
    q: torch.Tensor,
    layer_kv: torch.Tensor,
    req_table: torch.Tensor,
    rows: list[int],
    ends: list[int],
    spans: list[int],
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [B, H, hd] over the keys [ends - spans, ends) of every row, padded with the row's last key."""
    longest, mask = max(spans), None
    if len(rows) == 1:
        slots = req_table[rows[0], ends[0] - longest : ends[0]]
    else:
        span, steps = torch.tensor(spans)[:, None], torch.arange(longest)
        first = torch.tensor([row * req_table.stride(0) + end - n for row, end, n in zip(rows, ends, spans)])
        slots = req_table.view(-1).index_select(0, (torch.minimum(steps, span - 1) + first[:, None]).view(-1))
        if min(spans) < longest:
            mask = (steps < span)[:, None, None]
    kv_heads, head_dim = layer_kv.shape[1], layer_kv.shape[3]
    k, v = layer_kv.index_select(0, slots).view(len(rows), longest, kv_heads, 2, head_dim).transpose(1, 2).unbind(3)
    queries = q.view(len(rows), kv_heads, -1, head_dim)
    if spec.slopes is not None:
        distance = torch.tensor(spans)[:, None] - 1 - torch.arange(longest)
        mask = alibi_mask(mask, distance[:, None, None], spec.slopes.view(kv_heads, -1, 1), q.dtype)
    if spec.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(queries, k, v, mask, scale=spec.scale).reshape(q.shape)
    sinks = None if sinks is None else sinks.view(kv_heads, -1, 1)
    return softmax_attention(queries, k, v, mask, spec.scale, spec.softcap, sinks).reshape(q.shape)


@op
def token_attention(
    q: torch.Tensor,
    layer_kv: torch.Tensor,
    req_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    max_kv: int,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [B, H, hd] -> [B, H, hd]: the query of row i, at position kv_lens[i] - 1, sees keys j < kv_lens[i] (from
    spec.oldest on) at layer_kv[req_table[rows[i], j]].

    layer_kv is [slot, KH, 2, hd], req_table int32 [rows, length] and contiguous, sinks [H], max_kv >= every
    kv_lens >= 1.
    """
    row_of, ends = rows.tolist(), kv_lens.tolist()
    spans = [end - max(0, spec.oldest(end - 1)) for end in ends]
    groups = _alike(spans)
    if len(groups) == 1:
        return _attend(q, layer_kv, req_table, row_of, ends, spans, spec, sinks)
    out = torch.empty(q.shape, dtype=q.dtype)
    for group in groups:
        row, end, span = ([column[i] for i in group] for column in (row_of, ends, spans))
        out[group] = _attend(q[group], layer_kv, req_table, row, end, span, spec, sinks)
    return out


@triton.jit
def _token_attention_kernel(
    Q, KV, Table, Rows, KvLens, Slopes, Sinks, Partial, Lse, Out,
    q_stride, slot_stride, head_stride, table_stride, scale, cap,
    KH: tl.constexpr, GROUP: tl.constexpr, HD: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (KV head and block of its query heads, row, split): online softmax (base 2) over its share of the keys.

    Keys beyond the share are read from its last slot (always finite) and masked. Scores are q·k, so cap and slopes are
    divided by AttentionSpec.scale.
    """
    GROUP_BLOCKS: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    kv_head = tl.program_id(0) // GROUP_BLOCKS
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    g = tl.program_id(0) % GROUP_BLOCKS * BLOCK_G + tl.arange(0, BLOCK_G)
    head = kv_head * GROUP + g
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (g < GROUP)[:, None] & (d < HD)

    end = tl.load(KvLens + row)
    begin = 0
    if WINDOW > 0 or CHUNK > 0:
        begin = tl.maximum(oldest_key(end - 1, WINDOW, CHUNK), 0)
    share = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK_N) * BLOCK_N
    low = begin + split * share
    high = tl.minimum(low + share, end)

    q = tl.load(Q + row * q_stride + head[:, None] * HD + d, mask=mask, other=0.0)
    Table += tl.load(Rows + row).to(tl.int64) * table_stride
    K = KV + kv_head.to(tl.int64) * head_stride
    peak = tl.full([BLOCK_G], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    if SINKS:  # a key that the first split has seen before all others
        sink = tl.load(Sinks + head, mask=g < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
        peak = tl.where(split == 0, sink, peak)
        total = tl.where(split == 0, 1.0, total)
    if ALIBI:
        slope = tl.load(Slopes + head, mask=g < GROUP, other=0.0) * (1.4426950408889634 / scale)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(low, high, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        at = tl.load(Table + tl.minimum(j, high - 1)).to(tl.int64)[:, None] * slot_stride + d
        if HD == BLOCK_D:
            k = tl.load(K + at)
        else:
            k = tl.load(K + at, mask=d < HD, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            score = cap_score(score, cap)
        if ALIBI:
            score -= slope[:, None] * (end - 1 - j[None, :])
        score = tl.where(j[None, :] < high, score, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        if HD == BLOCK_D:
            v = tl.load(K + HD + at)
        else:
            v = tl.load(K + HD + at, mask=d < HD, other=0.0)
        acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak

    total = tl.where(total > 0, total, 1.0)  # an empty share leaves acc 0 and a log-sum-exp that weighs nothing
    if SPLITS == 1:
        to = Out + (row * KH * GROUP + head[:, None]) * HD + d
        tl.store(to, (acc / total[:, None]).to(Out.dtype.element_ty), mask=mask)
    else:
        part = (row * SPLITS + split) * KH * GROUP + head
        tl.store(Partial + part[:, None] * HD + d, acc / total[:, None], mask=mask)
        tl.store(Lse + part, peak + tl.log2(total), mask=g < GROUP)


@triton.jit
def _combine_kernel(
    Partial, Lse, Out,
    H: tl.constexpr, HD: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (row, query head): the splits' answers, weighted by their log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)[None, :]
    part = (row * SPLITS + split) * H + head
    lse = tl.load(Lse + part, mask=split < SPLITS, other=-float("inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    mask = (split < SPLITS)[:, None] & (d < HD)
    answers = tl.load(Partial + part[:, None] * HD + d, mask=mask, other=0.0)
    answer = tl.sum(answers * weight[:, None], 0) / tl.sum(weight, 0)
    d = tl.arange(0, BLOCK_D)
    tl.store(Out + (row * H + head) * HD + d, answer.to(Out.dtype.element_ty), mask=d < HD)


def token_config(batch: int, kv_heads: int, group: int, head_dim: int, itemsize: int, max_kv: int) -> dict[str, int]:
    """Tile, split and launch sizes: the best of kernel_sweep's list for this kernel on an H200 in bf16 (about
    128 programs at batch 1, 512 from batch 16 or 32k keys on); the rest keep registers and shared memory in bounds."""
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_g = min(64 if itemsize == 2 and block_d <= 128 else 16, max(16, triton.next_power_of_2(group)))
    programs = batch * kv_heads * triton.cdiv(group, block_g)
    block_n = 32 if itemsize * block_d > 256 else 64
    if itemsize == 2 and (programs >= 1024 or (max_kv > 1024 if block_d <= 64 else max_kv > 4096 and programs < 64)):
        block_n = min(128, 16384 // block_d)
    wanted = triton.cdiv(min(512, max(128, 32 * batch, max_kv // 64)), programs)
    stages = 3 if block_d <= 64 or block_n == 128 else 2
    return {
        "SPLITS": max(1, min(wanted, 64, triton.cdiv(max_kv, block_n))),
        "BLOCK_G": block_g,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "num_warps": 4,
        "num_stages": 1 if torch.version.hip else stages,
    }


@token_attention.kernel
def _token_attention(
    q: torch.Tensor,
    layer_kv: torch.Tensor,
    req_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    max_kv: int,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    batch, heads, head_dim = q.shape
    if batch == 0:
        return out
    kv_heads = layer_kv.shape[1]
    reach = max_kv if spec.reach is None else min(max_kv, spec.reach)
    config = token_config(batch, kv_heads, heads // kv_heads, head_dim, q.element_size(), reach)
    splits = config["SPLITS"]
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(batch, splits, heads, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, splits, heads, dtype=torch.float32, device=q.device)
    _token_attention_kernel[(kv_heads * triton.cdiv(heads // kv_heads, config["BLOCK_G"]), batch, splits)](
        *(q, layer_kv, req_table, rows, kv_lens),
        *(q if spec.slopes is None else spec.slopes, q if sinks is None else sinks, partial, lse, out),
        *(q.stride(0), layer_kv.stride(0), layer_kv.stride(1), req_table.stride(0)),
        *(spec.scale * math.log2(math.e), (spec.softcap or 0.0) / spec.scale),
        KH=kv_heads,
        GROUP=heads // kv_heads,
        HD=head_dim,
        WINDOW=spec.window or 0,
        CHUNK=spec.chunk or 0,
        SOFTCAP=spec.softcap is not None,
        ALIBI=spec.slopes is not None,
        SINKS=sinks is not None,
        **config,
    )
    if splits > 1:
        _combine_kernel[(batch, heads)](
            *(partial, lse, out),
            H=heads,
            HD=head_dim,
            SPLITS=splits,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_D=config["BLOCK_D"],
            num_warps=4,
        )
    return out
