"""Prefill of multi-head latent attention, over keys and values that were made of the latents."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import Chunks
from lightllm.common.basemodel.triton_kernel.context_attention import attend_row
from lightllm.common.triton_utils.dispatch import op
from lightllm.common.triton_utils.gpu import shared_memory


@op
def latent_context_attention(
    q: Tensor, turned: Tensor, kv: Tensor, chunks: Chunks, cu_kv: Tensor, scale: float
) -> Tensor:
    """Causal attention of packed chunks: q [T, H, rope + nope] -> [T, H, value].

    Row i's queries are q[cu_lengths[i] : cu_lengths[i] + lengths[i]] at positions starts[i]...; its keys are
    [turned, kv's first nope features] and its values kv's others at cu_kv[i]... (int32), from position 0 on. turned is
    [N, rope], the same for all heads, kv [N, H, nope + value] and contiguous.
    """
    starts, lengths, cu_lengths = (column.tolist() for column in chunks[1:4])
    nope = q.shape[2] - turned.shape[1]
    out = torch.empty(*q.shape[:2], kv.shape[2] - nope, dtype=q.dtype)
    spec = AttentionSpec(scale)
    for start, length, at, first in zip(starts, lengths, cu_lengths, cu_kv.tolist()):
        held = slice(first, first + start + length)
        shared = turned[held, None].expand(-1, q.shape[1], -1)
        keys, values = torch.cat((shared, kv[held, :, :nope]), -1), kv[held, :, nope:]
        out[at : at + length] = attend_row(q[at : at + length], keys, values, start, 0, spec, None)
    return out


@triton.jit
def _attend(
    q_turned, q, peak, total, acc, Turned, KV, low, high, last, position, turned_stride, kv_stride, scale,
    ROPE: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr, MASK: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """One pass of online softmax (base 2) over keys low..high of the queries at `position`; last is the last key, from
    which those beyond it are read. Masked scores are as in context_attention."""
    e = tl.arange(0, BLOCK_ROPE)[None, :]
    d = tl.arange(0, BLOCK_NOPE)[None, :]
    v = tl.arange(0, BLOCK_VALUE)[None, :]
    for start in range(low, high, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        at = (tl.minimum(j, last) if MASK else j).to(tl.int64)[:, None]
        if ROPE == BLOCK_ROPE:
            turned = tl.load(Turned + at * turned_stride + e)
        else:
            turned = tl.load(Turned + at * turned_stride + e, mask=e < ROPE, other=0.0)
        if NOPE == BLOCK_NOPE:
            key = tl.load(KV + at * kv_stride + d)
        else:
            key = tl.load(KV + at * kv_stride + d, mask=d < NOPE, other=0.0)
        score = tl.dot(q, tl.trans(key), input_precision="ieee")
        score = tl.dot(q_turned, tl.trans(turned), score, input_precision="ieee")
        if MASK:
            score = tl.where(position[:, None] >= j[None, :], score, -1.2676506002282294e30)
        new_peak = tl.maximum(peak, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(p, 1)
        if VALUE == BLOCK_VALUE:
            value = tl.load(KV + NOPE + at * kv_stride + v)
        else:
            value = tl.load(KV + NOPE + at * kv_stride + v, mask=v < VALUE, other=0.0)
        acc = tl.dot(p.to(q.dtype), value, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, acc


@triton.jit(do_not_specialize=["Starts", "Lengths", "CuLengths", "CuKV"])
def _latent_context_attention_kernel(
    Q, Turned, KV, Starts, Lengths, CuLengths, CuKV, Out, q_stride, turned_stride, scale,
    H: tl.constexpr, ROPE: tl.constexpr, NOPE: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Program (block of queries, longest first; head; row)."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(Lengths + tl.program_id(2))
    if block * BLOCK_M < length:
        begin = tl.load(Starts + tl.program_id(2))
        token = tl.load(CuLengths + tl.program_id(2)).to(tl.int64)
        kv_token = tl.load(CuKV + tl.program_id(2)).to(tl.int64)
        WIDTH: tl.constexpr = NOPE + VALUE
        Turned += kv_token * turned_stride
        KV += (kv_token * H + head) * WIDTH
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        e = tl.arange(0, BLOCK_ROPE)[None, :]
        d = tl.arange(0, BLOCK_NOPE)[None, :]
        v = tl.arange(0, BLOCK_VALUE)[None, :]
        real = (m < length)[:, None]
        at = Q + (token + m[:, None]) * q_stride + head * (ROPE + NOPE)
        q_turned = tl.load(at + e, mask=real & (e < ROPE), other=0.0)
        q = tl.load(at + ROPE + d, mask=real & (d < NOPE), other=0.0)

        first = begin + block * BLOCK_M
        last = tl.minimum(first + BLOCK_M, begin + length) - 1
        diagonal = (first + 1) // BLOCK_N * BLOCK_N  # keys below it are seen by every query
        peak = tl.full([BLOCK_M], -1.0e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
        peak, total, acc = _attend(
            q_turned, q, peak, total, acc, Turned, KV, 0, diagonal, last, begin + m, turned_stride, H * WIDTH, scale,
            ROPE, NOPE, VALUE, False, BLOCK_N, BLOCK_ROPE, BLOCK_NOPE, BLOCK_VALUE,
        )  # fmt: skip
        peak, total, acc = _attend(
            q_turned, q, peak, total, acc, Turned, KV, diagonal, last + 1, last, begin + m, turned_stride, H * WIDTH,
            scale, ROPE, NOPE, VALUE, True, BLOCK_N, BLOCK_ROPE, BLOCK_NOPE, BLOCK_VALUE,
        )  # fmt: skip
        out = (acc / total[:, None]).to(Out.dtype.element_ty)
        tl.store(Out + ((token + m[:, None]) * H + head) * VALUE + v, out, mask=real & (v < VALUE))


def latent_context_config(q: Tensor, max_chunk: int) -> dict[str, int]:
    """Tile and launch sizes: in 16 bits the best of benchmarks/kernels/tune_families.py on an H200, where shared memory
    allows; else such that keep registers in bounds."""
    small = q.element_size() == 2 and q.shape[2] <= 192
    block_m = 16 if max_chunk <= 16 else 64 if max_chunk <= 64 else 128
    return {
        "BLOCK_M": block_m if small else min(block_m, 32),
        "BLOCK_N": 64 if small else 32,
        "num_warps": 8 if small and block_m == 128 else 4,
        "num_stages": 1 if torch.version.hip else 3 if shared_memory(q.device) >= 200 << 10 else 2,
    }


@latent_context_attention.kernel
def _latent_context_attention(
    q: Tensor,
    turned: Tensor,
    kv: Tensor,
    chunks: Chunks,
    cu_kv: Tensor,
    scale: float,
    config: dict[str, int] | None = None,
) -> Tensor:
    _, starts, lengths, cu_lengths, longest = chunks
    rope, heads = turned.shape[1], q.shape[1]
    nope = q.shape[2] - rope
    value = kv.shape[2] - nope
    out = torch.empty(len(q), heads, value, dtype=q.dtype, device=q.device)
    if len(starts) and longest:
        config = config or latent_context_config(q, longest)
        _latent_context_attention_kernel[(triton.cdiv(longest, config["BLOCK_M"]), heads, len(starts))](
            q, turned, kv, starts, lengths, cu_lengths, cu_kv, out,
            q.stride(0), turned.stride(0), scale * math.log2(math.e),
            H=heads, ROPE=rope, NOPE=nope, VALUE=value, BLOCK_ROPE=max(16, triton.next_power_of_2(rope)),
            BLOCK_NOPE=max(16, triton.next_power_of_2(nope)), BLOCK_VALUE=max(16, triton.next_power_of_2(value)),
            **config,
        )  # fmt: skip
    return out
