"""Case 89: a cache in int8 hardly changes what a model says, whatever its channels; and a hit is as good as a miss.

The plain model misses the bank's 0.05. In float32 twins: one scale for each head 0.062 (K's part 0.053, V's 0.030),
with a zero point or the best of nine ranges 0.058, both 0.059; two scales 0.055; a scale for each 16 features 0.0497, a
scale and a zero point for each 24 0.048. In 16 bits the last two need 8.5 bits a number at head_dim 128, 1.88 times the
tokens of bf16 where 1.94 are wanted.
"""

import pytest
import torch
from model.harness import Driver, load, random_ids
from safetensors.torch import load_file, save_file
from support.step_driver import save_random_model

HEAD_DIM, CUT, LENGTH = 48, 17, 60


TOO_FAR = pytest.mark.xfail(
    reason="0.062 where the bank wants 0.05: one scale for each head is too coarse", strict=True
)


@pytest.fixture(params=[pytest.param("plain", marks=TOO_FAR), "outlier", "keys of zeros"])
def checkpoint(tmp_path, request):
    """F3 with two query heads for each KV head; one channel of K fifty times as large; no K in one layer."""
    save_random_model(tmp_path, head_dim=HEAD_DIM)
    tensors = load_file(tmp_path / "model.safetensors")
    keys = tensors["model.layers.1.self_attn.k_proj.weight"]
    if request.param == "outlier":
        keys[5] *= 50
    elif request.param == "keys of zeros":
        keys.zero_()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return request.param, tmp_path


def test_case_89_int8_cache(checkpoint):
    kind, path = checkpoint
    model, differences = load(path), []
    for seed in range(6):
        prompt = random_ids(20, seed, vocab=320)
        ids = prompt + Driver(model).generate([prompt], LENGTH - len(prompt))[0]
        plain, small = (forced(model, ids, kv_type)[len(prompt) - 1 :] for kv_type in (None, "int8kv"))
        assert plain.isfinite().all() and small.isfinite().all()
        differences.append((plain - small).abs().mean())
    assert torch.stack(differences).mean() < (0.3 if kind == "outlier" else 0.05)


def forced(model, ids, kv_type):
    """The log-probabilities of ids[1:]; computed twice behind the same prefix, to the bit."""
    driver = Driver(model, kv_type=kv_type)
    first = driver.add(ids)
    logits = [driver.step([(first, CUT)], all_logits=True)]
    second = driver.add(ids, prefix=first)
    logits.append(driver.step([(first, len(ids) - CUT)], all_logits=True))
    hit = driver.step([(second, len(ids) - CUT)], all_logits=True)
    assert torch.equal(hit, logits[1])
    return torch.cat(logits)[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
