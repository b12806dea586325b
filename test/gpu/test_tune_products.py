"""Products of few lines are tuned once for each shape, into the cache folder."""

import json

import pytest
import torch

from lightllm.common.basemodel.layer_weights.base_layer_weight import linear
from lightllm.common.basemodel.tune_products import tune_products
from lightllm.common.triton_utils.kernel_tables import kernel_table

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_new_shape_is_tuned_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_table.cache_clear()
    weight = torch.randn(2304, 1024, dtype=torch.bfloat16, device="cuda") / 32
    told: list[tuple] = []
    for _ in range(2):
        tune_products([weight, weight[:8]], lambda *what: told.append(what))
    assert [done for done, *_ in told] == [0, 1]
    (path,) = tmp_path.rglob("*.json")
    assert json.loads(path.read_text()).keys() == {"2304x1024"}
    for lines in (1, 9):
        x = torch.randn(lines, 1024, dtype=torch.bfloat16, device="cuda")
        torch.testing.assert_close(linear(x, weight, None).float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-2)
    kernel_table.cache_clear()
