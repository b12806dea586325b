"""Attention of chunks as Hopper computes it: the answers of the twin, whatever groups, chunks and windows are."""

import pytest
import torch
from support.kernel_cases import HOPPER, paged

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.infer_struct import Chunks
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention
from lightllm.common.basemodel.triton_kernel.hopper_context_attention import suits_hopper

pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
CHUNKS = [  # (start, length) of each row
    [(0, 1)],
    [(0, 300)],
    [(500, 7), (0, 0), (1, 128), (127, 1), (0, 257), (128, 128), (1000, 45)],
    [(3, 9)] * 150,
]


@pytest.mark.parametrize(
    "heads, kv_heads, dtype, window",
    [
        (8, 2, torch.bfloat16, None),
        (8, 2, torch.bfloat16, 100),
        (7, 1, torch.bfloat16, None),
        (32, 1, torch.float16, None),
    ],
)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_answers(
    heads: int, kv_heads: int, dtype: torch.dtype, window: int | None, chunks: list[tuple[int, int]]
) -> None:
    starts, lengths = zip(*chunks)
    pool = paged([max(1, start + length) for start, length in chunks], kv_heads, 128, dtype, "cuda")
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ints = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in (starts, lengths, ends))
    q = torch.randn(sum(lengths), 2 * heads, 128, dtype=dtype, device="cuda")[:, :heads]
    spec = AttentionSpec(128**-0.5, window)
    assert suits_hopper(pool.layer_kv, spec, None)
    columns = (pool.rows, *ints)
    ours = context_attention(q, pool.layer_kv, pool.req_table, Chunks(*columns, max(lengths)), spec)
    on_host = Chunks(*(column.cpu() for column in columns), max(lengths))
    expected = context_attention.twin(q.cpu(), pool.layer_kv.cpu(), pool.req_table.cpu(), on_host, spec)
    torch.testing.assert_close(ours.cpu().float(), expected.float(), rtol=1.6e-2, atol=1.6e-2)
