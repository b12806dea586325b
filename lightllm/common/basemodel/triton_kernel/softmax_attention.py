"""Attention by its formula: what the twins use where torch's scaled_dot_product_attention lacks a feature."""

import torch
from torch import Tensor


def alibi_mask(visible: Tensor | None, distance: Tensor, slopes: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: -slope * distance (query position - key position), -inf where not visible."""
    bias = (-slopes * distance).to(dtype)
    return bias if visible is None else bias.masked_fill(~visible, -torch.inf)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [..., L, hd] over k, v [..., N, hd] -> [..., L, hd], in float32.

    mask is boolean (True: seen) or added; softcap bounds scores before the mask; sinks [..., L or 1, 1] join the
    denominator only.
    """
    score = scale * (q.float() @ k.float().transpose(-1, -2))
    if softcap is not None:
        score = softcap * (score / softcap).tanh()
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask
    total = score.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float())
    return ((score - total).exp() @ v.float()).to(q.dtype)
