"""Rotary position embedding, alone and fused with the write of K and V into their slots."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.destindex_copy_kv import destindex_copy_kv
from lightllm.common.triton_utils.dependent_launch import EARLY_LINES, dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = cos.shape[-1]
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    first = torch.addcmul(x1 * cos, x2, sin, value=-1)
    second = torch.addcmul(x2 * cos, x1, sin)
    x1.copy_(first)
    x2.copy_(second)


@op
def rotary_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first rd dims of every head of q [T, H, hd] and k [T, KH, hd] in place (pairs i, i + rd/2).

    cos and sin are float32 [T, rd/2] and contiguous; the arithmetic is float32, rounded once. q and k may be slices of
    one fused projection: only their last two dimensions must be contiguous.
    """
    _rotate(q, cos, sin)
    _rotate(k, cos, sin)


@op
def rotary_copy_kv(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, layer_kv: Tensor, slots: Tensor) -> None:
    """Rotate q [T, H, hd] in place and write rotated k and v [T, KH, hd] to layer_kv[slots] ([slot, KH, 2, hd]).

    k is undefined afterwards (the twin rotates it in place, the kernel does not).
    """
    rotary_emb.twin(q, k, cos, sin)
    destindex_copy_kv.twin(k, v, layer_kv, slots)


@triton.jit
def rotate_heads(X, To, cos, sin, mask, HALF: tl.constexpr):
    x1 = tl.load(X, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(X + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(To, (x1 * cos - x2 * sin).to(To.dtype.element_ty), mask=mask)
    tl.store(To + HALF, (x2 * cos + x1 * sin).to(To.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["Slots"])
def _rotary_kernel(
    Q, K, V, Cos, Sin, KV, Slots, q_stride, k_stride, v_stride, kv_stride,
    H: tl.constexpr, KH: tl.constexpr, HD: tl.constexpr, HALF: tl.constexpr,
    COPY: tl.constexpr, HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, block of HEADS heads): blocks of q heads first, then of k heads, then (COPY) of v heads."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (KH + HEADS - 1) // HEADS
    lane = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, BLOCK_HALF)[None, :]
    d = tl.arange(0, BLOCK)[None, :]
    cos = tl.load(Cos + token * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(Sin + token * HALF + i, mask=i < HALF, other=0.0)
    if block < Q_BLOCKS:
        head = block * HEADS + lane
        mask = (head < H) & (i < HALF)
        x = Q + token * q_stride + head * HD + i
        rotate_heads(x, x, cos, sin, mask, HALF)
    elif block < Q_BLOCKS + K_BLOCKS:
        head = (block - Q_BLOCKS) * HEADS + lane
        mask = (head < KH) & (i < HALF)
        x = K + token * k_stride + head * HD
        if COPY:
            to = KV + tl.load(Slots + token).to(tl.int64) * kv_stride + head * 2 * HD
            rotate_heads(x + i, to + i, cos, sin, mask, HALF)
            if HD > 2 * HALF:
                rest = (head < KH) & (d >= 2 * HALF) & (d < HD)
                tl.store(to + d, tl.load(x + d, mask=rest), mask=rest)
        else:
            rotate_heads(x + i, x + i, cos, sin, mask, HALF)
    elif COPY:
        head = (block - Q_BLOCKS - K_BLOCKS) * HEADS + lane
        heads = (head < KH) & (d < HD)
        value = tl.load(V + token * v_stride + head * HD + d, mask=heads)
        tl.store(KV + tl.load(Slots + token).to(tl.int64) * kv_stride + head * 2 * HD + HD + d, value, mask=heads)


@rotary_copy_kv.kernel
def _rotary_copy_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, layer_kv: Tensor, slots: Tensor, copy: bool = True
) -> None:
    """copy: whether k goes to its slots, beside v, or stays where it is."""
    tokens, heads, head_dim = q.shape
    if tokens == 0:
        return
    kv_heads, half = k.shape[1], cos.shape[1]
    block = triton.next_power_of_2(head_dim)
    per_program = max(1, 512 // block)
    blocks = triton.cdiv(heads, per_program) + (2 if copy else 1) * triton.cdiv(kv_heads, per_program)
    _rotary_kernel[(tokens, blocks)](
        q, k, v, cos, sin, layer_kv, slots, q.stride(0), k.stride(0), v.stride(0), layer_kv.stride(0),
        H=heads, KH=kv_heads, HD=head_dim, HALF=half, COPY=copy, HEADS=per_program,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK=block,
        num_warps=2, **dependent_launch(q, EARLY_LINES),
    )  # fmt: skip


@rotary_emb.kernel
def _rotary_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    _rotary_copy_kv(q, k, k, cos, sin, k, cos, copy=False)
