"""A config.json that leaves words out means what transformers takes it to mean, for every family that it has."""

import json

import pytest
import torch
import transformers as T
from model.harness import SIZES, Driver, load, make_reference, random_ids, reference_logits

from lightllm.common.basemodel.model_config import ModelConfig
from lightllm.models.registry import MODEL_REGISTRY

TOLD = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=32, vocab_size=131, intermediate_size=96)
LATENT = {"deepseek_v2", "deepseek_v3", "minicpm3"}  # have no KV heads, whatever their number in the config
NO_CLASS = {"aquila", "baichuan", "chatglm", "internlm", "internlm2", "minicpm", "gemma4_e", "gemma4_moe"}
FOUR_TIMES_HIDDEN = {"bloom", "gpt_bigcode"}  # do not tell the size of their feed-forward


@pytest.mark.parametrize("family", sorted(set(MODEL_REGISTRY) - NO_CLASS))
def test_absent_words_have_transformers_defaults(tmp_path, family):
    told = TOLD | dict(dtype="float32")
    if family in LATENT:
        told |= dict(num_key_value_heads=TOLD["num_attention_heads"], num_experts_per_tok=3)
    if family in FOUR_TIMES_HIDDEN:
        told.pop("intermediate_size")
    whole = T.AutoConfig.for_model(family, **told).to_dict()
    for name, values in ("few", told), ("whole", whole):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values | dict(model_type=family)))
    assert ModelConfig.from_pretrained(tmp_path / "few") == ModelConfig.from_pretrained(tmp_path / "whole")
    first, second = (
        Driver(load(tmp_path / name, load_format="random")).prefill(random_ids(9))[1] for name in ("few", "whole")
    )
    assert torch.equal(first, second)


def test_what_gemma_calls_gelu(tmp_path):
    """Its first releases name the exact one; transformers takes the approximation, with which they were trained."""
    words = TOLD | dict(dtype="float32", hidden_act="gelu", hidden_activation=None)
    (tmp_path / "config.json").write_text(json.dumps(words | dict(model_type="gemma")))
    assert ModelConfig.from_pretrained(tmp_path).hidden_act == T.GemmaConfig(**words).hidden_act != "gelu"


def test_what_later_gemmas_call_gelu(tmp_path):
    """The exact one, as transformers takes it."""
    model = make_reference(T.Gemma2Config(**SIZES, head_dim=32, hidden_activation="gelu"))
    model.save_pretrained(tmp_path)
    ids = random_ids(40)
    got = Driver(load(tmp_path)).prefill(ids)[1]
    torch.testing.assert_close(got, reference_logits(model, ids), rtol=0, atol=1e-4)
