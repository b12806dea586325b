"""ModelConfig: what a checkpoint's config.json says, in one spelling. Torch-free; the only home of config aliases."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lightllm.common.basemodel.config_reader import ConfigError, RawConfig, of_text, read_json
from lightllm.common.basemodel.config_words import ACTIVATIONS, LEGACY_ACTIVATIONS, kind_of
from lightllm.common.basemodel.eos_token_ids import eos_token_ids
from lightllm.common.basemodel.rope_config import RopeConfig, read_rope, rotary_part

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # as safetensors call them: as we do
_LAYER_TYPES = ("full_attention", "sliding_attention")
_LANGUAGE_MODELS = re.compile(
    r"\w+(ForCausalLM|LMHeadModel|ForConditionalGeneration)$|(Aquila|Bloom|ChatGLM)Model$"  # the last three have a head
)
_ENCODERS = re.compile(
    r"(albert|bert|camembert|convbert|deberta(-v2)?|distilbert|electra|ernie|esm|eurobert|modernbert|mpnet|nomic_bert"
    r"|roberta|rembert|xlm-roberta(-xl)?|xlnet)$"
)


@dataclass(frozen=True)
class ModelConfig:
    model_type: str  # where models of several kinds share one, the kind's
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int  # dimensions of a head that rotary embeddings turn
    max_position_embeddings: int  # the context that is enforced
    rms_norm_eps: float  # of the norms, whatever their kind
    hidden_act: str
    tie_word_embeddings: bool
    dtype: str  # "float32", "float16" or "bfloat16"
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: how many last positions a query sees, None for all
    eos_token_ids: tuple[int, ...]
    raw: RawConfig = field(repr=False, compare=False)  # for words that one family alone reads

    @classmethod
    def from_pretrained(cls, model_dir: str | Path) -> ModelConfig:
        """Read config.json, generation_config.json and the tokenizer's eos of a Hugging Face directory.

        Raises ConfigError for a missing or malformed file, a missing or malformed field, a quantized checkpoint or an
        unknown rope scaling, naming each.
        """
        model_dir = Path(model_dir)
        values = of_text(read_json(model_dir / "config.json"))
        _refuse_other_kinds(values)
        _refuse_quantized(model_dir, values)
        raw = RawConfig(values)
        eos = eos_token_ids(model_dir, values.get("eos_token_id"), raw.get("eos_token_id"))
        return cls._read(raw, _dtype(values, model_dir), eos)

    @classmethod
    def _read(cls, raw: RawConfig, dtype: str, eos: tuple[int, ...]) -> ModelConfig:
        heads, hidden, layers = (raw.size(n) for n in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
        if raw.get("head_dim") is None and hidden % heads:
            raise ConfigError(f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        head_dim = raw.size("head_dim", hidden // heads)
        kv_heads = raw.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        rope, hidden_act = read_rope(raw), raw.word("hidden_act", "silu")
        hidden_act = LEGACY_ACTIVATIONS.get((raw.model_type, hidden_act), hidden_act)
        if hidden_act not in ACTIVATIONS:
            raise ConfigError(f"config.json: hidden_act {hidden_act!r} is none of {', '.join(ACTIVATIONS)}")
        return cls(
            model_type=kind_of(raw),
            vocab_size=raw.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=raw.size("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_part(raw, head_dim),
            max_position_embeddings=rope.context,
            rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
            hidden_act=hidden_act,
            tie_word_embeddings=raw.flag("tie_word_embeddings"),
            dtype=dtype,
            rope=rope,
            windows=_windows(raw, layers),
            eos_token_ids=eos,
            raw=raw,
        )

    def check_tensor_parallel(self, size: int) -> None:
        """ConfigError with the numbers if the model cannot be cut into `size` ranks.

        KV heads and vocabulary always can: a KV head is copied to the ranks that share it, the vocabulary is padded.
        """
        for name in ("num_attention_heads", "intermediate_size"):
            if (value := getattr(self, name)) % size:
                raise ConfigError(f"--tp {size} does not divide {name} {value} of this model")


def _dtype(values: dict[str, Any], model_dir: Path) -> str:
    """transformers v5 writes `dtype`, v4 `torch_dtype`; either may be spelled 'torch.float16'. Without one the dtype
    is what the weights are stored in."""
    name = values.get("dtype") or values.get("torch_dtype") or _stored_dtype(model_dir)
    name = str(name).removeprefix("torch.")
    if name not in _DTYPES.values():
        raise ConfigError(f"config.json: dtype {name!r} is none of {', '.join(sorted(_DTYPES.values()))}")
    return name


def _stored_dtype(model_dir: Path) -> str:
    """The dtype of most weights in the first *.safetensors file; float32 if there is none that can be read."""
    weights: Counter[str] = Counter()
    for path in sorted(model_dir.glob("*.safetensors"))[:1]:
        with suppress(SafetensorError, OSError), safe_open(path, framework="numpy") as file:  # the loader tells faults
            for tensor in map(file.get_slice, file.keys()):
                weights[tensor.get_dtype()] += math.prod(tensor.get_shape())
    return next((_DTYPES[dtype] for dtype, _ in weights.most_common() if dtype in _DTYPES), "float32")


def _refuse_other_kinds(values: dict[str, Any]) -> None:
    """ConfigError if config.json describes a model of another kind than a decoder that predicts the next token."""
    for architecture in values.get("architectures") or []:
        if not _LANGUAGE_MODELS.match(str(architecture)):
            raise ConfigError(f"{architecture} (config.json) has no head of a language model: not supported")
    model_type = str(values.get("model_type"))
    if _ENCODERS.match(model_type):
        raise ConfigError(f"model_type {model_type!r} is an encoder, which generates no text: not supported")
    if values.get("is_encoder_decoder"):
        raise ConfigError(f"model_type {model_type!r} is an encoder-decoder: not supported")


def _refuse_quantized(model_dir: Path, values: dict[str, Any]) -> None:
    names = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
    if quantization := next(filter(None, map(values.get, names)), None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method == "mxfp4" or (method == "fp8" and _is_block(quantization.get("weight_block_size"))):
            return  # dequantized when read, see layer_weights/packed.py
        raise ConfigError(f"quantized checkpoints are not supported: {method or 'unnamed method'} (config.json)")
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        if (model_dir / name).exists():
            raise ConfigError(f"quantized checkpoints are not supported: {model_dir / name} exists")


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)


def _windows(raw: RawConfig, layers: int) -> tuple[int | None, ...]:
    """Only families whose defaults name `sliding_window` have one; transformers ignores the word in all others, and so
    the next ones. `use_sliding_window` switches it (families without the switch: on); `layer_types` or else
    `max_window_layers` says which layers have the window (families without either: all)."""
    on = "use_sliding_window" not in raw.defaults or raw.flag("use_sliding_window")
    if "sliding_window" not in raw.defaults or not on or raw.get("sliding_window") is None:
        return (None,) * layers
    window = raw.size("sliding_window")
    if raw.get("layer_types") is not None and ("layer_types" in raw.defaults or "max_window_layers" in raw.defaults):
        kinds = raw.list("layer_types", layers, _LAYER_TYPES)
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = raw.count("max_window_layers") if "max_window_layers" in raw.defaults else 0
    return tuple(window if i >= first else None for i in range(layers))
