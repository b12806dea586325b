"""RawConfig: config.json read word by word, with aliases, each family's defaults, and errors that name the word."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightllm.common.basemodel.config_words import ALIASES, DEFAULTS, WITH_TEXT_CONFIG
from lightllm.utils.start_refused import StartRefused


class ConfigError(StartRefused, ValueError):
    """A checkpoint that cannot be served as it is; the message names what and why."""


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


def of_text(values: dict[str, Any]) -> dict[str, Any]:
    """The part that describes the language model, where a config.json describes more than one."""
    if values.get("model_type") not in WITH_TEXT_CONFIG:
        return values
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise ConfigError("config.json lacks 'text_config'")
    outer = {k: v for k, v in values.items() if not k.endswith("_config") or k == "quantization_config"}
    return outer | {k: v for k, v in text.items() if v is not None} | {"model_type": f"{values['model_type']}_text"}


class RawConfig:
    """The words of one config.json. A word that it leaves out has the value that transformers assumes for the family.

    Each method takes the word in its first spelling and a default for words that are absent or null; without one
    they are required, but for flags, which are false then. Values of the wrong kind are ConfigErrors.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.defaults: dict[str, Any] = {}
        self.model_type = self.word("model_type")
        self.defaults = DEFAULTS.get(self.model_type, {})

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is. The first spelling in the file wins, null counts as written but unset."""
        spellings = [n for n in (name, *ALIASES.get(name, ())) if n in self.values]
        for spelling in spellings:
            if self.values[spelling] is not None:
                return self.values[spelling]
        value = self.defaults.get(name)
        if callable(value):
            value = value(self)
        elif spellings:
            value = None
        return default if value is None else value

    def _checked(self, name: str, default: Any, kind: str, fits: Any) -> Any:
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"config.json lacks {name!r}")
        if not fits(value):
            raise ConfigError(f"config.json: {name} must be {kind}, not {value!r}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        return self._checked(name, default, "a positive integer", lambda v: _is_int(v) and v > 0)

    def count(self, name: str, default: int | None = None) -> int:
        """An integer of 0 or more."""
        return self._checked(name, default, "an integer of 0 or more", lambda v: _is_int(v) and v >= 0)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        return float(self._checked(name, default, "a finite number", is_number))

    def optional_number(self, name: str) -> float | None:
        """A finite number, or None for a word that is null or absent."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        return self._checked(name, default, "true or false", lambda v: isinstance(v, bool))

    def word(self, name: str, default: str | None = None) -> str:
        return self._checked(name, default, "a string", lambda v: isinstance(v, str))

    def layers(self, name: str) -> Sequence[int]:
        """A list of layers; none for an absent word."""
        fits = lambda v: isinstance(v, list | tuple) and all(map(_is_int, v))
        return self._checked(name, (), "a list of layers", fits)

    def of_layer(self, name: str, i: int) -> dict[str, Any] | None:
        """What an object of objects, one for each of some layers, says of layer i; its keys are decimal numbers."""
        fits = lambda v: isinstance(v, dict) and all(k.isdecimal() and isinstance(x, dict) for k, x in v.items())
        found = self._checked(name, {}, "an object of objects by layer", fits)
        return next((words for layer, words in found.items() if int(layer) == i), None)

    def list(self, name: str, length: int, kinds: tuple[Any, ...]) -> list[Any]:
        """A list of `length` values out of `kinds`."""
        value = self._checked(name, None, f"a list of {length} values", lambda v: isinstance(v, list))
        if len(value) != length:
            raise ConfigError(f"config.json: {name} of length {len(value)} for {length} layers")
        if unknown := [v for v in value if v not in kinds]:
            raise ConfigError(f"config.json: {name} of {unknown[0]!r}, known: {', '.join(map(str, kinds))}")
        return value


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
