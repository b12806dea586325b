"""Every family's tiny checkpoint on a GPU, with the Triton kernels, against the same model on the CPU."""

import dataclasses

import pytest
import torch
from model.harness import Driver, load, make_reference, random_ids
from model.remote_code import BUILDERS
from model.test_golden import CONFIGS, LENGTHS

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NEW_TOKENS = 6
GENTLE = 0.1  # random weights make logits of tens, of which bfloat16 keeps no tenths

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("name", [*CONFIGS, *BUILDERS])
def test_gpu_gives_what_the_cpu_gives(tmp_path, name):
    if name in BUILDERS:
        BUILDERS[name](tmp_path)
        vocab = 131
    else:
        make_reference(CONFIGS[name]).save_pretrained(tmp_path)
        vocab = CONFIGS[name].vocab_size
    prompts = [random_ids(n, seed=n, vocab=vocab) for n in LENGTHS]
    on_cpu, on_gpu = load(tmp_path, device=CPU), load(tmp_path, device=GPU)
    for chunk in (10**6, 7):
        want = Driver(on_cpu).generate(prompts, NEW_TOKENS, chunk)
        assert Driver(on_gpu).generate(prompts, NEW_TOKENS, chunk) == want
    half = load(tmp_path, device=GPU, dtype=torch.bfloat16)
    for model in (on_cpu, half):
        model.post = dataclasses.replace(model.post, scale=model.post.scale * GENTLE)
    for prompt in prompts:
        want, got = (Driver(model).prefill(prompt)[1][-1].log_softmax(-1) for model in (on_cpu, half))
        token = want.argmax()
        assert abs(want[token] - got[token]) < 0.05
