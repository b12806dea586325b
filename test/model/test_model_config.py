"""ModelConfig: every spelling of config.json, cases 55, 57, 58, 60, 71, 72 and 77."""

import json
import subprocess
import sys

import pytest
import torch
import transformers as T
from model.harness import SIZES, Driver, load, make_reference, random_ids, reference_logits, reload_reference
from safetensors.torch import save_file

from lightllm.common.basemodel.layer_infer.template.rope_scaling import static_inverse_frequencies
from lightllm.common.basemodel.model_config import ConfigError, ModelConfig
from lightllm.models.registry import model_class

LLAMA = dict(
    model_type="llama",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)


def read(path, **changes) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(LLAMA | changes))
    return ModelConfig.from_pretrained(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny LLaMA whose config.json the tests rewrite; `rewrite` returns its path."""
    path = tmp_path_factory.mktemp("llama")
    make_reference(T.LlamaConfig(**SIZES, num_labels=2)).save_pretrained(path)
    original = json.loads((path / "config.json").read_text())
    for key in ("rope_parameters", "rope_theta", "rope_scaling"):
        original.pop(key, None)

    def rewrite(**changes):
        (path / "config.json").write_text(json.dumps(original | changes))
        return path

    return rewrite


def logits(path, n=60):
    return Driver(load(path)).prefill(random_ids(n), 16)[1]


def same_as_transformers(path, n=60):
    torch.testing.assert_close(
        logits(path, n), reference_logits(reload_reference(path), random_ids(n)), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    "spelling",
    [
        dict(rope_theta=5e5),
        dict(rope_parameters=dict(rope_type="default", rope_theta=500000)),
        dict(rope_theta=5e5, rope_parameters=dict(rope_type="default", rope_theta=5e5)),
        dict(rope_theta=5e5, rope_parameters=dict(rope_type="default", rope_theta=5e5), rope_scaling=None),
    ],
)
def test_case_55_rope_theta_in_either_place(checkpoint, spelling):
    path = checkpoint(**spelling)
    same_as_transformers(path)
    assert ModelConfig.from_pretrained(path).rope.theta == 5e5
    assert (logits(path) - logits(checkpoint(rope_theta=1e4))).abs().max() > 0.1


SCALINGS = {
    "linear": dict(factor=3),
    "dynamic": dict(factor=3.0),
    "yarn": dict(factor=16, original_max_position_embeddings=16),
    "llama3": dict(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=16),
    "longrope": dict(
        short_factor=[1 + i / 8 for i in range(8)],
        long_factor=[2 + i for i in range(8)],
        factor=4,
        original_max_position_embeddings=16,
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_case_57_type_or_rope_type(checkpoint, kind):
    sizes = dict(max_position_embeddings=32) if kind == "dynamic" else {}
    same_as_transformers(checkpoint(**sizes, rope_theta=1e4, rope_scaling=dict(rope_type=kind, **SCALINGS[kind])))
    want = logits(checkpoint(**sizes, rope_theta=1e4, rope_scaling=dict(rope_type=kind, **SCALINGS[kind])))
    scaling = {k: float(v) if k == "factor" else v for k, v in SCALINGS[kind].items()}
    spellings = [
        dict(rope_theta=1e4, rope_scaling=dict(type=kind, **scaling)),
        dict(rope_parameters=dict(rope_type=kind, rope_theta=1e4, **scaling)),
        dict(rope_parameters=dict(type=kind, rope_theta=1e4, **scaling)),
    ]
    for spelling in spellings:
        assert torch.equal(logits(checkpoint(**sizes, **spelling)), want)
    plain = logits(checkpoint(**sizes, rope_theta=1e4))[:58] if kind != "dynamic" else None
    assert plain is None or (plain - want[:58]).abs().max() > 0.05


@pytest.mark.parametrize(
    ("family", "word", "kind"), [("llama", "su", "longrope"), ("phi3", "yarn", "longrope"), ("llama", "yarn", "yarn")]
)
def test_case_57_older_words(tmp_path, family, word, kind):
    config = read(tmp_path, model_type=family, rope_scaling=dict(type=word, **SCALINGS["longrope"]))
    assert config.rope.rope_type == kind


@pytest.mark.parametrize("scaling", [dict(type="foo", factor=2.0), dict(rope_type="foo")])
def test_case_57_unknown_scaling_is_refused_by_name(tmp_path, scaling):
    with pytest.raises(ConfigError, match="foo"):
        read(tmp_path, rope_scaling=scaling)


def test_scaling_without_its_parameters_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"llama3.*low_freq_factor"):
        read(tmp_path, rope_scaling=dict(type="llama3", factor=8.0))


@pytest.mark.parametrize(
    ("extra", "factor"),
    [
        ({}, 1.27726),
        (dict(attention_factor=1.0), 1.0),
        (dict(mscale=1, mscale_all_dim=1), 1.0),
        (dict(truncate=False), 1.27726),
        (dict(finetuned=True), 1.27726),  # YaRN's own checkpoints say so, which changes nothing
    ],
)
def test_case_58_yarn_factors(checkpoint, extra, factor):
    scaling = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=64, **extra)
    path = checkpoint(max_position_embeddings=1024, rope_theta=1e4, rope_scaling=scaling)
    same_as_transformers(path, 130)
    assert static_inverse_frequencies(ModelConfig.from_pretrained(path).rope, 16)[1] == pytest.approx(factor, abs=1e-5)


def test_case_58_truncate_matters(tmp_path):
    scaling = dict(type="yarn", factor=16.0, original_max_position_embeddings=64)
    whole = static_inverse_frequencies(read(tmp_path, rope_scaling=scaling).rope, 16)[0]
    exact = static_inverse_frequencies(read(tmp_path, rope_scaling=scaling | dict(truncate=False)).rope, 16)[0]
    assert not torch.equal(whole, exact)


def test_case_60_yarn_context_is_not_multiplied(checkpoint):
    scaling = dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=256, rope_theta=1e4)
    path = checkpoint(max_position_embeddings=4096, rope_parameters=scaling)
    config = ModelConfig.from_pretrained(path)
    assert config.max_position_embeddings == 4096
    ids = random_ids(4096)
    _, got = Driver(load(path), num_slots=4096).prefill(ids, 1024)
    want = reference_logits(reload_reference(path), ids)
    torch.testing.assert_close(got[-8:], want[-8:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_linear_and_dynamic_stretch_the_context(tmp_path, kind):
    assert read(tmp_path, rope_scaling=dict(type=kind, factor=4.0)).max_position_embeddings == 2048


QWEN = LLAMA | dict(model_type="qwen2", num_hidden_layers=4)


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        (dict(use_sliding_window=False, sliding_window=8), (None,) * 4),
        (dict(sliding_window=8, max_window_layers=0), (None,) * 4),
        (dict(use_sliding_window=True, sliding_window=8, max_window_layers=2), (None, None, 8, 8)),
        (dict(use_sliding_window=True, sliding_window=8, max_window_layers=4), (None,) * 4),
        (
            dict(use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2),
            (8, None) * 2,
        ),
        (dict(use_sliding_window=False, sliding_window=8, layer_types=["sliding_attention"] * 4), (None,) * 4),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_case_71_qwen_window_switch(tmp_path, settings, windows, family):
    assert read(tmp_path, **QWEN | dict(model_type=family), **settings).windows == windows


@pytest.mark.parametrize(
    ("settings", "window"), [({}, 4096), (dict(sliding_window=None), None), (dict(sliding_window=9), 9)]
)
def test_mistral_window(tmp_path, settings, window):
    assert read(tmp_path, **LLAMA | dict(model_type="mistral"), **settings).windows == (window,) * 2


@pytest.mark.parametrize("family", ["mistral", "phi3", "starcoder2", "qwen3_moe"])
def test_words_of_other_families_move_no_window(tmp_path, family):
    """transformers ignores them: Qwen2's alone know both."""
    others = dict(max_window_layers=1) | (dict(use_sliding_window=False) if family != "qwen3_moe" else {})
    own = dict(model_type=family, sliding_window=8) | (dict(use_sliding_window=True) if family == "qwen3_moe" else {})
    assert read(tmp_path, **LLAMA | own | others).windows == (8, 8)


def test_llama_has_no_window_whatever_its_config_says(tmp_path):
    assert read(tmp_path, **LLAMA, sliding_window=8).windows == (None,) * 2


def test_a_rotary_part_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0\.5"):
        read(tmp_path, **LLAMA, partial_rotary_factor=0.5)


@pytest.mark.parametrize("layer_types", [["full_attention"], ["chunked_attention"] * 4])
def test_odd_layer_types_are_refused(tmp_path, layer_types):
    with pytest.raises(ConfigError, match="layer_types"):
        read(tmp_path, **QWEN, use_sliding_window=True, layer_types=layer_types)


def write(path, name, value):
    (path / name).write_text(json.dumps(value))


TOKENIZER = dict(added_tokens=[dict(id=258, content="<|im_end|>")], model=dict(vocab={"</s>": 5}))


@pytest.mark.parametrize(
    ("config", "files", "ids"),
    [
        (256, {"generation_config.json": dict(eos_token_id=[256, 258])}, (256, 258)),
        ([256, 257], {}, (256, 257)),
        (256, {"tokenizer_config.json": dict(eos_token="<|im_end|>"), "tokenizer.json": TOKENIZER}, (256, 258)),
        (None, {"tokenizer_config.json": dict(eos_token=dict(content="</s>")), "tokenizer.json": TOKENIZER}, (5,)),
        (None, {"special_tokens_map.json": dict(eos_token="</s>"), "tokenizer.json": TOKENIZER}, (5,)),
        (
            256,
            {
                "generation_config.json": dict(eos_token_id=256),
                "tokenizer_config.json": dict(eos_token="x", added_tokens_decoder={"9": dict(content="x")}),
            },
            (9, 256),
        ),
        (None, {"generation_config.json": dict()}, ()),
    ],
)
def test_case_72_eos_is_the_union(tmp_path, config, files, ids):
    for name, value in files.items():
        write(tmp_path, name, value)
    assert read(tmp_path, eos_token_id=config).eos_token_ids == ids


def test_case_72_llama_without_eos_has_transformers_default(tmp_path):
    assert read(tmp_path).eos_token_ids == (T.LlamaConfig().eos_token_id,)
    write(tmp_path, "generation_config.json", dict(eos_token_id=[256]))
    assert read(tmp_path).eos_token_ids == (256,), "the default is of no vocabulary but LLaMA's own"


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes", "somethingnew"])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])  # the second is the older one
def test_case_77_quantized_checkpoints_are_refused_by_method(tmp_path, key, method):
    with pytest.raises(ConfigError, match=method):
        read(tmp_path, **{key: dict(quant_method=method, bits=4)})


def test_case_77_checkpoints_of_mlx_are_refused_as_quantized(tmp_path):
    with pytest.raises(ConfigError, match="quantized"):
        read(tmp_path, quantization=dict(group_size=64, bits=4))


def test_case_77_quantization_in_a_file_of_its_own(tmp_path):
    write(tmp_path, "quantize_config.json", dict(bits=4))
    with pytest.raises(ConfigError, match=r"quantize_config\.json"):
        read(tmp_path)


@pytest.mark.parametrize("spelling", [dict(dtype="bfloat16"), dict(torch_dtype="torch.bfloat16")])
def test_dtype_of_v4_and_v5(tmp_path, spelling):
    assert read(tmp_path, **spelling).dtype == "bfloat16"


@pytest.mark.parametrize(
    "field", ["model_type", "vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers"]
)
def test_a_missing_field_is_named(tmp_path, field):
    with pytest.raises(ConfigError, match=field):
        read(tmp_path, **{field: None})


@pytest.mark.parametrize("text", [None, '{"model_type": "llama",', "[1]"])
def test_a_broken_config_is_named(tmp_path, text):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_pretrained(tmp_path)


def test_unknown_model_type_lists_the_known(tmp_path):
    with pytest.raises(ConfigError, match=r"'bamba'.*llama.*qwen3"):
        model_class("bamba")


def test_case_66_heads_that_tp_does_not_divide(tmp_path):
    config = read(tmp_path, num_attention_heads=6, num_key_value_heads=2, head_dim=16)
    with pytest.raises(ConfigError, match=r"4.*num_attention_heads 6"):
        config.check_tensor_parallel(4)
    with pytest.raises(ConfigError, match=r"5.*num_attention_heads 4"):
        read(tmp_path).check_tensor_parallel(5)


def test_config_and_registry_need_no_torch():
    code = (
        "import lightllm.common.basemodel.model_config, lightllm.models.registry, sys; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", "small"),
        ("head_dim", "16"),
        ("num_key_value_heads", 2.5),
        ("max_position_embeddings", "4k"),
        ("rope_theta", [1]),
        ("rope_theta", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("hidden_act", 3),
        ("rope_scaling", "linear"),
        ("rope_scaling", dict(type="linear", factor="two")),
        ("rope_scaling", dict(type="longrope", short_factor=1, long_factor=[1])),
    ],
)
def test_a_malformed_field_is_named(tmp_path, field, value):
    name = r"factor" if isinstance(value, dict) else field.replace("rope_scaling", "rope_parameters")
    with pytest.raises(ConfigError, match=name):
        read(tmp_path, **{field: value})


@pytest.mark.parametrize("value", [3, "12", [1, "2"], {"1": 2}, [True]])
def test_lists_of_layers_are_checked(tmp_path, value):
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        read(tmp_path, mlp_only_layers=value).raw.layers("mlp_only_layers")


@pytest.mark.parametrize("value", [3, [1], {"a": {}}, {"1": 2}])
def test_words_of_single_layers_are_checked(tmp_path, value):
    one = read(tmp_path, per_layer_config={"01": {"head_dim": 8}})
    assert one.raw.of_layer("per_layer_config", 1) == {"head_dim": 8}
    with pytest.raises(ConfigError, match="per_layer_config"):
        read(tmp_path, per_layer_config=value).raw.of_layer("per_layer_config", 1)


@pytest.mark.parametrize("window", [0, -1, "8", True])
def test_a_window_that_is_no_length_is_refused(tmp_path, window):
    with pytest.raises(ConfigError, match="sliding_window"):
        read(tmp_path, model_type="mistral", sliding_window=window)


def test_a_window_that_is_switched_off_may_be_anything(tmp_path):
    assert read(tmp_path, **QWEN, use_sliding_window=False, sliding_window=0).windows == (None,) * 4


def test_yarn_stretches_a_context_that_is_not_stretched_yet(tmp_path):
    """As Qwen2.5's model card writes it; case 60 has the stretched length in max_position_embeddings."""
    yarn = dict(type="yarn", factor=4.0, original_max_position_embeddings=32768)
    assert read(tmp_path, max_position_embeddings=32768, rope_scaling=yarn).max_position_embeddings == 131072


def test_command_r_has_the_context_that_its_own_word_tells(tmp_path):
    sizes = dict(max_position_embeddings=8192, model_max_length=131072)
    assert read(tmp_path, model_type="cohere", **sizes).max_position_embeddings == 131072
    assert read(tmp_path, model_type="llama", **sizes).max_position_embeddings == 8192


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_without_a_dtype_it_is_that_of_the_weights(tmp_path, dtype):
    save_file({"a": torch.zeros(64, dtype=dtype), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert read(tmp_path).dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("content", [b"", b"garbage!", b"\xff" * 16])
def test_a_damaged_file_has_no_dtype(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert read(tmp_path).dtype == "float32"


@pytest.mark.parametrize("tokens", [["x"], [None, 3], "x", {"a": 1}])
def test_odd_added_tokens_are_passed_over(tmp_path, tokens):
    write(tmp_path, "tokenizer_config.json", dict(eos_token="x", added_tokens_decoder=tokens))
    write(tmp_path, "tokenizer.json", dict(added_tokens=tokens, model=dict(vocab={"x": 7})))
    assert read(tmp_path).eos_token_ids == (2, 7)
