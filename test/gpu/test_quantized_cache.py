"""Caches in 8 bits on a GPU, with graphs and without, against the same on the CPU."""

import itertools
from pathlib import Path

import pytest
import torch
from support.step_driver import StepDriver, make_runner, random_prompts, save_random_model

from lightllm.common.basemodel.cuda_graph import ladder, token_ladder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kv_type", ["int8kv", "fp8kv"])
@pytest.mark.parametrize("graphs", [False, True])
def test_logprobs_are_those_of_the_cpu(kv_type: str, graphs: bool, tmp_path: Path) -> None:
    save_random_model(tmp_path)
    sizes = dict(graph_sizes=ladder(8), mixed_sizes=token_ladder(128)) if graphs else {}
    outcomes = []
    for options in (dict(device=torch.device("cpu")), dict(device=torch.device("cuda", 0), **sizes)):
        driver = StepDriver(make_runner(tmp_path, kv_type=kv_type, **options), chunk=20)
        prompts = random_prompts([60, 9, 33])
        sequences = [driver.sequence(p, max_new_tokens=12, do_sample=False, prompt_logprobs=1) for p in prompts]
        driver.run(sequences)
        outcomes.append([[*s.prompt_logprobs.values(), *s.logprobs] for s in sequences])
    on_cpu, on_gpu = (torch.tensor([*itertools.chain(*rows)]) for rows in outcomes)
    assert (on_cpu - on_gpu).abs().median() < 0.01
