"""Products of 2 to 16 lines on Hopper against float32; compiled ones only there, for Gluon has no interpreter."""

import pytest
import torch
from kernel.test_few_lines_linear import SHARED_MEMORY
from support.kernel_cases import HOPPER, shipped

from lightllm.common.basemodel.triton_kernel.few_lines_linear import BLOCK_K
from lightllm.common.basemodel.triton_kernel.ring_linear import RingConfig, ring_config
from lightllm.common.basemodel.triton_kernel.skinny_linear import MOST_LINES, add_skinny_linear, skinny_linear

ENTRIES = [(shape, RingConfig(*fields)) for shape, fields in shipped("ring_linear").items()]
CASES = [  # outputs, inputs: ranges of 5 or 6 units in tiles of 48, one box, three, shares, stacks
    (720, 24 * BLOCK_K, RingConfig(48, 16, 1, 5)),
    (1024, 7 * BLOCK_K, RingConfig(64, 16, 1, 9)),
    (1504, 6 * BLOCK_K, RingConfig(112, 14, 1, 4)),
    (720, 25 * BLOCK_K, RingConfig(80, 9, 3, 4)),
    (256, 24 * BLOCK_K, RingConfig(32, 8, 1, 5, stack=2)),
    (128, 24 * BLOCK_K, RingConfig(16, 8, 2, 3, stack=4)),
]
GATED = [(2 * 480, 9 * BLOCK_K, RingConfig(64, 16, 1, 5)), (2 * 720, 24 * BLOCK_K, RingConfig(224, 7, 1, 3))]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def on_gpu(arguments: tuple) -> list:
    return [value.cuda() if isinstance(value, torch.Tensor) else value for value in arguments]


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours.cpu().float(), expected, rtol=1.6e-2, atol=1.6e-2)


def in_float(arguments: tuple) -> list:
    return [value.float() if isinstance(value, torch.Tensor) else value for value in arguments]


def test_a_cpu_has_no_configuration() -> None:
    assert ring_config(torch.empty(2048, 2048, dtype=torch.bfloat16), gated=False) is None


def test_ranges_must_fit_their_tiles() -> None:
    assert RingConfig(48, 132, 1, 9).fits(6144, 4096, gated=False)
    assert not RingConfig(40, 132, 1, 9).fits(6144, 4096, gated=False)  # 47 outputs to a program
    assert not RingConfig(120, 64, 1, 4).fits(6144, 4096, gated=False)  # four boxes
    assert not RingConfig(224, 132, 2, 3).fits(28672, 4096, gated=True)  # silu needs the sum
    assert not RingConfig(48, 132, 1, 4, stack=2).fits(6144, 4096, gated=False)  # no power of two


@pytest.mark.parametrize(("shape", "config"), ENTRIES, ids=str)
def test_shipped_configurations_fit(shape: str, config: RingConfig) -> None:
    sizes, *gated = shape.split()
    outputs, inputs = map(int, sizes.split("x"))
    assert config.fits(outputs, inputs, bool(gated))
    tile = config.tile_rows + MOST_LINES * config.stack
    assert 2 * BLOCK_K * tile * config.num_stages < SHARED_MEMORY - 2048


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("outputs", "inputs", "config"), CASES + GATED, ids=str)
@pytest.mark.parametrize("lines", [2, 8, 9, MOST_LINES])
def test_against_float32(outputs: int, inputs: int, config: RingConfig, lines: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = random(lines, inputs), random(outputs, inputs) / inputs**0.5, random(outputs)
    squares = torch.rand(70, lines) * inputs / 35
    gated = (outputs, inputs, config) in GATED
    assert config.fits(outputs, inputs, gated)
    for arguments in ((x, weight, None, config, None, 0.0, gated), (x, weight, bias, config, squares, 1e-5, gated)):
        close(skinny_linear(*on_gpu(arguments)), skinny_linear(*in_float(arguments)))
    if not gated:
        addition = (x, weight, bias, random(lines, outputs), random(outputs), config)
        for _ in range(2):  # shares find the counters as they were
            *sums, squares = add_skinny_linear(*on_gpu(addition))
            *expected, whole = add_skinny_linear(*in_float(addition))
            for got, wanted in zip(sums, expected):
                close(got, wanted)
            torch.testing.assert_close(squares.sum(0).cpu(), whole.sum(0), rtol=1e-2, atol=1e-2)
