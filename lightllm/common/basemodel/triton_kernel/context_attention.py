"""Attention of chunks of queries over the KV slots of their rows (prefill, also after a cached prefix)."""

import functools
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import Chunks
from lightllm.common.basemodel.triton_kernel.hopper_context_attention import hopper_context_attention, suits_hopper
from lightllm.common.basemodel.triton_kernel.quantized_kv import (
    LayerKV,
    decode,
    decode_scales,
    has_ptx,
    kernel_views,
    read_slots,
)
from lightllm.common.basemodel.triton_kernel.softmax_attention import alibi_mask, softmax_attention
from lightllm.common.triton_utils.dependent_launch import let_next_begin, neighbour_launch, wait_for_writes
from lightllm.common.triton_utils.dispatch import op
from lightllm.common.triton_utils.gpu import shared_memory

FEW_QUERIES = 384  # a chunk beside decoding rows
_CPU_BLOCK = 256  # queries at a time, so that a mask stays small and keys beyond the block's diagonal are not read


@op
def context_attention(
    q: Tensor,
    layer_kv: LayerKV,
    req_table: Tensor,
    chunks: Chunks,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed chunks: q [T, H, hd] -> out [T, H, hd].

    Row i's queries are q[cu_lengths[i] : cu_lengths[i] + lengths[i]] at positions starts[i]...; the query at position p
    sees keys j with spec.oldest(p) <= j <= p at layer_kv[req_table[rows[i], j]]. layer_kv is [slot, KH, 2, hd] or a
    QuantizedKV, req_table int32 [rows, length], sinks [H]. Queries that belong to no row leave `out` as it is.
    """
    rows, starts, lengths, cu_lengths = (column.tolist() for column in chunks[:4])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for row, start, length, at in zip(rows, starts, lengths, cu_lengths):
        if not length:
            continue
        oldest = max(0, spec.oldest(start))
        k, v = read_slots(layer_kv, req_table[row, oldest : start + length], q.dtype).unbind(2)
        out[at : at + length] = attend_row(q[at : at + length], k, v, start, oldest, spec, sinks)
    return out


def attend_row(
    q: Tensor, k: Tensor, v: Tensor, start: int, oldest: int, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """q [L, H, hd] at positions start... over k [N, KH, hd] and v [N, KH, vd] at positions oldest... -> [L, H, vd]."""
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    answers = []
    for begin in range(0, len(q), _CPU_BLOCK):
        end = min(begin + _CPU_BLOCK, len(q))
        low = max(0, spec.oldest(start + begin))
        keys = slice(low - oldest, start + end - oldest)
        queries = q[begin:end].transpose(0, 1)
        answers.append(_attend_block(queries, k[:, keys], v[:, keys], start + begin, low, spec, sinks))
    return torch.cat(answers, 1).transpose(0, 1)


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, position: int, low: int, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """q [H, L, hd] at position... over k [KH, N, hd] and v [KH, N, vd] at positions low... -> [H, L, vd]."""
    plain = spec.softcap is None and sinks is None
    mask = None
    if position or not plain or spec.slopes is not None or q.shape[1] > (spec.reach or q.shape[1]):
        queries, keys = torch.arange(position, position + q.shape[1])[:, None], torch.arange(low, low + k.shape[1])
        mask = (keys <= queries) & (keys >= spec.oldest(queries))
        if spec.slopes is not None:
            mask = alibi_mask(mask, queries - keys, spec.slopes[:, None, None], q.dtype)
    if plain:
        return F.scaled_dot_product_attention(
            *(q[None], k[None], v[None], mask), is_causal=mask is None, scale=spec.scale, enable_gqa=True
        )[0]
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    return softmax_attention(q, k, v, mask, spec.scale, spec.softcap, None if sinks is None else sinks[:, None, None])


@triton.jit
def oldest_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """AttentionSpec.oldest for window and chunk, 0 for absent ones."""
    if CHUNK > 0:
        return position // CHUNK * CHUNK
    return position - WINDOW + 1


@triton.jit
def cap_score(score, cap):
    """cap * tanh(score / cap), by exp2 because tanh has another name on every platform."""
    return cap - 2 * cap / (tl.exp2(score * (2.8853900817779268 / cap)) + 1)


@triton.jit
def _attend(
    q, q_odd, peak, total, acc, acc_odd, K, V, Scales, Table, low, high, last, position, slot_stride, scale_stride,
    scale, cap, slope,
    FORMAT: tl.constexpr, PTX: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    HD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One pass of online softmax (base 2) over keys low..high of the queries at `position`; last is the last key. HD is
    what a key has of KV's numbers; in 8 bits, see token_attention, q and acc are those of even features.

    Keys beyond the last are read from the last one's slot (always finite) and masked. Masked scores are
    -2^100, not -inf: a query that sees nothing in its first blocks collects garbage there, which the first real key
    scales to zero. A power of two times scale is exact, so the fused score * scale - new_peak cannot overflow exp2.
    Scores are q·k, so cap and slope come divided by AttentionSpec.scale.
    """
    d = tl.arange(0, BLOCK_D)[None, :]
    for start in range(low, high, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        slot = tl.load(Table + (tl.minimum(j, last) if MASK else j)).to(tl.int64)
        at = slot[:, None] * slot_stride + d
        if HD == BLOCK_D:
            k = tl.load(K + at)
        else:
            k = tl.load(K + at, mask=d < HD, other=0)
        if FORMAT == "plain":
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            k_even, k_odd = decode(k, FORMAT, PTX)
            k_scale, v_scale = decode_scales(tl.load(Scales + slot * scale_stride))
            score = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q, tl.trans(k_even))) * k_scale[None, :]
        if SOFTCAP:
            score = cap_score(score, cap)
        if ALIBI:
            score -= slope[:, None] * (position[:, None] - j[None, :])
        if MASK:
            seen = position[:, None] >= j[None, :]
            if WINDOW > 0 or CHUNK > 0:
                seen = seen & (j[None, :] >= oldest_key(position, WINDOW, CHUNK)[:, None])
            score = tl.where(seen, score, -1.2676506002282294e30)
        new_peak = tl.maximum(peak, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        if HD == BLOCK_D:
            v = tl.load(V + at)
        else:
            v = tl.load(V + at, mask=d < HD, other=0)
        if FORMAT == "plain":
            acc = tl.dot(p.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        else:
            v_even, v_odd = decode(v, FORMAT, PTX)
            weight = (p * (v_scale * 256)[None, :]).to(q.dtype)
            acc = tl.dot(weight, v_even, acc * shrink[:, None])
            acc_odd = tl.dot(weight, v_odd, acc_odd * shrink[:, None])
        peak = new_peak
    return peak, total, acc, acc_odd


@triton.jit(do_not_specialize=["Rows", "Starts", "Lengths", "CuLengths", "rows"])
def _context_attention_kernel(
    Q, KV, Scales, Table, Rows, Starts, Lengths, CuLengths, Slopes, Sinks, Out,
    rows, q_stride, slot_stride, head_stride, scale_stride, table_stride, scale, cap,
    H: tl.constexpr, GROUP: tl.constexpr, HD: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (PACK query heads of a KV head; block of a row's tokens, one row after the other, the last block of each
    first). There may be more programs than blocks, which come last: how many there are depends on the numbers of tokens
    and rows alone. A tile's lines are the heads of its first token, those of the next and so on.
    """
    TOKENS: tl.constexpr = BLOCK_M // PACK
    row, end, before = 0, 0x7FFFFFFF, 0
    for first in range(0, rows, 128):  # the first row whose blocks end behind this program's
        i = first + tl.arange(0, 128)
        blocks = tl.cdiv(tl.load(Lengths + i, mask=i < rows, other=0), TOKENS)
        ends = before + tl.cumsum(blocks, 0)
        later = (ends > tl.program_id(1)) & (i < rows)
        row += tl.sum(((i < rows) & (later == 0)).to(tl.int32), 0)
        end = tl.minimum(end, tl.min(tl.where(later, ends, 0x7FFFFFFF), 0))
        before += tl.sum(blocks, 0)
    wait_for_writes(PDL)  # of Q and KV; the columns of the rows and the table are older
    let_next_begin(PDL)
    if row < rows:
        block = end - 1 - tl.program_id(1)
        length = tl.load(Lengths + row)
        begin = tl.load(Starts + row)
        token = tl.load(CuLengths + row).to(tl.int64)
        Table += tl.load(Rows + row).to(tl.int64) * table_stride
        kv_head = tl.program_id(0) * PACK // GROUP
        K = KV + kv_head.to(tl.int64) * head_stride
        Scales += kv_head
        line = tl.arange(0, BLOCK_M)
        head = tl.program_id(0) * PACK + line % PACK
        m = block * TOKENS + line // PACK
        d = tl.arange(0, BLOCK_D)[None, :]
        mask = (m < length)[:, None] & (d < HD)
        q = tl.load(Q + (token + m[:, None]) * q_stride + head[:, None] * HD + d, mask=mask, other=0.0)

        first = begin + block * TOKENS
        last = tl.minimum(first + TOKENS, begin + length) - 1
        diagonal = (first + 1) // BLOCK_N * BLOCK_N  # keys below it are seen by every query, but for the window
        peak = tl.full([BLOCK_M], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:  # a key that was seen before all others
            peak = tl.load(Sinks + head).to(tl.float32) * 1.4426950408889634
            total += 1
        KD: tl.constexpr = HD if FORMAT == "plain" else HD // 2
        BLOCK_KD: tl.constexpr = BLOCK_D if FORMAT == "plain" else BLOCK_D // 2
        acc = tl.zeros([BLOCK_M, BLOCK_KD], tl.float32)
        acc_odd, q_odd = acc, q
        if FORMAT != "plain":
            q, q_odd = tl.split(q.to(tl.float16).reshape(BLOCK_M, BLOCK_KD, 2))
        slope = total
        if ALIBI:
            slope = tl.load(Slopes + head) * (1.4426950408889634 / scale)
        full = 0
        if WINDOW > 0 or CHUNK > 0:
            low = tl.maximum(oldest_key(first, WINDOW, CHUNK), 0) // BLOCK_N * BLOCK_N
            hidden = tl.maximum(oldest_key(last, WINDOW, CHUNK), 0)
            full = tl.minimum(tl.cdiv(hidden, BLOCK_N) * BLOCK_N, diagonal)
            peak, total, acc, acc_odd = _attend(
                q, q_odd, peak, total, acc, acc_odd, K, K + KD, Scales, Table, low, full, last, begin + m,
                slot_stride, scale_stride, scale, cap, slope, FORMAT, PTX,
                WINDOW, CHUNK, SOFTCAP, ALIBI, True, KD, BLOCK_N, BLOCK_KD,
            )  # fmt: skip
        peak, total, acc, acc_odd = _attend(
            q, q_odd, peak, total, acc, acc_odd, K, K + KD, Scales, Table, full, diagonal, last, begin + m,
            slot_stride, scale_stride, scale, cap, slope, FORMAT, PTX,
            WINDOW, CHUNK, SOFTCAP, ALIBI, False, KD, BLOCK_N, BLOCK_KD,
        )  # fmt: skip
        peak, total, acc, acc_odd = _attend(
            q, q_odd, peak, total, acc, acc_odd, K, K + KD, Scales, Table, diagonal, last + 1, last, begin + m,
            slot_stride, scale_stride, scale, cap, slope, FORMAT, PTX,
            WINDOW, CHUNK, SOFTCAP, ALIBI, True, KD, BLOCK_N, BLOCK_KD,
        )  # fmt: skip
        if FORMAT != "plain":
            acc = tl.interleave(acc, acc_odd) * 0.00390625
        out = (acc / total[:, None]).to(Out.dtype.element_ty)
        tl.store(Out + (token + m[:, None]) * (H * HD) + head[:, None] * HD + d, out, mask=mask)


@functools.cache
def context_config(head_dim: int, itemsize: int, group: int, max_chunk: int, kind: str, room: int) -> dict[str, int]:
    """Tile and launch sizes for `group` query heads to a KV head: in 16 bits at head_dim 64 and 128 the best on an
    H200, the rest keep registers and shared memory in bounds. Few queries are split into more programs; of very few,
    many keys at a time hide the wait for them where `room` in shared memory is left for another program, as of the
    decode rows that are attended to beside them.
    """
    block_d = max(16 if kind == "plain" else 32, triton.next_power_of_2(head_dim))
    pack = math.gcd(group, 16)
    block_m = 16 if max_chunk * pack <= 16 else 64 if max_chunk <= 2048 else 128
    small = itemsize == 2 and block_d <= 128
    if not small:
        block_m = min(block_m, 32 if block_d <= 128 else 16)
    long_keys = small and 16 < max_chunk <= FEW_QUERIES and kind == "plain" and room >= 1280 * block_d * itemsize
    block_n = 128 if long_keys else 64 if small else 32
    return {
        "PACK": pack,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "num_warps": 8 if block_m == 128 and block_d <= 64 and kind == "plain" else 4,
        "num_stages": 1 if torch.version.hip else 3 if small and not long_keys else 2,
    }


@context_attention.kernel
def _context_attention(
    q: Tensor,
    layer_kv: LayerKV,
    req_table: Tensor,
    chunks: Chunks,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    rows, starts, lengths, cu_lengths, longest = chunks
    if len(rows) == 0 or longest == 0:
        return out
    if suits_hopper(layer_kv, spec, sinks):
        return hopper_context_attention(q, layer_kv, req_table, chunks, spec, out)
    heads, head_dim = q.shape[1:]
    kv, scales, kind = kernel_views(layer_kv)
    group = heads // layer_kv.shape[1]
    config = context_config(head_dim, q.element_size(), group, longest, kind, shared_memory(q.device))
    tokens = config["BLOCK_M"] // config["PACK"]
    blocks = min(len(q) // tokens + len(rows), triton.cdiv(longest, tokens) * len(rows))
    _context_attention_kernel[(heads // config["PACK"], blocks)](
        q, kv, scales, req_table, rows, starts, lengths, cu_lengths,
        q if spec.slopes is None else spec.slopes, q if sinks is None else sinks, out,
        len(rows), q.stride(0), kv.stride(0), kv.stride(1), scales.stride(0), req_table.stride(0),
        spec.scale * math.log2(math.e), (spec.softcap or 0.0) / spec.scale,
        H=heads, GROUP=group, HD=head_dim, FORMAT=kind, PTX=has_ptx(), WINDOW=spec.window or 0,
        CHUNK=spec.chunk or 0, SOFTCAP=spec.softcap is not None, ALIBI=spec.slopes is not None, SINKS=sinks is not None,
        **config, **neighbour_launch(q),
    )  # fmt: skip
    return out
