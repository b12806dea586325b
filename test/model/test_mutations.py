"""Is the golden comparison sensitive? Break one axis at a time: every break must move the logits, and visibly."""

import dataclasses

import pytest
import torch
import transformers as T
from model.breaks import attention, layers, spec
from model.harness import SIZES, Driver, load, make_reference, random_ids, reference_logits

from lightllm.common.basemodel.layer_infer.template.feed_forward import GatedFeedForward
from lightllm.common.basemodel.layer_infer.template.norm import RMSNorm
from lightllm.common.basemodel.layer_infer.template.position import make_rope
from lightllm.common.basemodel.normed import tensor_of
from lightllm.common.basemodel.triton_kernel.rotary_emb import rotary_copy_kv

YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, rope_theta=1e4)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=1e4)
CONFIGS = {
    "llama": T.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "yarn": T.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama3": T.LlamaConfig(**SIZES, rope_parameters=LLAMA3 | dict(original_max_position_embeddings=16)),
    "qwen3": T.Qwen3Config(**SIZES, head_dim=32, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "mistral": T.MistralConfig(**SIZES, sliding_window=7),
}
IDS = random_ids(40)


class Interleaved:
    """Pairs (2i, 2i + 1) instead of (i, i + half)."""

    def __init__(self, rope):
        self.rope, self.angles = rope, rope.angles

    def write(self, q, k, v, angles, layer_kv, slots):
        apart = lambda x: torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        turned = apart(q)
        rotary_copy_kv(turned, apart(k), v, *angles, layer_kv, slots)
        return turned


class Scaled(RMSNorm):
    def __call__(self, x, w):
        return super().__call__(x, w) * 1.05

    def add(self, hidden, residual, w):
        normed, total = super().add(hidden, residual, w)
        return tensor_of(normed) * 1.05, total


def rope(model, **changes):
    model.position = make_rope(dataclasses.replace(model.config.rope, **changes), model.head_dim, 256, model.device)
    attention(position=model.position)(model)


def interleave(model):
    model.position = Interleaved(model.position)
    attention(position=model.position)(model)


def without_bias(model):
    for weights in model.layer_weights:
        weights["down"].bias = None


BREAKS = {
    "rope pairing": ("llama", interleave),
    "rope theta": ("llama", lambda m: rope(m, theta=9000.0)),
    "rope scaling type": ("yarn", lambda m: rope(m, rope_type="default")),
    "yarn factor on cos and sin": (
        "yarn",
        lambda m: rope(m, parameters=m.config.rope.parameters | dict(attention_factor=1.0)),
    ),
    "yarn original length": ("yarn", lambda m: rope(m, original_max_position_embeddings=32)),
    "llama3 original length": ("llama3", lambda m: rope(m, original_max_position_embeddings=32)),
    "window + 1": ("mistral", spec(lambda s: dict(window=s.window + 1))),
    "no window": ("mistral", spec(lambda s: dict(window=None))),
    "window in every layer": ("qwen3", spec(lambda s: dict(window=9))),
    "no qk norm": ("qwen3", attention(qk_norm=None)),
    "attention scale": ("llama", spec(lambda s: dict(scale=s.scale * 1.05))),
    "activation": ("llama", layers(lambda la: dataclasses.replace(la, feed_forward=GatedFeedForward("gelu")))),
    "norm eps": ("llama", layers(lambda la: dataclasses.replace(la, norm=RMSNorm(1e-2)))),
    "norm scale": ("llama", layers(lambda la: dataclasses.replace(la, norm=Scaled(la.norm.eps)))),
    "a bias": ("llama", without_bias),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    found = {}
    for name, config in CONFIGS.items():
        path = tmp_path_factory.mktemp(name)
        model = make_reference(config)
        model.save_pretrained(path)
        found[name] = path, reference_logits(model, IDS)
    return found


@pytest.mark.parametrize("name", BREAKS)
def test_break_is_caught(references, name):
    family, break_it = BREAKS[name]
    path, want = references[family]
    model = load(path)
    assert (Driver(model).prefill(IDS)[1] - want).abs().max() < 1e-4
    break_it(model)
    assert (Driver(model).prefill(IDS)[1] - want).abs().max() > 1e-2
