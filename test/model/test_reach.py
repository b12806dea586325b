"""Layers that see a window or a chunk read nothing older when they decode, so a long past costs them nothing."""

import pytest
import torch
from model.harness import Driver, load, make_reference, random_ids
from model.test_golden import CONFIGS

from lightllm.common.basemodel.attention.backend import AttentionSpec
from lightllm.common.basemodel.triton_kernel.decode_plan import PlanSize, plan_decode

FAMILIES = ["cohere2", "gemma2", "gemma3", "gemma4", "gemma4-e", "gpt_oss", "llama4", "mistral", "mixtral", "phi3",
            "qwen2-window", "qwen3-bias-window", "starcoder2"]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", [1, 5])
def test_what_lies_before_the_reach_is_not_read(tmp_path, name, count):
    """Decode and a chunk of five behind a prefix: NaN in the slots that no later query of a layer sees."""
    make_reference(CONFIGS[name]).save_pretrained(tmp_path)
    model, ids = load(tmp_path), random_ids(45, vocab=CONFIGS[name].vocab_size)
    logits = []
    for poison in (False, True):
        driver = Driver(model)
        row = driver.add(ids)
        row.prompt_len = 45 - count
        driver.step([(row, row.prompt_len)])
        hidden = 0
        for i, layer in enumerate(model.layers):
            oldest = layer.attention.spec.oldest(row.computed)
            if poison and layer.attention.spec.reach and layer.attention.layer == i:
                driver.kv.layer(i)[row.slots[:oldest]] = torch.nan
                hidden += oldest
        assert not poison or hidden > 0
        logits.append(driver.step([(row, count)], all_logits=True))
    assert torch.equal(*logits)


def test_every_family_with_a_reach_is_named():
    words = ("sliding_window", "attention_chunk_size")
    of = {name.split("-")[0] for name, c in CONFIGS.items() if any(getattr(c, word, None) for word in words)}
    assert {name.split("-")[0] for name in FAMILIES} >= of - {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}


@pytest.mark.parametrize("spec", [AttentionSpec(1.0, window=512), AttentionSpec(1.0, chunk=512)])
def test_the_plan_of_a_long_row_is_that_of_its_reach(spec):
    """What programs do and how many they are is the same at 600 and at 100,000 tokens."""
    plans = []
    for length in (600, 512 * 200 + 88):
        kv_lens, rows = torch.tensor([length, 40], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
        items = plan_decode.twin(kv_lens, rows, spec, 8, 64, PlanSize(30, 30)).items
        used = items[:, items[0] >= 0]
        first = spec.oldest(length - 1)
        assert used[1][used[0] == 0].min() == first and used[2].max() == length
        plans.append(used - torch.tensor([[0], [first], [first], [0], [0], [0]]) * (used[:1] == 0))
    assert torch.equal(*plans)
