"""Normed lines: what multiplies them takes them as it takes the tensor that they stand for."""

from __future__ import annotations

import torch

from lightllm.common.basemodel.layer_weights.base_layer_weight import Weight
from lightllm.common.basemodel.normed import RMSNormed, tensor_of
from lightllm.common.basemodel.triton_kernel.rmsnorm import rmsnorm
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul


def test_a_product_takes_normed_lines_as_it_takes_their_tensor() -> None:
    x, scale, weight = torch.randn(3, 16), torch.randn(16), Weight(torch.randn(24, 16), torch.randn(24))
    normed, expected = RMSNormed(x, scale, 1e-5), rmsnorm(x, scale, 1e-5)
    assert len(normed) == 3 and normed.tensor() is normed.tensor()
    assert torch.equal(tensor_of(normed), expected) and tensor_of(x) is x
    assert torch.equal(weight.apply(normed), weight.apply(expected))
    assert torch.equal(weight.apply(normed, gated=True), silu_and_mul(weight.apply(expected)))
