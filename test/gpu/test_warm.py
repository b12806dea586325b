"""Nothing is compiled for a request: what it may need is when the model is ready."""

from pathlib import Path

import pytest
import torch
from support.checkpoints import build, random_prompt

from lightllm import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WISHES = [
    dict(do_sample=False),
    dict(temperature=0.8, top_p=0.9, top_k=20, seed=3),
    dict(repetition_penalty=1.2, logprobs=3),
    dict(do_sample=False, logprobs=2, prompt_logprobs=1),
]


def test_no_request_waits_for_a_compiler(tmp_path: Path, monkeypatch) -> None:
    from triton import knobs

    path = build("llama", tmp_path / "llama")
    flags = dict(data_type="bf16", max_total_token_num=20_000, running_max_req_size=64, batch_max_tokens=1024)
    llm = LLM(str(path), graph_max_tokens=256, **flags)
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **made: compiled.append(made["fn"].name))
    for wish in WISHES:
        for lengths in ([5], [300] * 4, [1] * 40, [200, 3, 40, 17, 1]):
            prompts = [random_prompt(length) for length in lengths]
            llm.generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True, **wish), use_tqdm=False)
    assert compiled == []
