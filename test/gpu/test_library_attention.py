"""Chunks whose attention cuDNN computes: what the twin of our kernel gives, fresh or behind a prefix."""

import pytest
import torch
from support.kernel_cases import paged, quantized

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.attention.library_attention import library_attention, measure_crossover
from lightllm.common.basemodel.infer_struct import Chunks
from lightllm.common.basemodel.triton_kernel.context_attention import context_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("prefix, length", [(0, 300), (130, 200), (1, 64)])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(8, 2, 128), (4, 4, 64), (3, 1, 96)])
@pytest.mark.parametrize("int8", [False, True])
def test_library_attention(prefix: int, length: int, heads: int, kv_heads: int, head_dim: int, int8: bool) -> None:
    pool = paged([prefix + length], kv_heads, head_dim, torch.bfloat16, "cuda")
    kv = quantized(pool.layer_kv, "cuda") if int8 else pool.layer_kv
    q = torch.randn(length, 2 * heads, head_dim, dtype=torch.bfloat16, device="cuda")[:, :heads]
    slots = pool.req_table[pool.rows[0], : prefix + length]
    ours = library_attention(q, kv, slots, 0.1)
    if not int8:
        in_order, places = kv[slots.long()], torch.arange(prefix + length, device="cuda")
        of_neighbours = library_attention(q, in_order, places, 0.1, first_slot=prefix)
        torch.testing.assert_close(of_neighbours, ours, rtol=1e-2, atol=1e-2)
    row = [torch.tensor(values) for values in ([0], [prefix], [length], [0, length])]
    on_host = quantized(kv, "cpu") if int8 else kv.cpu()
    expected = context_attention.twin(q.cpu(), on_host, slots.cpu()[None], Chunks(*row, length), AttentionSpec(0.1))
    torch.testing.assert_close(ours.cpu().float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_crossover_is_a_length_or_none() -> None:
    layer_kv = torch.zeros(2, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    assert measure_crossover(32, 128, layer_kv, torch.bfloat16) in (None, 1024, 2048, 4096, 8192)
    assert measure_crossover(32, 128, layer_kv.float(), torch.float32) is None
