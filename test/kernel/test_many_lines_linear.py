"""Gate, up and silu of many lines against float32; compiled only on a Hopper GPU, for Gluon has no interpreter."""

import pytest
import torch
import torch.nn.functional as F
from support.kernel_cases import HOPPER

from lightllm.common.basemodel.triton_kernel import many_lines_linear as module
from lightllm.common.basemodel.triton_kernel.many_lines_linear import many_lines_gated, suits_many_lines
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul


class OnHopper:
    """A weight as the rule sees it."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda")

    def __init__(self, outputs: int, inputs: int) -> None:
        self.shape = (outputs, inputs)

    def __len__(self) -> int:
        return self.shape[0]

    def is_contiguous(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("lines", "shape", "suits"),
    [
        (1024, (28672, 4096), True),
        (8192, (28672, 4096), True),
        (1024, (16384, 2048), True),
        (768, (16384, 2048), True),
        (512, (16384, 2048), False),
        (1536, (28672, 4096), False),  # ten turns of the processors and a fifth of one
        (1025, (28672, 4096), False),  # a block of padding
        (1024, (28672 + 64, 4096), False),
        (1024, (28672, 4096 + 32), False),
    ],
)
def test_it_is_chosen_where_processors_have_work_to_the_end(monkeypatch, lines, shape, suits) -> None:
    monkeypatch.setattr(module, "is_hopper", lambda device: True)
    monkeypatch.setattr(module, "_processors", lambda device: 132)
    assert suits_many_lines(lines, OnHopper(*shape)) == suits
    assert not suits_many_lines(lines, torch.empty(shape, dtype=torch.bfloat16, device="meta"))


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("lines", [1, 300, 1024, 2000])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 64), (14336, 320), (1024, 4096)])
def test_the_kernel_equals_its_twin(lines: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(lines, inputs, device="cuda").bfloat16()
    weight = (torch.randn(2 * outputs, inputs, device="cuda") / inputs**0.5).bfloat16()
    expected = silu_and_mul.twin(F.linear(x.float(), weight.float()).bfloat16()).float()
    answers = [many_lines_gated(x, weight) for _ in range(5)]
    answers.append(many_lines_gated(x, weight, torch.empty_like(answers[0])))
    torch.testing.assert_close(answers[0].float(), expected, rtol=1.6e-2, atol=2e-2)
    assert all(torch.equal(answer, answers[0]) for answer in answers)
