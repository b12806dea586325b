"""Prompts that begin alike, under rope scalings in which keys depend on the length of the sequence (case 84)."""

import pytest
from model.harness import make_reference, random_ids, reference_generate
from model.test_golden import CONFIGS
from support.checkpoints import byte_tokenizer

from lightllm import LLM, SamplingParams


@pytest.mark.parametrize("name", ["llama-longrope", "llama-dynamic"])
def test_a_short_prompts_keys_do_not_serve_a_long_one(tmp_path, name):
    make_reference(CONFIGS[name]).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    llm = LLM(str(tmp_path))
    ids = random_ids(45)
    for prompt in (ids[:20], ids, ids[:20]):
        want, gap = reference_generate(make_reference(CONFIGS[name]), prompt, 6)
        assert gap > 1e-3, "choose another prompt"
        (output,) = llm.generate([prompt], SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True))
        assert list(output.outputs[0].token_ids) == want
