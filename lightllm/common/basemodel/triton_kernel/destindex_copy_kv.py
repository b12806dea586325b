"""Write the K and V of this step's tokens into their KV slots."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.quantized_kv import (
    LayerKV,
    encode,
    encode_scale,
    kernel_pools,
    write_slots,
)
from lightllm.common.triton_utils.dispatch import op


@op
def destindex_copy_kv(k: Tensor, v: Tensor, layer_kv: LayerKV, slots: Tensor) -> None:
    """layer_kv[slots[t], :, 0] = k[t] and [..., 1] = v[t]; k, v [T, KH, hd], layer_kv [slot, KH, 2, hd] or a
    QuantizedKV, slots int [T].

    Slots are distinct, except for the dump slot, whose content is undefined.
    """
    write_slots(layer_kv, slots.long(), torch.stack((k, v), 2))


@triton.jit
def store_heads(x, KV, Scales, to, scale_to, d, heads, mask, FORMAT: tl.constexpr):
    """Numbers x [heads, features d] of some heads to KV + to + d, their scales to Scales + scale_to."""
    if FORMAT != "plain":
        x = tl.where(mask, x, 0.0).to(tl.float32)
        scale = encode_scale(tl.max(tl.abs(x), 1)[:, None], FORMAT)
        tl.store(Scales + scale_to, scale, mask=heads)
        x = encode(x, scale, FORMAT)
    tl.store(KV + to + d, x, mask=mask)


@triton.jit(do_not_specialize=["Slots"])
def _destindex_copy_kv_kernel(
    K, V, KV, Scales, Slots, k_stride, v_stride, kv_stride,
    KH: tl.constexpr, HD: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (head < KH) & (d < HD)
    slot = tl.load(Slots + token).to(tl.int64)
    to, scale_to = slot * kv_stride + head * 2 * HD, (slot * KH + head) * 2
    k = tl.load(K + token * k_stride + head * HD + d, mask=mask)
    v = tl.load(V + token * v_stride + head * HD + d, mask=mask)
    store_heads(k, KV, Scales, to, scale_to, d, head < KH, mask, FORMAT)
    store_heads(v, KV, Scales, to + HD, scale_to + 1, d, head < KH, mask, FORMAT)


@destindex_copy_kv.kernel
def _destindex_copy_kv(k: Tensor, v: Tensor, layer_kv: LayerKV, slots: Tensor) -> None:
    tokens, kv_heads, head_dim = k.shape
    if tokens == 0:
        return
    block = triton.next_power_of_2(head_dim)
    heads = max(1, 512 // block)
    pool, scales, kind = kernel_pools(layer_kv)
    _destindex_copy_kv_kernel[(tokens, triton.cdiv(kv_heads, heads))](
        k, v, pool, scales, slots, k.stride(0), v.stride(0), pool.stride(0),
        KH=kv_heads, HD=head_dim, FORMAT=kind, HEADS=heads, BLOCK=block,
        num_warps=2,
    )  # fmt: skip
