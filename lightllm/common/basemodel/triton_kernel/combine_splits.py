"""Joining the answers of attention whose keys were split among programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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


def combine_splits(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> None:
    """partial float32 [B, splits, H, D] weighted by lse float32 [B, splits, H] (base 2) -> out [B, H, D]."""
    batch, splits, heads, dim = partial.shape
    _combine_kernel[(batch, heads)](
        *(partial, lse, out),
        H=heads,
        HD=dim,
        SPLITS=splits,
        BLOCK_S=triton.next_power_of_2(splits),
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        num_warps=4,
    )
