"""ModelConfig: what a checkpoint's config.json says, in one spelling. Torch-free; the only home of config aliases."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightllm.common.basemodel.eos_token_ids import eos_token_ids

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_ROPE_ALIASES = {"su": "longrope"}
_NEEDS = {  # parameters without which a scaling has no meaning
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "use_sliding_window": False}
_QWEN |= {"sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {  # what transformers assumes where config.json says nothing
    "llama": {"eos_token_id": 2},
    "mistral": {
        "eos_token_id": 2,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}
_DTYPES = {"float32", "float16", "bfloat16"}


class ConfigError(ValueError):
    """A checkpoint that cannot be served as it is; the message names what and why."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, scaling type and the scaling's own parameters."""

    rope_type: str
    theta: float
    original_max_position_embeddings: int  # length before scaling
    max_position_embeddings: int  # as config.json has it
    parameters: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.parameters.get(name)
        return default if value is None else value


@dataclass(frozen=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int  # the context that is enforced
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    dtype: str  # "float32", "float16" or "bfloat16"
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer: how many last positions a query sees, None for all
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_pretrained(cls, model_dir: str | Path) -> ModelConfig:
        """Read config.json, generation_config.json and the tokenizer's eos of a Hugging Face directory.

        Raises ConfigError for a missing or malformed file, a missing field, a quantized checkpoint or an unknown
        rope scaling, naming each.
        """
        model_dir = Path(model_dir)
        raw = read_json(model_dir / "config.json")
        _refuse_quantized(model_dir, raw)
        return cls._from_dict(raw, eos_token_ids(model_dir, _get(raw, "eos_token_id")))

    @classmethod
    def _from_dict(cls, raw: dict[str, Any], eos: tuple[int, ...]) -> ModelConfig:
        heads = _size(raw, "num_attention_heads")
        hidden = _size(raw, "hidden_size")
        layers = _size(raw, "num_hidden_layers")
        head_dim = _get(raw, "head_dim")
        if head_dim is None and hidden % heads:
            raise ConfigError(f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        kv_heads = int(_get(raw, "num_key_value_heads") or heads)
        if heads % kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        rope = _rope(raw)
        return cls(
            model_type=_required(raw, "model_type"),
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(raw, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=int(head_dim or hidden // heads),
            max_position_embeddings=_context(rope),
            rms_norm_eps=float(_get(raw, "rms_norm_eps", 1e-6)),
            hidden_act=_get(raw, "hidden_act", "silu"),
            attention_bias=bool(_get(raw, "attention_bias", _get(raw, "bias", False))),
            mlp_bias=bool(_get(raw, "mlp_bias", False)),
            tie_word_embeddings=bool(_get(raw, "tie_word_embeddings", False)),
            dtype=_dtype(raw),
            rope=rope,
            windows=_windows(raw, layers),
            eos_token_ids=eos,
        )

    def check_tensor_parallel(self, size: int) -> None:
        """ConfigError with the numbers if the model cannot be cut into `size` ranks.

        KV heads and vocabulary always can: a KV head is copied to the ranks that share it, the vocabulary is padded.
        """
        for name in ("num_attention_heads", "intermediate_size"):
            if (value := getattr(self, name)) % size:
                raise ConfigError(f"--tp {size} does not divide {name} {value} of this model")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint file; ConfigError naming the file if it is absent or malformed."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value


def _get(raw: dict[str, Any], name: str, default: Any = None) -> Any:
    """The value in config.json, or what transformers assumes for this model type, or `default` (also for null)."""
    value = raw[name] if name in raw else _DEFAULTS.get(str(raw.get("model_type")), {}).get(name)
    return default if value is None else value


def _required(raw: dict[str, Any], name: str) -> Any:
    value = _get(raw, name)
    if value is None:
        raise ConfigError(f"config.json lacks {name!r}")
    return value


def _size(raw: dict[str, Any], name: str) -> int:
    value = _required(raw, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _dtype(raw: dict[str, Any]) -> str:
    """transformers v5 writes `dtype`, v4 `torch_dtype`; either may be spelled 'torch.float16'."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"config.json: dtype {name!r} is none of {', '.join(sorted(_DTYPES))}")
    return name


def _refuse_quantized(model_dir: Path, raw: dict[str, Any]) -> None:
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ConfigError(f"quantized checkpoints are not supported: {method or 'unnamed method'} (config.json)")
    for name in ("quantize_config.json", "quant_config.json", "hf_quant_config.json"):
        if (model_dir / name).exists():
            raise ConfigError(f"quantized checkpoints are not supported: {model_dir / name} exists")


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """v5: everything in `rope_parameters`. v4: `rope_theta` on top, scaling in `rope_scaling` under `type` or
    `rope_type`. Inside wins over top level, as in transformers."""
    parameters = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    rope_type = _ROPE_ALIASES.get(rope_type, rope_type)
    if rope_type not in ROPE_TYPES:
        raise ConfigError(f"config.json: rope scaling {rope_type!r} is none of {', '.join(ROPE_TYPES)}")
    if missing := [name for name in _NEEDS.get(rope_type, ()) if parameters.get(name) is None]:
        raise ConfigError(f"config.json: rope scaling {rope_type!r} lacks {', '.join(missing)}")
    part = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
    if part != 1:
        raise ConfigError(f"config.json: partial_rotary_factor {part} is not supported, only 1")
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    context = int(_get(raw, "max_position_embeddings", 2048))
    original = raw.get("original_max_position_embeddings") or parameters.pop("original_max_position_embeddings", None)
    return RopeConfig(rope_type, float(theta), int(original or context), context, parameters)


def _context(rope: RopeConfig) -> int:
    """Tokens a sequence may have. Linear and dynamic scaling stretch max_position_embeddings by their factor; for
    the other types it is the stretched length already."""
    stretched = rope.rope_type in ("linear", "dynamic")
    return int(rope.max_position_embeddings * (float(rope.parameters["factor"]) if stretched else 1.0))


def _windows(raw: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    """Only families whose _DEFAULTS name `sliding_window` have one; transformers ignores the word in all others.
    `use_sliding_window` switches it (families without the switch: always on); `layer_types` or else
    `max_window_layers` says which layers have the window."""
    family = _DEFAULTS.get(str(raw.get("model_type")), {})
    if "sliding_window" not in family:
        return (None,) * layers
    if "use_sliding_window" not in family:
        return (_get(raw, "sliding_window"),) * layers
    window = _get(raw, "sliding_window") if _get(raw, "use_sliding_window") else None
    types = raw.get("layer_types")
    if types is None:
        return tuple(window if i >= _get(raw, "max_window_layers") else None for i in range(layers))
    if len(types) != layers or (unknown := set(types) - {"full_attention", "sliding_attention"}):
        problem = f"of {sorted(unknown)}" if len(types) == layers else f"of length {len(types)} for {layers} layers"
        raise ConfigError(f"config.json: layer_types {problem}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
