"""Products of 17 to 128 lines against float32; compiled ones only on a Hopper GPU, for Gluon has no interpreter."""

import pytest
import torch
import torch.nn.functional as F
from support.kernel_cases import HOPPER, shipped

from lightllm.common.basemodel.triton_kernel.few_lines_linear import (
    BLOCK_K,
    FEWEST_LINES,
    LINES,
    FewLinesConfig,
    few_lines_config,
    few_lines_linear,
)
from lightllm.common.basemodel.triton_kernel.silu_and_mul import silu_and_mul

ENTRIES = [
    (key, int(lines), FewLinesConfig(*fields))
    for key, of_lines in shipped("few_lines_linear").items()
    for lines, fields in of_lines.items()
]
CONFIGS = [FewLinesConfig(64, 64, 1, 4, 4), FewLinesConfig(64, 128, 4, 8, 4), FewLinesConfig(128, 128, 1, 4, 8)]
FORMS = [(c, gated) for c in CONFIGS for gated in (False, True) if not (gated and c.split > 1)]  # silu needs the sum
SHARED_MEMORY = 227 << 10  # bytes of a program on Hopper


def case(lines: int, outputs: int, inputs: int, with_bias: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(lines, inputs), torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
    return [t.bfloat16() for t in (x, weight)] + [bias.bfloat16() if with_bias else None]


def expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    y = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return silu_and_mul.twin(y.bfloat16()).float() if gated else y


@pytest.mark.parametrize("with_bias", [False, True])
def test_parts_add_up(with_bias: bool) -> None:
    arguments = case(20, 48, 5 * BLOCK_K, with_bias)
    parts = few_lines_linear(*arguments, FewLinesConfig(64, 64, 3, 4, 4))
    assert parts.shape == (3, 20, 48) and parts.dtype == torch.float32
    torch.testing.assert_close(parts.sum(0), expected(*arguments, gated=False), rtol=1e-5, atol=1e-5)


def test_a_cpu_has_no_configuration() -> None:
    assert few_lines_config(64, torch.empty(2048, 2048, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize(("key", "lines", "config"), ENTRIES, ids=str)
def test_shipped_configurations_fit(key: str, lines: int, config: FewLinesConfig) -> None:
    shape, *gated = key.split()
    outputs, inputs = map(int, shape.split("x"))
    assert lines in LINES and inputs % BLOCK_K == 0 and not (gated and config.split > 1)
    assert outputs // (1 + len(gated)) % 16 == 0  # lines of the answer are stored in whole sectors
    tiles = config.block_m + config.block_n * (1 + len(gated))
    assert 2 * BLOCK_K * tiles * config.num_stages < SHARED_MEMORY


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("config", "gated"), FORMS, ids=str)
def test_against_float32(config: FewLinesConfig, gated: bool) -> None:
    for lines in (FEWEST_LINES, 40, config.block_m + 1):
        arguments = case(lines, 2 * (2 * config.block_n + 16), (2 * config.num_stages + 3) * BLOCK_K, with_bias=True)
        answer = few_lines_linear(*(None if t is None else t.cuda() for t in arguments), config, gated)
        if config.split > 1:
            assert answer.dtype == torch.float32 and len(answer) == config.split
            answer = answer.sum(0)
        torch.testing.assert_close(answer.cpu().float(), expected(*arguments, gated), rtol=1.6e-2, atol=1.6e-2)
