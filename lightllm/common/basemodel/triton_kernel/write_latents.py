"""What multi-head latent attention does before it attends: turn the queries, write each token's latent to its slot."""

import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.basemodel.triton_kernel.rmsnorm import rmsnorm
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_emb, rotate_heads
from lightllm.common.triton_utils.dependent_launch import dependent_launch, wait_for_inputs
from lightllm.common.triton_utils.dispatch import op


@op
def write_latents(
    q: Tensor, rows: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, latents: Tensor, slots: Tensor
) -> None:
    """Rotate the first rd features of each head of q [T, H, hd] in place; write rows [T, rd + rank], their first rd
    features rotated and the others normalised with weight [rank], to latents[slots] ([slot, rd + rank]).

    cos and sin are float32 [T, rd/2], slots int32 [T]. rows is undefined afterwards.
    """
    rope = 2 * cos.shape[1]
    rotary_emb.twin(q, rows[:, None], cos, sin)
    rows[:, rope:] = rmsnorm.twin(rows[:, rope:], weight, eps)
    latents.index_copy_(0, slots.long(), rows)


@triton.jit(do_not_specialize=["Slots"])
def _write_latents_kernel(
    Q, Rows, Weight, Cos, Sin, Latents, Slots, q_stride, row_stride, slot_stride, eps,
    H: tl.constexpr, HD: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, block): the latent first, then blocks of HEADS heads of q."""
    d = tl.arange(0, BLOCK)
    weight = tl.load(Weight + d, mask=d < RANK, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(Cos + token * HALF + i, mask=i < HALF, other=0.0)
    sin = tl.load(Sin + token * HALF + i, mask=i < HALF, other=0.0)
    if tl.program_id(1) == 0:
        row = Rows + token * row_stride
        to = Latents + tl.load(Slots + token).to(tl.int64) * slot_stride
        rotate_heads(row + i, to + i, cos, sin, i < HALF, HALF)
        x = tl.load(row + 2 * HALF + d, mask=d < RANK, other=0.0).to(tl.float32)
        normed = (x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)).to(Latents.dtype.element_ty).to(tl.float32)
        tl.store(to + 2 * HALF + d, (normed * weight).to(Latents.dtype.element_ty), mask=d < RANK)
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        at = Q + token * q_stride + head * HD + i
        rotate_heads(at, at, cos, sin, (head < H) & (i < HALF), HALF)


@write_latents.kernel
def _write_latents(
    q: Tensor, rows: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, latents: Tensor, slots: Tensor
) -> None:
    tokens, heads, head_dim = q.shape
    if tokens == 0:
        return
    half, rank = cos.shape[1], len(weight)
    per_program = max(1, 512 // triton.next_power_of_2(half))
    _write_latents_kernel[(tokens, 1 + triton.cdiv(heads, per_program))](
        q, rows, weight, cos, sin, latents, slots, q.stride(0), rows.stride(0), latents.stride(0), eps,
        H=heads, HD=head_dim, HALF=half, RANK=rank, HEADS=per_program, BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK=triton.next_power_of_2(rank),
        num_warps=2, **dependent_launch(q),
    )  # fmt: skip
