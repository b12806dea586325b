"""Normed lines: what multiplies them takes them as it takes the tensor that they stand for."""

import torch

from lightllm.common.basemodel.layer_weights import base_layer_weight
from lightllm.common.basemodel.layer_weights.base_layer_weight import VocabParallelWeight, Weight
from lightllm.common.basemodel.normed import RMSNormed, tensor_of
from lightllm.common.basemodel.triton_kernel.rmsnorm import rmsnorm
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul
from lightllm.distributed.parallel_state import ParallelState


def test_a_product_takes_normed_lines_as_it_takes_their_tensor() -> None:
    x, scale, weight = torch.randn(3, 16), torch.randn(16), Weight(torch.randn(24, 16), torch.randn(24))
    normed, expected = RMSNormed(x, scale, 1e-5), rmsnorm(x, scale, 1e-5)
    assert len(normed) == 3 and normed.tensor is normed.tensor
    assert torch.equal(tensor_of(normed), expected) and tensor_of(x) is x
    assert torch.equal(weight.apply(normed), weight.apply(expected))
    assert torch.equal(weight.apply(normed, gated=True), silu_and_mul(weight.apply(expected)))


def test_the_columns_of_ranks_are_joined_once(monkeypatch) -> None:
    joined = []
    monkeypatch.setattr(base_layer_weight, "join_columns", lambda y, *size: joined.append(y) or y)
    x, head = torch.randn(3, 16), VocabParallelWeight(torch.randn(12, 16), None, 24, ParallelState(1, 2))
    assert torch.equal(head.apply(RMSNormed(x, torch.ones(16), 1e-5)), joined[0])
    assert [y.shape for y in joined] == [(3, 12)]
