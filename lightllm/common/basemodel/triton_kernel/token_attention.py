"""Attention of one query per row over the row's KV slots (decode)."""

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from lightllm.common.basemodel.attention.backend import AttentionSpec, NewKeys
from lightllm.common.basemodel.triton_kernel.context_attention import cap_score
from lightllm.common.basemodel.triton_kernel.decode_plan import DecodePlan, PlanSize, plan_decode
from lightllm.common.basemodel.triton_kernel.quantized_kv import (
    LayerKV,
    decode,
    decode_scales,
    has_ptx,
    kernel_pools,
    kernel_views,
    read_slots,
)
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_copy_kv
from lightllm.common.basemodel.triton_kernel.softmax_attention import alibi_mask, softmax_attention
from lightllm.common.triton_utils.dependent_launch import (
    EARLY_LINES,
    dependent_launch,
    let_next_begin,
    wait_for_neighbour,
    wait_for_writes,
)
from lightllm.common.triton_utils.dispatch import op

TOGETHER = tl.constexpr(8)  # items that are joined at once
_MAX_PADDING = 1024  # keys of padding that cost as much on a CPU as one more call of scaled_dot_product_attention


def _alike(indices: list[int], lengths: list[int]) -> list[list[int]]:
    """The indices of `lengths`, longest first, in groups that need at most _MAX_PADDING keys of padding each."""
    groups: list[list[int]] = []
    padding = 0
    for i in sorted(indices, key=lengths.__getitem__, reverse=True):
        padding += lengths[groups[-1][0]] - lengths[i] if groups else 0
        if not groups or padding > _MAX_PADDING:
            groups.append([])
            padding = 0
        groups[-1].append(i)
    return groups


def _attend(
    q: torch.Tensor,
    layer_kv: LayerKV,
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
    k, v = (
        read_slots(layer_kv, slots, q.dtype).view(len(rows), longest, kv_heads, 2, head_dim).transpose(1, 2).unbind(3)
    )
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
    layer_kv: LayerKV,
    req_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
    out: torch.Tensor | None = None,
    beside: bool = False,
    new: NewKeys | None = None,
) -> torch.Tensor:
    """q [B, H, hd] -> out [B, H, hd]: the query of row i, at position kv_lens[i] - 1, sees keys j < kv_lens[i] (from
    spec.oldest on) at layer_kv[req_table[rows[i], j]]. Rows with kv_lens 0 leave `out` as it is.

    layer_kv is [slot, KH, 2, hd] or a QuantizedKV, req_table int32 [rows, length] and contiguous, sinks [H]. The
    kernel follows a plan of `token_plan`, or makes its own; a plan may serve many calls, one after the other. beside:
    there is a plan, and the launch before was that of `context_attention` for the same step: both may run at once.
    new: K and V of position kv_lens - 1, which go to their slots, those of nobody else, in a cache of 16 or 32 bits;
    K and q are turned.
    """
    if new:
        assert isinstance(layer_kv, torch.Tensor)
        slots = req_table[rows.long(), kv_lens.long() - 1]
        rotary_copy_kv.twin(q, new.k, new.v, new.cos, new.sin, layer_kv, slots)
    row_of, ends = rows.tolist(), kv_lens.tolist()
    spans = [end - max(0, spec.oldest(end - 1)) for end in ends]
    groups = _alike([i for i, span in enumerate(spans) if span], spans)
    if len(groups) == 1 and all(spans):
        answer = _attend(q, layer_kv, req_table, row_of, ends, spans, spec, sinks)
        return answer if out is None else out.copy_(answer)
    out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
    for group in groups:
        row, end, span = ([column[i] for i in group] for column in (row_of, ends, spans))
        out[group] = _attend(q[group], layer_kv, req_table, row, end, span, spec, sinks)
    return out


@triton.jit
def _with_partners(X, d, mask, HALF: tl.constexpr):
    """Features d of the heads at X, and those HALF away with which they are turned."""
    ALIKE: tl.constexpr = HALF & -HALF  # runs of so many have partners side by side
    partner = tl.max_contiguous(tl.multiple_of((d + HALF) % (2 * HALF), [1, ALIKE]), [1, ALIKE])
    x = tl.load(X + d, mask=mask, other=0.0)
    return x, tl.load(X + partner, mask=mask & (d < 2 * HALF), other=0.0)


@triton.jit
def _turned(x, partners, cos, sin):
    return (x.to(tl.float32) * cos + partners.to(tl.float32) * sin).to(x.dtype)


@triton.jit
def _weigh(
    score, j, high, end, slope, scale, cap, peak, total, totals, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr
):  # fmt: skip
    """Online softmax of a tile of keys j, those from `high` on masked -> (their weights, by how much what came before
    shrinks, peak, total, totals)."""
    if SOFTCAP:
        score = cap_score(score, cap)
    if ALIBI:
        score -= slope[:, None] * (end - 1 - j[None, :])
    score = tl.where(j[None, :] < high, score, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1) * scale)
    p = tl.exp2(score * scale - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    return p, shrink[:, None], new_peak, total * shrink, totals * shrink[:, None] + p


@triton.jit(do_not_specialize=["KvLens"])
def _token_attention_kernel(
    Q, KV, Scales, Table, KvLens, Items, Arrived, Slopes, Sinks, NewK, NewV, Cos, Sin, Partial, Lse, Out,
    q_stride, k_stride, v_stride, slot_stride, head_stride, table_stride, scale, cap,
    KH: tl.constexpr, GROUP: tl.constexpr, HD: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr,
    HALF: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (KV head and block of its query heads, item of the plan): online softmax (base 2) over its keys. The last
    to finish of a row that has several items joins their answers.

    Keys beyond the item are read from its last slot (always finite) and masked. Scores are q·k, so cap and slopes are
    divided by AttentionSpec.scale. The sum over keys is left to the end, and slots are read a tile ahead, the first
    while the kernel before still runs: the plan, which lets nobody begin early, and the table were done before that.

    HALF: half of the features that are turned, where a row's last key is new. Its item turns it, attends to it first
    and writes it to the cache, from which only older ones are read: AHEAD, those of the first tile are on their way
    while the kernel before still runs.

    In 8 bits even and odd features go apart: two of them are one int16, and such pairs take the same way to the tensor
    cores as 16-bit numbers. V's scales are multiplied into p, kept away from float16's smallest numbers by 256. There
    registers are scarce, and the pipeline reads slots ahead through shared memory.
    """
    GROUP_BLOCKS: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    let_next_begin(PDL)
    item = tl.program_id(1)
    items = tl.num_programs(1)
    row = tl.load(Items + item).to(tl.int64)
    low = tl.load(Items + items + item)
    high = tl.load(Items + 2 * items + item)
    first = tl.load(Items + 3 * items + item)
    count = tl.load(Items + 4 * items + item)
    Table += tl.load(Items + 5 * items + item).to(tl.int64) * table_stride
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)[None, :]
    K = KV + (tl.program_id(0) // GROUP_BLOCKS).to(tl.int64) * head_stride
    if HALF:
        has_new = item == first + count - 1
        new_slot = tl.load(Table + high - 1, mask=row >= 0, other=0).to(tl.int64)
        high -= has_new.to(tl.int32)
        turned = (row >= 0) & (d < 2 * HALF)
        cos = tl.load(Cos + row * HALF + d % HALF, mask=turned, other=1.0)
        sin = tl.load(Sin + row * HALF + d % HALF, mask=turned, other=0.0) * tl.where(d < HALF, -1.0, 1.0)
    following = tl.load(Table + tl.minimum(low + n, high - 1), mask=(row >= 0) & (low < high), other=0)
    if AHEAD:
        at = following.to(tl.int64)[:, None] * slot_stride + d
        old = (row >= 0) & (low < high) & (d < HD)
        first_k = tl.load(K + at, mask=old, other=0.0)
        first_v = tl.load(K + HD + at, mask=old, other=0.0)
    wait_for_writes(PDL)
    if row >= 0:
        kv_head = tl.program_id(0) // GROUP_BLOCKS
        g = tl.program_id(0) % GROUP_BLOCKS * BLOCK_G + tl.arange(0, BLOCK_G)
        head = kv_head * GROUP + g
        mask = (g < GROUP)[:, None] & (d < HD)

        peak = tl.full([BLOCK_G], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        if SINKS:  # a key that the first item has seen before all others
            sink = tl.load(Sinks + head, mask=g < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
            peak = tl.where(item == first, sink, peak)
            total = tl.where(item == first, 1.0, total)
        end, slope = high, total
        if ALIBI:
            end = tl.load(KvLens + row)
            slope = tl.load(Slopes + head, mask=g < GROUP, other=0.0) * (1.4426950408889634 / scale)
        queries = Q + row * q_stride + head[:, None] * HD
        if FORMAT == "plain":
            acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        else:
            pair = tl.arange(0, BLOCK_D // 2)
            q = tl.load(queries + d, mask=mask, other=0.0)
            q_even, q_odd = tl.split(q.to(tl.float16).reshape(BLOCK_G, BLOCK_D // 2, 2))
            acc_even = tl.zeros([BLOCK_G, BLOCK_D // 2], tl.float32)
            acc_odd = tl.zeros([BLOCK_G, BLOCK_D // 2], tl.float32)
        if HALF:
            q, q_partners = _with_partners(queries, d, mask, HALF)
            here = has_new & (d < HD)  # all loads before the first wait for one
            new_k, k_partners = _with_partners(NewK + row * k_stride + kv_head * HD, d, here, HALF)
            new_v = tl.load(NewV + row * v_stride + kv_head * HD + d, mask=here, other=0.0)
            q = _turned(q, q_partners, cos, sin)
            if has_new:
                new_k = _turned(new_k, k_partners, cos, sin)
                tl.store(K + new_slot * slot_stride + d, new_k, mask=d < HD)
                tl.store(K + new_slot * slot_stride + HD + d, new_v, mask=d < HD)
                score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1)
                if SOFTCAP:
                    score = cap_score(score, cap)
                new_peak = tl.maximum(peak, score * scale)
                p = tl.exp2(score * scale - new_peak)
                total = total * tl.exp2(peak - new_peak) + p
                acc = p[:, None] * new_v.to(tl.float32)
                peak = new_peak
        elif FORMAT == "plain":
            q = tl.load(queries + d, mask=mask, other=0.0)
        totals = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
        if AHEAD:
            if low < high:
                j = low + n
                following = tl.load(Table + tl.minimum(j + BLOCK_N, high - 1))
                score = tl.dot(q, tl.trans(first_k), input_precision="ieee")
                p, shrink, peak, total, totals = _weigh(
                    score, j, high, end, slope, scale, cap, peak, total, totals, SOFTCAP, ALIBI
                )
                acc = tl.dot(p.to(q.dtype), first_v, acc * shrink, input_precision="ieee")
            low += BLOCK_N
        for start in range(low, high, BLOCK_N):
            j = start + n
            if FORMAT == "plain":
                slot = following.to(tl.int64)
                following = tl.load(Table + tl.minimum(j + BLOCK_N, high - 1))
                at = slot[:, None] * slot_stride + d
                if HD == BLOCK_D:
                    k = tl.load(K + at)
                else:
                    k = tl.load(K + at, mask=d < HD, other=0.0)
                score = tl.dot(q, tl.trans(k), input_precision="ieee")
            else:
                slot = tl.load(Table + tl.minimum(j, high - 1)).to(tl.int64)
                pairs = tl.load(
                    K + slot[None, :] * slot_stride + pair[:, None], mask=(pair < HD // 2)[:, None], other=0
                )
                k_even, k_odd = decode(pairs, FORMAT, PTX)
                k_scale, v_scale = decode_scales(tl.load(Scales + slot * KH + kv_head))
                score = tl.dot(q_odd, k_odd, tl.dot(q_even, k_even)) * k_scale[None, :]
            p, shrink, peak, total, totals = _weigh(
                score, j, high, end, slope, scale, cap, peak, total, totals, SOFTCAP, ALIBI
            )
            if FORMAT == "plain":
                if HD == BLOCK_D:
                    v = tl.load(K + HD + at)
                else:
                    v = tl.load(K + HD + at, mask=d < HD, other=0.0)
                acc = tl.dot(p.to(q.dtype), v, acc * shrink, input_precision="ieee")
            else:
                pairs = tl.load(
                    K + HD // 2 + slot[:, None] * slot_stride + pair[None, :], mask=(pair < HD // 2)[None, :], other=0
                )
                v_even, v_odd = decode(pairs, FORMAT, PTX)
                weight = (p * (v_scale * 256)[None, :]).to(tl.float16)
                acc_even = tl.dot(weight, v_even, acc_even * shrink)
                acc_odd = tl.dot(weight, v_odd, acc_odd * shrink)

        total += tl.sum(totals, 1)
        if FORMAT != "plain":
            acc = tl.interleave(acc_even, acc_odd) * 0.00390625
        if count == 1:
            to = Out + (row * KH * GROUP + head[:, None]) * HD + d
            tl.store(to, (acc / total[:, None]).to(Out.dtype.element_ty), mask=mask)
        else:
            part = item * KH * GROUP + head
            tl.store(Partial + part[:, None] * HD + d, acc / total[:, None], mask=mask)
            tl.store(Lse + part, peak + tl.log2(total), mask=g < GROUP)
            tl.debug_barrier()  # all of the program's stores come before its arrival
            arrival = Arrived + row * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(arrival, 1, sem="acq_rel") == count - 1:
                block = tl.program_id(0) % GROUP_BLOCKS
                join_items(
                    Partial, Lse, Out + row * KH * GROUP * HD, first, count, kv_head * GROUP, block,
                    KH * GROUP, GROUP, HD, BLOCK_G, BLOCK_H, BLOCK_D,
                )  # fmt: skip
                tl.store(arrival, 0)  # for the next layer
    if item == items - 1:
        wait_for_neighbour(PDL)


@triton.jit
def join_items(
    Partial, Lse, Out, first, count, head, block,
    H: tl.constexpr, GROUP: tl.constexpr, HD: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the answers of `count` items, weighted by their log-sum-exp, for one block of a KV head's query heads.
    Other programs have written them: read past the first cache, and TOGETHER at once, for the way is long."""
    g = block * BLOCK_G + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)[None, :]
    peak = tl.full([BLOCK_H], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for start in range(first, first + count, TOGETHER):
        for i in tl.static_range(TOGETHER):
            item = start + i
            here = g < tl.where(item < first + count, GROUP, 0)
            part = item * H + head + g
            lse = tl.load(Lse + part, mask=here, other=-1.0e30, cache_modifier=".cg")
            at = Partial + part[:, None] * HD + d
            answer = tl.load(at, mask=here[:, None] & (d < HD), other=0.0, cache_modifier=".cg")
            new_peak = tl.maximum(peak, lse)
            weight = tl.exp2(lse - new_peak)
            shrink = tl.exp2(peak - new_peak)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + answer * weight[:, None]
            peak = new_peak
    to = Out + (head + g)[:, None] * HD + d
    tl.store(to, (acc / total[:, None]).to(Out.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < HD))


REGISTER_TILE = 1 << 14  # bytes of keys, and as many of values, that the registers of a program may take
BUSY = 264  # programs that keep an H200 busy, two to a multiprocessor
WAVE = 396  # programs that run at once with tiles of 16 bits, three to a multiprocessor
WAVE_OF_FIVE = 660  # at head_dim 64 with fewer registers
SPARE = 160  # programs by which long rows are cut where rows alone keep the GPU busy
MANY_PROGRAMS = 1792  # from so many on smaller tiles of a cache in 8 bits are faster
ONE_WARP = 1056  # programs of one warp that keep an H200 busy, eight to a multiprocessor


@dataclass(frozen=True)
class Sizes:
    """Keys of a tile, stages and warps of a program, how many items there are, and the registers of a thread if more
    of them would leave room for fewer programs."""

    block_n: int
    num_stages: int
    num_warps: int
    plan: PlanSize
    registers: int | None = None


@functools.cache
def token_sizes(rows: int, heads: int, block_d: int, itemsize: int, kind: str) -> Sizes:
    """For `heads` programs an item. block_d: features of a tile. itemsize: bytes of a feature of q. kind: how the cache
    is kept, as kernel_pools calls it.

    In 16 bits the best of benchmarks/kernels/bench_token_attention.py on an H200, the rest keep registers and shared
    memory in bounds.
    """
    programs, small = rows * heads, block_d <= 64

    def plan(few: int, wave: int = 0) -> PlanSize:
        return PlanSize(few // heads, SPARE // heads, wave // heads)

    if itemsize > 2 or block_d > 128:
        return Sizes(32 if itemsize * block_d > 256 else 64, 2, 4, plan(2 * BUSY))
    # A program of one warp joins items too, all of a row at once where like rows have no more than TOGETHER.
    if kind != "plain" and small and TOGETHER.value * programs >= ONE_WARP:
        return Sizes(32, 5, 1, plan(ONE_WARP if programs <= ONE_WARP else 6 * ONE_WARP))
    if kind != "plain":
        tile = (128, 3, 4) if small else (128, 3, 2) if programs < MANY_PROGRAMS else (32, 5, 1)
        return Sizes(*tile, plan(2 * BUSY))
    if programs <= BUSY // 2:
        stages = 3 if small and rows > 1 else 2  # the product behind a lone row is set up early, where it finds room
        return Sizes(64, stages, 4, plan(2 * BUSY if small else WAVE))
    if programs <= WAVE and small:
        return Sizes(64, 2, 4, plan(4 * BUSY))
    if programs <= WAVE:
        return Sizes(*((64, 3) if programs <= BUSY else (128, 2)), 4, plan(BUSY))
    if small:
        return Sizes(128, 2, 4, plan(BUSY, WAVE_OF_FIVE), registers=96)
    return Sizes(128, 2, 4, plan(4 * BUSY))


def _launch_sizes(q: torch.Tensor, layer_kv: LayerKV) -> tuple[int, int, int, Sizes]:
    """(query heads of a program, features of a tile, programs of an item, sizes)."""
    kv_heads, head_dim, kind = layer_kv.shape[1], q.shape[2], kernel_pools(layer_kv)[2]
    group, itemsize = q.shape[1] // kv_heads, q.element_size()
    block_d = max(16 if kind == "plain" else 32, triton.next_power_of_2(head_dim))
    block_g = min(64 if itemsize == 2 and block_d <= 128 else 16, max(16, triton.next_power_of_2(group)))
    heads = kv_heads * triton.cdiv(group, block_g)
    return block_g, block_d, heads, token_sizes(len(q), heads, block_d, itemsize, kind)


def token_plan(
    q: torch.Tensor, layer_kv: LayerKV, rows: torch.Tensor, kv_lens: torch.Tensor, spec: AttentionSpec
) -> DecodePlan:
    """A plan for calls of `token_attention` with these shapes, rows, kv_lens and reach."""
    _, _, heads, sizes = _launch_sizes(q, layer_kv)
    return plan_decode(kv_lens, rows, spec, heads, sizes.block_n, sizes.plan)


@token_attention.kernel
def _token_attention(
    q: torch.Tensor,
    layer_kv: LayerKV,
    req_table: torch.Tensor,
    rows: torch.Tensor,
    kv_lens: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
    out: torch.Tensor | None = None,
    beside: bool = False,
    new: NewKeys | None = None,
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    batch, heads, head_dim = q.shape
    if batch == 0:
        return out
    plan = plan or token_plan(q, layer_kv, rows, kv_lens, spec)
    kv_heads = layer_kv.shape[1]
    kv, scales, kind = kernel_views(layer_kv)
    block_g, block_d, programs, sizes = _launch_sizes(q, layer_kv)
    items = plan.items.shape[1]
    partial = torch.empty(items, heads, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(items, heads, dtype=torch.float32, device=q.device)
    given = new or NewKeys(q, q, q, q)  # q stands in for what is not there
    _token_attention_kernel[(programs, items)](
        *(q, kv, scales, req_table, kv_lens, plan.items, plan.arrived),
        *(q if spec.slopes is None else spec.slopes, q if sinks is None else sinks, *given, partial, lse, out),
        *(q.stride(0), given.k.stride(0), given.v.stride(0), kv.stride(0), kv.stride(1), req_table.stride(0)),
        *(spec.scale * math.log2(math.e), (spec.softcap or 0.0) / spec.scale),
        KH=kv_heads,
        GROUP=heads // kv_heads,
        HD=head_dim,
        FORMAT=kind,
        PTX=has_ptx(),
        HALF=new.cos.shape[1] if new else 0,
        SOFTCAP=spec.softcap is not None,
        ALIBI=spec.slopes is not None,
        SINKS=sinks is not None,
        BLOCK_G=block_g,
        BLOCK_H=min(triton.next_power_of_2(heads // kv_heads), block_g),
        BLOCK_N=sizes.block_n,
        BLOCK_D=block_d,
        AHEAD=new is not None and q.element_size() * sizes.block_n * block_d <= REGISTER_TILE,
        num_warps=sizes.num_warps,
        num_stages=1 if torch.version.hip else sizes.num_stages,
        **({} if torch.version.hip or not sizes.registers else {"maxnreg": sizes.registers}),
        **dependent_launch(q, EARLY_LINES, beside=beside),
    )
    return out
