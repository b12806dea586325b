"""Attention of chunks as Hopper computes it: the answers of the twin, whatever groups, chunks and windows are."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.kernel_cases import Paged, paged

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.hopper_context_attention import suits_hopper

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
CHUNKS = [  # (start, length) of each row
    [(0, 1)],
    [(0, 300)],
    [(500, 7), (0, 0), (1, 128), (127, 1), (0, 257), (128, 128), (1000, 45)],
    [(3, 9)] * 150,
]

SHAPES = [  # query heads, kv heads, head_dim
    (32, 8, 128, torch.bfloat16),
    (7, 1, 128, torch.bfloat16),
    (32, 1, 128, torch.bfloat16),
    (6, 2, 128, torch.float16),
]


def in_order(pool: Paged) -> Paged:
    """The same with each row's keys in neighbouring slots."""
    table, layer_kv, used = pool.req_table.clone(), torch.full_like(pool.layer_kv, torch.nan), 0
    for row, length in zip(pool.rows.tolist(), pool.kv_lens.tolist()):
        layer_kv[used : used + length] = pool.layer_kv[table[row, :length].long()]
        table[row, :length] = torch.arange(used, used + length)
        used += length
    return dataclasses.replace(pool, layer_kv=layer_kv, req_table=table)


@pytest.mark.parametrize("heads, kv_heads, head_dim, dtype", SHAPES)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("neighbours", [False, True])
def test_answers(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    chunks: list[tuple[int, int]],
    neighbours: bool,
) -> None:
    """Whether a row's slots are neighbours, as those of a chunk often are, or lie anywhere."""
    starts, lengths = zip(*chunks)
    pool = paged([max(1, start + length) for start, length in chunks], kv_heads, head_dim, dtype, "cuda")
    if neighbours:
        pool = in_order(pool)
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ints = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in (starts, lengths, ends))
    q = torch.randn(sum(lengths), 2 * heads, head_dim, dtype=dtype, device="cuda")[:, :heads]
    spec = AttentionSpec(head_dim**-0.5, window)
    assert suits_hopper(q, pool.layer_kv, spec, None)
    arguments = (q, pool.layer_kv, pool.req_table, pool.rows, *ints, max(lengths))
    ours = context_attention(*arguments, spec)
    expected = context_attention.twin(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments), spec)
    torch.testing.assert_close(ours.cpu().float(), expected.float(), rtol=1.6e-2, atol=1.6e-2)
