"""GGUF of the LLaMA architecture -> Hugging Face directory. The `gguf` package is loaded when first needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

SHARD_BYTES = 1 << 30
_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Splits of byte-level BPE by `tokenizer.ggml.pre`, as in llama.cpp's llama-vocab.cpp; None is GPT-2's own.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA3_SPLIT, "llama3": _LLAMA3_SPLIT, "llama-v3": _LLAMA3_SPLIT, "gpt-2": None}
_LLAMA3 = [pre for pre, split in _SPLITS.items() if split == _LLAMA3_SPLIT]
_DIGITS_APART = "smollm"
# Tokens that end a turn. Many files name one of them at most; llama.cpp too tells them by their texts.
_TURN_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<end_of_turn>"}


class GgufError(ValueError):
    """A GGUF file that cannot be converted; the message names the file and why."""


def convert_gguf(path: Path, directory: Path) -> None:
    """Write config.json, generation_config.json, float32 safetensors and the tokenizer of `path` into `directory`.

    Weights are dequantized exactly; config.json names the type to serve them in on a GPU, float16 for a float16 file
    and bfloat16 for all others.
    Raises GgufError for another architecture, an unknown tensor, rope scaling or tokenizer, a damaged file, and, with
    the pip command, without the gguf package.
    """
    reader = _open(path)
    try:
        config = _config(reader)
        eos = [config["eos_token_id"]] if isinstance(config["eos_token_id"], int) else config["eos_token_id"]
        _write_json(directory / "config.json", config)
        _write_json(directory / "generation_config.json", {"bos_token_id": config["bos_token_id"], "eos_token_id": eos})
        _write_weights(_tensors(reader, config), directory)
        _save_tokenizer(reader, path, directory)
    except GgufError as error:
        raise GgufError(f"{path}: {error}") from error


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise GgufError(f"{path} needs the gguf package: pip install gguf") from None
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise GgufError(f"{path} is no readable GGUF file: {error}") from error


def _value(reader: GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _required(reader: GGUFReader, key: str) -> Any:
    value = _value(reader, key)
    if value is None:
        raise GgufError(f"the field {key} is missing")
    return value


def _config(reader: GGUFReader) -> dict[str, Any]:
    architecture = _required(reader, "general.architecture")
    if architecture != "llama":
        raise GgufError(f"architecture {architecture!r} is not supported, only 'llama'")
    if experts := _value(reader, "llama.expert_count", 0):
        raise GgufError(f"a mixture of {experts} experts is not supported")
    if (parts := _value(reader, "split.count", 1)) > 1:
        raise GgufError(f"one of {parts} parts of a model: llama-gguf-split --merge makes one file of them")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if (embedding := tensors.get("token_embd.weight")) is None:
        raise GgufError("the tensor token_embd.weight is missing")
    hidden = _required(reader, "llama.embedding_length")
    heads = _required(reader, "llama.attention.head_count")
    head_dim = _value(reader, "llama.attention.key_length") or hidden // heads
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (value := _value(reader, key, head_dim)) != head_dim:
            raise GgufError(f"{key} {value} differs from the head dimension {head_dim}: not supported")
    end = [_value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    end += [id for id, text in enumerate(_value(reader, "tokenizer.ggml.tokens", [])) if text in _TURN_ENDS]
    eos = list(dict.fromkeys(token_id for token_id in end if token_id is not None))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(embedding.shape[1]),  # GGUF lists dimensions innermost first
        "hidden_size": hidden,
        "intermediate_size": _required(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _required(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _required(reader, "llama.context_length"),
        "rms_norm_eps": _shortest(_required(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(reader),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "float16" if embedding.tensor_type.name == "F16" else "bfloat16",
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }


def _shortest(value: float) -> float:
    """The shortest decimal of a float32 that a GGUF field holds: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(reader: GGUFReader) -> dict[str, Any]:
    """LLaMA 3's scaling is stored as one divisor per frequency, which longrope with a factor of 1 says exactly."""
    parameters: dict[str, Any] = {"rope_theta": _shortest(_value(reader, "llama.rope.freq_base", 10000.0))}
    scaling = _value(reader, "llama.rope.scaling.type", "none")
    factors = [tensor.data.astype(float).tolist() for tensor in reader.tensors if tensor.name == _ROPE_FACTORS]
    if factors and scaling == "none":
        return parameters | {
            "rope_type": "longrope",
            "short_factor": factors[0],
            "long_factor": factors[0],
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": _required(reader, "llama.context_length"),
        }
    if scaling == "linear" and not factors:
        return parameters | {"rope_type": "linear", "factor": _shortest(_required(reader, "llama.rope.scaling.factor"))}
    if scaling == "none":
        return parameters | {"rope_type": "default"}
    raise GgufError(f"rope scaling {scaling!r}{' with ' + _ROPE_FACTORS if factors else ''} is not supported")


def _tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face name and float32 value of each tensor."""
    from gguf import dequantize

    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        name = _hf_name(tensor)
        try:
            value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise GgufError(f"tensor {tensor.name}: {error}") from error
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        yield name, np.ascontiguousarray(_rotate_halves(value, config[heads]) if heads else value)


def _hf_name(tensor: ReaderTensor) -> str:
    if tensor.name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[tensor.name]
    match tensor.name.split("."):
        case ["blk", layer, part, kind] if part in _OF_LAYER:
            return f"model.layers.{layer}.{_OF_LAYER[part]}.{kind}"
    raise GgufError(f"the tensor {tensor.name} does not belong to the LLaMA architecture")


def _rotate_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, ...] from GGUF's rotary order, neighbours in pairs, back to halves in pairs."""
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _write_weights(tensors: Iterator[tuple[str, np.ndarray]], directory: Path) -> None:
    """Shards of about SHARD_BYTES with an index, so that no more than one is in memory."""
    from safetensors.numpy import save_file

    weight_map: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    number = total = size = 0

    def flush() -> None:
        file = f"model-{number:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, value in tensors:
        if shard and size + value.nbytes > SHARD_BYTES:
            flush()
            number, size = number + 1, 0
        shard[name] = value
        size += value.nbytes
        total += value.nbytes
    flush()
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _save_tokenizer(reader: GGUFReader, path: Path, directory: Path) -> None:
    """Read by transformers; what `tokenizer.ggml.pre` says of byte-level BPE, which it may not know, is set here."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind, pre = _required(reader, "tokenizer.ggml.model"), _value(reader, "tokenizer.ggml.pre", "default")
    split = _pre_tokenizer(pre) if kind == "gpt2" else None
    read = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
    backend = read.backend_tokenizer
    if split is not None:
        backend.pre_tokenizer = split
    if split is not None and pre in _LLAMA3:  # what no field of their files says
        backend.model.ignore_merges = True
        begins = read.bos_token
        if begins is not None and _value(reader, "tokenizer.ggml.add_bos_token", True):
            backend.post_processor = TemplateProcessing([begins, "$A"], special_tokens=[(begins, read.bos_token_id)])
    plain = PreTrainedTokenizerFast(  # a class that takes the tokenizer as it is: LlamaTokenizer would build its own
        tokenizer_object=backend,
        **{name: getattr(read, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")},
        chat_template=_value(reader, "tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
    plain.save_pretrained(directory)


def _pre_tokenizer(name: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if name == _DIGITS_APART:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif name not in _SPLITS:
        known = ", ".join(sorted([_DIGITS_APART, *_SPLITS]))
        raise GgufError(f"the pre-tokenizer {name!r} (tokenizer.ggml.pre) is none of {known}")
    elif (pattern := _SPLITS[name]) is None:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level]
    return pre_tokenizers.Sequence(steps)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
