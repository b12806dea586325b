"""What a checkpoint says about its tokenizer besides tokenizer.json: special tokens by name, chat templates."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

# Flags in tokenizer_config.json whose names end in _token as well.
TOKEN_FLAGS = ("add_bos_token", "add_eos_token")
# Classes that took add_bos_token at its word, whatever tokenizer.json says, when most checkpoints that name them were
# published. DeepSeek's rely on it; transformers 5 leaves their BOS out.
FLAGGED_CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")


@dataclass(frozen=True)
class TokenizerConfig:
    """special_tokens: text by name (bos_token, eos_token...), as chat templates know them.

    named, extra: all special tokens as the backend takes them. added_tokens: ordinary tokens that may lack in
    tokenizer.json. chat_templates: by name; the usual one is "default". adds_bos: texts begin with BOS also where
    tokenizer.json does not say so. has_own_code: the checkpoint brings a tokenizer class of its own.
    """

    named: dict[str, AddedToken] = field(default_factory=dict)
    extra: list[AddedToken] = field(default_factory=list)
    added_tokens: list[AddedToken] = field(default_factory=list)
    chat_templates: dict[str, str] = field(default_factory=dict)
    adds_bos: bool = False
    has_own_code: bool = False

    @classmethod
    def read(cls, model_dir: Path) -> TokenizerConfig:
        """From tokenizer_config.json, the older special_tokens_map.json, and the files with chat templates.

        Raises ValueError naming the file that cannot be understood.
        """
        config = _read_object(model_dir / "tokenizer_config.json")
        decoder = {int(id): _added(token) for id, token in config.get("added_tokens_decoder", {}).items()}
        if "added_tokens_decoder" not in config:
            config |= _read_object(model_dir / "special_tokens_map.json")
        saved = {token.content: token for token in decoder.values()}
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        named = {
            name: saved.get(_text(token), _special(token))
            for name, token in (config | (extra if isinstance(extra, dict) else {})).items()
            if name not in TOKEN_FLAGS and (name.endswith("_token") or name in extra) and isinstance(token, (str, dict))
        }
        flagged = str(config.get("tokenizer_class")).removesuffix("Fast") in FLAGGED_CLASSES
        auto_map = config.get("auto_map")
        return cls(
            named=named,
            extra=[] if isinstance(extra, dict) else [saved.get(_text(token), _special(token)) for token in extra],
            added_tokens=[token for _, token in sorted(decoder.items(), key=lambda item: item[0])],
            chat_templates=_chat_templates(model_dir, config.get("chat_template")),
            adds_bos=flagged and config.get("add_bos_token") is True,
            has_own_code="AutoTokenizer" in auto_map if isinstance(auto_map, dict) else bool(auto_map),
        )

    @property
    def special_tokens(self) -> dict[str, str]:
        return {name: token.content for name, token in self.named.items()}


def _chat_templates(model_dir: Path, in_config: Any) -> dict[str, str]:
    """Files of their own go before what tokenizer_config.json holds: one template, or a list of named ones."""
    files = {"default": model_dir / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((model_dir / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    if templates or in_config is None:
        return templates
    if isinstance(in_config, str):
        return {"default": in_config}
    return {template["name"]: template["template"] for template in in_config}


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return value


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _special(token: str | dict[str, Any]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    return _added(token | {"special": True})


def _added(token: dict[str, Any]) -> AddedToken:
    return AddedToken(
        token["content"],
        **{name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized", "special") if name in token},
    )
