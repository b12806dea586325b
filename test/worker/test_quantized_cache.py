"""--llm_kv_type: what a cache in 8 bits holds, what it changes in what a model says, and who cannot have it."""

from pathlib import Path

import pytest
import torch
from model.harness import make_reference
from model.test_golden import CONFIGS
from support.step_driver import StepDriver, make_runner, random_prompts, save_random_model

from lightllm import LLM, SamplingParams
from lightllm.common.basemodel.model_config import ConfigError
from lightllm.common.basemodel.triton_kernel.quantized_kv import spread, unspread
from lightllm.common.kv_cache_mem_manager.kv_buffer import KV_TYPES, KVBuffer

AGREEMENT = {None: 0.999, "int8kv": 0.99, "fp8kv": 0.95}
CONVERSATION = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
QUESTIONS = [
    "Explain how a steam engine works.",
    "Write a short story about a lighthouse keeper.",
    "What is photosynthesis? Answer in detail.",
    "Give me a recipe for vegetable soup.",
    "Describe the history of Rome.",
]


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("head_dim, times", [(128, 1.96), (64, 1.93)])
def test_capacity(kv_type: str, head_dim: int, times: float) -> None:
    shapes = [(8, 2, head_dim), (0,)] * 4
    plain, small = (KVBuffer.bytes_per_token(shapes, torch.bfloat16, kind) for kind in (None, kv_type))
    assert plain / small > times
    buffer = KVBuffer(99, shapes, torch.bfloat16, torch.device("cpu"), kv_type)
    held = sum(t.nbytes for layer in map(buffer.layer, (0, 2, 4, 6)) for t in (layer.values, layer.scales))
    assert held == 100 * small


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_spreading_keeps_products_and_makes_numbers_alike(head_dim: int) -> None:
    q, k = torch.randn(5, head_dim, dtype=torch.float64), torch.randn(5, head_dim, dtype=torch.float64)
    k[:, 3] += 100
    torch.testing.assert_close(unspread(q) @ spread(k).T, q @ k.T)
    torch.testing.assert_close(unspread(spread(k)), k)
    ratio = lambda x: (x.abs().amax(-1) / x.square().mean(-1).sqrt()).max()
    assert ratio(spread(k)) < 0.8 * ratio(k)


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


@pytest.mark.slow
def test_smollm2_says_the_same() -> None:
    """Its own greedy answers are forced on it; how often is the next token the likeliest with the smaller cache too?"""
    conversations = [CONVERSATION.format(question) for question in QUESTIONS]
    greedy = SamplingParams(max_new_tokens=128, do_sample=False)
    answers = LLM(device="cpu").generate(conversations, greedy, use_tqdm=False)
    forced = [answer.prompt_token_ids + answer.outputs[0].token_ids for answer in answers]
    scored = SamplingParams(max_new_tokens=1, prompt_logprobs=1)
    for kv_type, least in AGREEMENT.items():
        same = []
        outputs = LLM(llm_kv_type=kv_type, device="cpu").generate(forced, scored, use_tqdm=False)
        for output, ids, answer in zip(outputs, forced, answers, strict=True):
            for position in range(len(answer.prompt_token_ids), len(ids)):
                at = output.prompt_logprobs[position]
                same.append(max(at, key=at.__getitem__) == ids[position])
        assert len(same) > 100 * len(QUESTIONS)
        assert sum(same) / len(same) >= least, kv_type


def test_latents_are_refused_by_name(tmp_path: Path) -> None:
    make_reference(CONFIGS["deepseek_v2"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--llm_kv_type int8kv: deepseek_v2 keeps latents"):
        LLM(str(tmp_path), llm_kv_type="int8kv", device="cpu")
