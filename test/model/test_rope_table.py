"""Angles of rotary embeddings from a table, and without one where it would be too large."""

from types import SimpleNamespace

import torch

from lightllm.common.basemodel.layer_infer.template.position import make_rope
from lightllm.common.basemodel.rope_config import RopeConfig

CPU = torch.device("cpu")
MILLIONS = 10_485_760  # Llama 4 Scout's


def test_a_context_of_millions_takes_no_memory_and_has_the_same_angles():
    yarn = RopeConfig("yarn", 5e5, 64, 256, dict(factor=4.0))
    small, large = make_rope(yarn, 16, 256, CPU), make_rope(yarn, 16, MILLIONS, CPU)
    kept = [value for value in vars(large).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in kept) < 1000
    near, far = (
        SimpleNamespace(positions=torch.tensor([0, 7, last], dtype=torch.int32)) for last in (255, MILLIONS - 1)
    )
    for ours, table in zip(large.angles(near), small.angles(near)):
        assert torch.equal(ours, table) and ours.is_contiguous()
    assert all(part.isfinite().all() for part in large.angles(far))
