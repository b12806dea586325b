"""Rotary position embedding fused with what a cache in 8 bits needs: spreading, quantizing and the write of K and V."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.destindex_copy_kv import destindex_copy_kv
from lightllm.common.basemodel.triton_kernel.quantized_kv import (
    QuantizedKV,
    encode,
    encode_scale,
    hadamard,
    kernel_pools,
    spread,
    unspread,
)
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_emb
from lightllm.common.triton_utils.dependent_launch import EARLY_LINES, dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op

ROWS = 32  # heads of tokens that a program turns and spreads together


@op
def rotary_spread_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, layer_kv: QuantizedKV, slots: Tensor
) -> Tensor:
    """Write rotated k and v [T, KH, hd] to the slots of layer_kv; gives q [T, H, hd], rotated, as keys that are spread
    want it. cos, sin and how the heads may lie in memory: as in rotary_emb. q and k are undefined afterwards."""
    rotary_emb(q, k, cos, sin)
    destindex_copy_kv(spread(k), spread(v), layer_kv, slots)
    return unspread(q)


@triton.jit(do_not_specialize=["tokens", "Slots"])
def _rotary_spread_kv_kernel(
    Q, K, V, Cos, Sin, Kept, Asking, To, KV, Scales, Slots, tokens, q_stride, k_stride, v_stride, kv_stride,
    H: tl.constexpr, KH: tl.constexpr, HALF: tl.constexpr,
    FORMAT: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of ROWS heads of tokens): those of q first, then of k, then of v.

    The matrix of Hadamard for a head (Kept, Asking) is that of its halves, four times, the last with the other sign:
    with the products a and b of the halves, spread are a + b and a - b.
    """
    wait_for_inputs(PDL)
    i = tl.arange(0, HALF)[None, :]
    of_matrix = tl.arange(0, HALF)[:, None] * 2 * HALF + i
    block = tl.program_id(0)
    q_blocks = tl.cdiv(tokens * H, ROWS)
    kv_blocks = tl.cdiv(tokens * KH, ROWS)
    if block < q_blocks:
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        token, head = row // H, row % H
        mask = token < tokens
        low, high = _turn(Q + token.to(tl.int64) * q_stride + head * 2 * HALF + i, Cos, Sin, token, i, mask, HALF)
        low, high = _spread(low, high, tl.load(Asking + of_matrix))
        to = To + row.to(tl.int64) * 2 * HALF + i
        tl.store(to, low, mask=mask)
        tl.store(to + HALF, high, mask=mask)
    else:
        of_v = (block >= q_blocks + kv_blocks).to(tl.int32)
        row = (block - q_blocks - of_v * kv_blocks) * ROWS + tl.arange(0, ROWS)[:, None]
        token, head = row // KH, row % KH
        mask = token < tokens
        if of_v == 1:
            x = V + token.to(tl.int64) * v_stride + head * 2 * HALF + i
            low, high = tl.load(x, mask=mask, other=0.0), tl.load(x + HALF, mask=mask, other=0.0)
        else:
            low, high = _turn(K + token.to(tl.int64) * k_stride + head * 2 * HALF + i, Cos, Sin, token, i, mask, HALF)
        low, high = _spread(low, high, tl.load(Kept + of_matrix))
        largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))[:, None]
        scale = encode_scale(largest.to(tl.float32), FORMAT)
        slot = tl.load(Slots + token, mask=mask, other=0).to(tl.int64)
        tl.store(Scales + (slot * KH + head) * 2 + of_v, scale, mask=mask)
        place = KV + slot * kv_stride + (head * 2 + of_v) * 2 * HALF + i
        tl.store(place, encode(low.to(tl.float32), scale, FORMAT), mask=mask)
        tl.store(place + HALF, encode(high.to(tl.float32), scale, FORMAT), mask=mask)


@triton.jit
def _turn(X, Cos, Sin, token, i, mask, HALF: tl.constexpr):
    """The halves of heads, rotated and rounded."""
    cos = tl.load(Cos + token * HALF + i, mask=mask, other=0.0)
    sin = tl.load(Sin + token * HALF + i, mask=mask, other=0.0)
    x1 = tl.load(X, mask=mask, other=0.0)
    x2 = tl.load(X + HALF, mask=mask, other=0.0)
    low = x1.to(tl.float32) * cos - x2.to(tl.float32) * sin
    high = x2.to(tl.float32) * cos + x1.to(tl.float32) * sin
    return low.to(x1.dtype), high.to(x1.dtype)


@triton.jit
def _spread(low, high, matrix):
    a = tl.dot(low, matrix, input_precision="ieee")
    b = tl.dot(high, matrix, input_precision="ieee")
    return (a + b).to(low.dtype), (a - b).to(low.dtype)


@rotary_spread_kv.kernel
def _rotary_spread_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, layer_kv: QuantizedKV, slots: Tensor
) -> Tensor:
    (tokens, heads, head_dim), (kv_heads, half) = q.shape, (k.shape[1], cos.shape[1])
    if 2 * half != head_dim or not 32 <= head_dim == triton.next_power_of_2(head_dim) or tokens == 0:
        return rotary_spread_kv.twin(q, k, v, cos, sin, layer_kv, slots)
    to = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    pool, scales, kind = kernel_pools(layer_kv)
    _rotary_spread_kv_kernel[(triton.cdiv(tokens * heads, ROWS) + 2 * triton.cdiv(tokens * kv_heads, ROWS),)](
        q, k, v, cos, sin, *hadamard(head_dim, q.dtype, q.device), to, pool, scales, slots, tokens,
        q.stride(0), k.stride(0), v.stride(0), pool.stride(0),
        H=heads, KH=kv_heads, HALF=half, FORMAT=kind, ROWS=ROWS,
        num_warps=4, **dependent_launch(q, EARLY_LINES),
    )  # fmt: skip
    return to
