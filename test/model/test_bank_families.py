"""Cases of the bug bank about families: 69 (Gemma 2), 80 (Baichuan), 81 (MiniCPM), 86 for each kind of attention."""

import json

import pytest
import torch
import transformers as T
from model.harness import (
    SIZES,
    Driver,
    load,
    make_reference,
    random_ids,
    reference_generate,
    reference_logits,
)
from model.remote_code import BUILDERS
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_json


def test_case_69_gemma2_past_its_window(tmp_path):
    """60 tokens and 60 more with a window of 8, caps that matter, and a scale that is not that of head_dim."""
    caps = dict(attn_logit_softcapping=5.0, final_logit_softcapping=3.0, query_pre_attn_scalar=40)
    config = T.Gemma2Config(**SIZES | dict(num_hidden_layers=4), head_dim=32, sliding_window=8, **caps)
    model = make_reference(config)
    model.save_pretrained(tmp_path)
    ids = random_ids(60, seed=2)
    want, gap = reference_generate(model, ids, 60)
    assert gap > 1e-4, "choose another seed"
    assert Driver(load(tmp_path)).generate([ids], 60) == [want]
    for name, value in (*caps.items(), ("sliding_window", 8)):
        edit_json(tmp_path / "config.json", **{name: value + 1})
        changed = Driver(load(tmp_path)).prefill(ids)[1]
        edit_json(tmp_path / "config.json", **{name: value})
        assert (changed - reference_logits(model, ids)).abs().max() > 1e-3, name


def scale_head_rows(path):
    tensors = load_file(path / "model.safetensors")
    factors = torch.rand(len(tensors["lm_head.weight"]), 1, generator=torch.Generator().manual_seed(0)) + 0.5
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * factors
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(("name", "invariant"), [("baichuan2-7b", True), ("baichuan-7b", False)])
def test_case_80_only_baichuan2_is_invariant_to_factors_of_its_heads_rows(tmp_path, name, invariant):
    BUILDERS[name](tmp_path)
    ids = random_ids(20)
    before = Driver(load(tmp_path)).prefill(ids)[1]
    scale_head_rows(tmp_path)
    after = Driver(load(tmp_path)).prefill(ids)[1]
    assert torch.allclose(before, after, rtol=0, atol=1e-4) is invariant


def test_case_80_rope_in_the_form_of_7b_and_alibi_in_that_of_13b(tmp_path):
    ids = random_ids(20)
    forms = {}
    for name in ("baichuan-7b", "baichuan-13b"):
        want = BUILDERS[name](tmp_path / name)(ids)
        forms[name] = Driver(load(tmp_path / name)).prefill(ids)[1]
        torch.testing.assert_close(forms[name], want, rtol=0, atol=1e-4)
    assert (forms["baichuan-7b"] - forms["baichuan-13b"]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["scale_emb", "scale_depth", "dim_model_base"])
def test_case_81_each_scaling_of_minicpm_is_needed(tmp_path, name):
    reference = BUILDERS["minicpm"](tmp_path)
    ids = random_ids(20)
    torch.testing.assert_close(Driver(load(tmp_path)).prefill(ids)[1], reference(ids), rtol=0, atol=1e-4)
    config = json.loads((tmp_path / "config.json").read_text())
    edit_json(tmp_path / "config.json", **{name: config[name] * 1.2})
    assert (Driver(load(tmp_path)).prefill(ids)[1] - reference(ids)).abs().max() > 1e-2


LATENT = dict(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
ATTENTION = {
    "latent": T.DeepseekV3Config(
        **SIZES | dict(num_key_value_heads=4), **LATENT, first_k_dense_replace=3, n_routed_experts=8
    ),
    "window": T.MistralConfig(**SIZES, sliding_window=20),
    "alibi": T.BloomConfig(vocab_size=131, hidden_size=48, n_layer=3, n_head=6, initializer_range=0.2),
    "chunks": T.Llama4TextConfig(
        **SIZES, attention_chunk_size=12, num_local_experts=2, intermediate_size_mlp=80, head_dim=16
    ),
    "sinks": T.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=9),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_case_86_chunks_of_16_while_others_decode(tmp_path, kind):
    """Prompts around the edges of a chunk, all at once: short ones decode while long ones are still in chunks."""
    model = make_reference(ATTENTION[kind])
    model.save_pretrained(tmp_path)
    prompts = [random_ids(n, seed=n) for n in (15, 16, 17, 31, 32, 33, 200)]
    got = Driver(load(tmp_path)).generate(prompts, 6, chunk=16)
    for ids, tokens in zip(prompts, got):
        want, gap = reference_generate(model, ids, 6)
        assert tokens == want or gap < 1e-4
