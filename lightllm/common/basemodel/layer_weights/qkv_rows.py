"""Where the heads of q, k and v lie in checkpoint tensors, as indices of output features."""

import torch
from torch import Tensor

from lightllm.common.basemodel.layer_weights.slot import Part


def qkv_parts(
    names: tuple[str, ...], heads: int, kv_heads: int, head_dim: int, copies: int, grouped: bool, paired_dim: int
) -> tuple[Part, Part, Part]:
    """The parts q, k and v of three tensors, or of one in which they are fused.

    Fused: all heads of q, then of k, then of v; or `grouped`: for each KV head its queries, its k and its v. In the
    first `paired_dim` dimensions of a head the rotary pairs are (2i, 2i + 1).
    """
    totals = [n * head_dim for n in (heads, kv_heads, kv_heads)]
    if len(names) == 1:
        totals = [sum(totals)] * 3
        q, k, v = _fused_rows(heads, kv_heads, head_dim, grouped)
        names *= 3
    else:
        q, k, v = (torch.arange(n * head_dim) for n in (heads, kv_heads, kv_heads))
    if paired_dim:
        q, k = paired_rows(q, head_dim, paired_dim), paired_rows(k, head_dim, paired_dim)
    return (
        Part(names[0], len(q), q, totals[0]),
        Part(names[1], len(k), k, totals[1], block=head_dim, copies=copies),
        Part(names[2], len(v), v, totals[2], block=head_dim, copies=copies),
    )


def _fused_rows(heads: int, kv_heads: int, head_dim: int, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange((heads + 2 * kv_heads) * head_dim).view(-1, head_dim)
    if grouped:
        rows = rows.view(kv_heads, -1, head_dim)
        q, k, v = rows[:, :-2], rows[:, -2], rows[:, -1]
    else:
        q, k, v = rows.split((heads, kv_heads, kv_heads))
    return q.flatten(), k.flatten(), v.flatten()


def paired_rows(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """`rows` of heads whose rotary pairs are (2i, 2i + 1), in the order in which the pairs are (i, i + rotary_dim / 2).
    q·k does not change if both have the same order, so one rotary kernel serves both pairings."""
    order = torch.arange(head_dim)
    order[:rotary_dim] = order[:rotary_dim].view(-1, 2).t().flatten()
    return rows.view(-1, head_dim)[:, order].flatten()
