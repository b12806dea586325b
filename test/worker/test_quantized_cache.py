"""--llm_kv_type: what a cache in 8 bits holds, what it changes in what a model says, and who cannot have it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model.harness import make_reference
from model.test_golden import CONFIGS
from support.step_driver import StepDriver, make_runner, random_prompts, save_random_model

from lightllm import LLM, SamplingParams
from lightllm.common.basemodel.model_config import ConfigError
from lightllm.common.kv_cache_mem_manager.kv_buffer import KV_TYPES, KVBuffer

ROOT = Path(__file__).parents[2]
AGREEMENT = {None: 1.0, "int8kv": 0.99, "fp8kv": 0.96}


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("head_dim, times", [(128, 1.96), (64, 1.93)])
def test_capacity(kv_type: str, head_dim: int, times: float) -> None:
    shapes = [(8, 2, head_dim), (0,)] * 4
    plain, small = (KVBuffer.bytes_per_token(shapes, torch.bfloat16, kind) for kind in (None, kv_type))
    assert plain / small > times
    buffer = KVBuffer(99, shapes, torch.bfloat16, torch.device("cpu"), kv_type)
    held = sum(t.nbytes for layer in map(buffer.layer, (0, 2, 4, 6)) for t in (layer.values, layer.scales))
    assert held == 100 * small


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_logprobs_stay_close_in_chunks_and_decode(kv_type: str, tmp_path: Path) -> None:
    save_random_model(tmp_path)
    logprobs = []
    for kind, chunk in ((None, 10**6), (kv_type, 10**6), (kv_type, 7)):
        driver = StepDriver(make_runner(tmp_path, kv_type=kind), chunk)
        sequences = [
            driver.sequence(prompt, max_new_tokens=1, prompt_logprobs=1) for prompt in random_prompts([60, 9, 33])
        ]
        driver.run(sequences)
        logprobs.append(torch.tensor([p for s in sequences for p in s.prompt_logprobs.values()]))
    plain, whole, chunked = logprobs
    assert (whole - plain).abs().mean() < {"int8kv": 0.1, "fp8kv": 0.5}[kv_type]
    assert (chunked - whole).abs().max() < 0.02  # another order of sums may round a number the other way


def test_smollm2_says_the_same() -> None:
    text = (ROOT / "README.md").read_text()[:3500]
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=1, do_sample=False)
    likeliest = {}
    for kv_type in AGREEMENT:
        (output,) = LLM(llm_kv_type=kv_type, device="cpu").generate(text, params, use_tqdm=False)
        likeliest[kv_type] = [max(at, key=at.__getitem__) for at in output.prompt_logprobs[1:]]
    assert len(likeliest[None]) > 800
    for kv_type, least in AGREEMENT.items():
        same = sum(a == b for a, b in zip(likeliest[None], likeliest[kv_type], strict=True))
        print(kv_type, same / len(likeliest[None]))
        assert same / len(likeliest[None]) >= least


def test_latents_are_refused_by_name(tmp_path: Path) -> None:
    make_reference(CONFIGS["deepseek_v2"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--llm_kv_type int8kv: deepseek_v2 keeps latents"):
        LLM(str(tmp_path), llm_kv_type="int8kv", device="cpu")
