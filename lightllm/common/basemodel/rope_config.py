"""RopeConfig: what config.json says about rotary embeddings, in one spelling."""

from dataclasses import dataclass, field
from typing import Any

from lightllm.common.basemodel.config_reader import ConfigError, RawConfig, is_number
from lightllm.common.basemodel.config_words import LONGER_CONTEXT, STRETCHED_CONTEXT

_ROPE_ALIASES = {"su": "longrope"}
_PHI3_ALIASES = {"yarn": "longrope"}  # a word of its first releases
_NEEDS: dict[str, tuple[str, ...]] = {  # parameters without which a scaling has no meaning
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": ("partial_rotary_factor",),
}
_NUMBERS = {
    "factor", "rope_theta", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
}  # fmt: skip
_NOT_NUMBERS = {"short_factor": list, "long_factor": list, "truncate": bool}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, scaling type and the scaling's own parameters."""

    rope_type: str
    theta: float
    original_max_position_embeddings: int  # length before scaling
    max_position_embeddings: int  # as config.json has it
    parameters: dict[str, Any] = field(default_factory=dict)
    stretched: bool = False  # max_position_embeddings is the length after scaling, whatever the type

    def get(self, name: str, default: Any = None) -> Any:
        value = self.parameters.get(name)
        return default if value is None else value

    @property
    def depends_on_length(self) -> bool:
        """Whether a key depends on its sequence's length: then no other sequence can use it as a cached prefix."""
        two_factors = self.get("short_factor") != self.get("long_factor")
        return self.rope_type == "dynamic" or (self.rope_type == "longrope" and two_factors)

    @property
    def context(self) -> int:
        """Tokens a sequence may have. Linear and dynamic scaling stretch max_position_embeddings by their factor,
        yarn the original length, unless max_position_embeddings is the stretched length already, as for other types."""
        factor = self.get("factor", 1.0)
        if self.stretched:
            return self.max_position_embeddings
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * factor)
        if self.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.original_max_position_embeddings * factor))
        return self.max_position_embeddings


def read_rope(raw: RawConfig, layer_type: str = "full_attention") -> RopeConfig:
    """v5: everything in `rope_parameters`, for some families one set for each layer type. v4: `rope_theta` on top,
    scaling in `rope_scaling` under `type` or `rope_type`. Inside wins over top level, and words that no scaling has are
    ignored, as in transformers."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise ConfigError(f"config.json: rope_parameters must be an object, not {parameters!r}")
    parameters = dict(parameters.get(layer_type) or parameters)
    rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    aliases = _ROPE_ALIASES | (_PHI3_ALIASES if raw.model_type == "phi3" else {})
    rope_type = aliases.get(rope_type, rope_type)
    if rope_type not in _NEEDS:
        raise ConfigError(f"config.json: rope scaling {rope_type!r} is none of {', '.join(_NEEDS)}")
    if missing := [name for name in _NEEDS[rope_type] if parameters.get(name) is None]:
        raise ConfigError(f"config.json: rope scaling {rope_type!r} lacks {', '.join(missing)}")
    for name, value in parameters.items():
        fits = is_number(value) if name in _NUMBERS else isinstance(value, _NOT_NUMBERS.get(name, object))
        if value is not None and not fits:
            raise ConfigError(f"config.json: {name} of the rope scaling must not be {value!r}")
    if rope_type != "proportional":
        parameters.pop("partial_rotary_factor", None)  # see rotary_part
    theta = parameters.pop("rope_theta", None) or raw.number("rope_theta", 10000.0)
    context = raw.size("max_position_embeddings", 2048)
    if raw.model_type in LONGER_CONTEXT:
        context = max(context, raw.size("model_max_length", context))
    original = parameters.pop("original_max_position_embeddings", None)
    original = raw.size("original_max_position_embeddings", int(original or context))
    stretched = raw.model_type in STRETCHED_CONTEXT
    return RopeConfig(rope_type, float(theta), original, context, parameters, stretched)


def rotary_part(raw: RawConfig, head_dim: int) -> int:
    """How many dimensions of a head are turned: `partial_rotary_factor` of families that have one, else all.

    Other families' configs may not ask for a part: transformers would ignore it.
    """
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    part = parameters.get("partial_rotary_factor") or raw.number("partial_rotary_factor", 1.0)
    if part != 1 and "partial_rotary_factor" not in raw.defaults:
        raise ConfigError(f"config.json: partial_rotary_factor {part} is not supported for {raw.model_type}, only 1")
    return int(head_dim * part)
