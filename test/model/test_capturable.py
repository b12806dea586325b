"""What steps do can be captured as a CUDA graph: they neither wait for the device nor copy from the host."""

import numpy as np
import pytest
import torch
from model.harness import make_reference
from model.test_golden import CONFIGS
from support.sized_runner import SizedRunner
from support.step_driver import StepDriver, make_runner, random_prompts
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightllm.common.triton_utils.dispatch import Op
from lightllm.server.router.model_infer import mixed_step

aten = torch.ops.aten
FORBIDDEN = {  # reads a number or a size from the device, or brings one there
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.resolve_neg.default,  # tolist, numpy
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten.repeat_interleave.self_Tensor,
    aten._unique2.default,
    aten.equal.default,
    aten.lift_fresh.default,
}
LINES = 3


class Capture(TorchDispatchMode):
    """Stands in for a capture on a device that is not here."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in FORBIDDEN, f"{func} cannot be captured"
        if func is aten.index.Tensor:
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), "a mask as index"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def kernels(monkeypatch) -> None:
    """Ops are what they are on a GPU: one launch each."""
    call = Op.__call__

    def kernel(op, *args, **kwargs):
        with _disable_current_modes():
            return call(op, *args, **kwargs)

    monkeypatch.setattr(Op, "__call__", kernel)
    monkeypatch.setattr(mixed_step, "make_runner", SizedRunner)


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_can_be_captured(name, tmp_path, kernels) -> None:
    config = CONFIGS[name]
    make_reference(config).save_pretrained(tmp_path)
    runner = make_runner(tmp_path, mixed_sizes=[32])
    driver = StepDriver(runner)
    prompts = random_prompts([9, 1, 20], vocab=config.vocab_size)
    sequences = [driver.sequence(prompt, max_new_tokens=9) for prompt in prompts]
    driver.run(sequences, steps=2)
    rows = np.array([s.row for s in sequences], np.int32)
    positions = np.array([len(s.prompt) + 2 for s in sequences], np.int32)
    with torch.inference_mode():
        runner._decode.stage(rows, positions, np.arange(LINES, dtype=np.int32) + 3000, LINES)
        with Capture():
            runner._decode.draw(LINES)
            runner._decode.forward(LINES)
            runner._mixed.body(32)
            runner._mixed.draw.body(LINES)
