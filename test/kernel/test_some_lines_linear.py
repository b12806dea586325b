"""Products of 129 to 512 lines against float32; compiled ones only on a Hopper GPU, for Gluon has no interpreter."""

import pytest
import torch
from kernel.test_few_lines_linear import SHARED_MEMORY, case, expected
from support.kernel_cases import HOPPER, shipped

from lightllm.common.basemodel.triton_kernel.few_lines_linear import BLOCK_K
from lightllm.common.basemodel.triton_kernel.some_lines_linear import (
    LINES,
    SomeLinesConfig,
    some_lines_config,
    some_lines_linear,
    table_lines,
)

ENTRIES = [
    (key, int(lines), SomeLinesConfig(*fields))
    for key, of_lines in shipped("some_lines_linear").items()
    for lines, fields in of_lines.items()
]
CONFIGS = [SomeLinesConfig(256, 128, 1, 4), SomeLinesConfig(192, 64, 1, 3), SomeLinesConfig(128, 256, 1, 4)]
CONFIGS += [SomeLinesConfig(320, 128, 3, 3), SomeLinesConfig(64, 64, 8, 8)]
FORMS = [(c, gated) for c in CONFIGS for gated in (False, True) if not (gated and c.split > 1)]  # silu needs the sum


def test_parts_add_up() -> None:
    arguments = case(140, 48, 5 * BLOCK_K, with_bias=True)
    parts = some_lines_linear(*arguments, SomeLinesConfig(64, 64, 3, 4))
    assert parts.shape == (3, 140, 48) and parts.dtype == torch.bfloat16
    torch.testing.assert_close(parts.float().sum(0), expected(*arguments, gated=False), rtol=1.6e-2, atol=1.6e-2)


def test_entries_serve_lines_that_fill_their_tiles() -> None:
    assert [table_lines(lines) for lines in (128, 144, 160, 161, 176, 224, 256, 448, 512, 513)] == [
        *(None, 160, 160, None, 192, None, 256, None, 512, None)
    ]


def test_a_cpu_has_no_configuration() -> None:
    assert some_lines_config(256, torch.empty(2048, 2048, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize(("key", "lines", "config"), ENTRIES, ids=str)
def test_shipped_configurations_fit(key: str, lines: int, config: SomeLinesConfig) -> None:
    shape, *gated = key.split()
    outputs, inputs = map(int, shape.split("x"))
    assert lines in LINES and inputs % BLOCK_K == 0 and outputs % config.block_n == 0
    assert not (gated and config.split > 1)
    largest = min(256, 1 << config.block_m.bit_length() - 1)
    assert (config.block_m - largest).bit_count() <= 1
    assert 2 * BLOCK_K * (config.block_m + config.block_n) * config.num_stages < SHARED_MEMORY
    assert config.block_n <= BLOCK_K * config.num_stages  # answers leave through the ring


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("config", "gated"), FORMS, ids=str)
def test_against_float32(config: SomeLinesConfig, gated: bool) -> None:
    for lines, steps in ((130, 2 * config.num_stages + 3), (config.block_m + 1, 9)):
        arguments = case(lines, 2 * config.block_n + 16 * (1 + gated), steps * BLOCK_K, with_bias=True)
        answer = some_lines_linear(*(None if t is None else t.cuda() for t in arguments), config, gated)
        whole = answer.float().sum(0) if config.split > 1 else answer
        torch.testing.assert_close(whole.cpu().float(), expected(*arguments, gated), rtol=1.6e-2, atol=1.6e-2)
