"""Write the K and V of this step's tokens into their KV slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightllm.common.triton_utils.dispatch import op


@op
def destindex_copy_kv(k: torch.Tensor, v: torch.Tensor, layer_kv: torch.Tensor, slots: torch.Tensor) -> None:
    """layer_kv[slots[t], :, 0] = k[t] and [..., 1] = v[t]; k, v [T, KH, hd], layer_kv [slot, KH, 2, hd], slots int [T].

    Slots are distinct, except for the dump slot, whose content is undefined.
    """
    layer_kv.index_copy_(0, slots.long(), torch.stack((k, v), 2))


@triton.jit(do_not_specialize=["Slots"])
def _destindex_copy_kv_kernel(
    K, V, KV, Slots, k_stride, v_stride, kv_stride,
    KH: tl.constexpr, HD: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (head < KH) & (d < HD)
    to = KV + tl.load(Slots + token).to(tl.int64) * kv_stride + head * 2 * HD + d
    tl.store(to, tl.load(K + token * k_stride + head * HD + d, mask=mask), mask=mask)
    tl.store(to + HD, tl.load(V + token * v_stride + head * HD + d, mask=mask), mask=mask)


@destindex_copy_kv.kernel
def _destindex_copy_kv(k: torch.Tensor, v: torch.Tensor, layer_kv: torch.Tensor, slots: torch.Tensor) -> None:
    tokens, kv_heads, head_dim = k.shape
    if tokens == 0:
        return
    block = triton.next_power_of_2(head_dim)
    heads = max(1, 512 // block)
    _destindex_copy_kv_kernel[(tokens, triton.cdiv(kv_heads, heads))](
        *(k, v, layer_kv, slots, k.stride(0), v.stride(0), layer_kv.stride(0)),
        KH=kv_heads,
        HD=head_dim,
        HEADS=heads,
        BLOCK=block,
        num_warps=2,
    )
