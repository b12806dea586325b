"""Which tokens end a sequence: the union of what model, generation config and tokenizer say. Torch-free."""

from pathlib import Path
from typing import Any

from lightllm.common.basemodel.config_reader import ConfigError, read_json


def eos_token_ids(
    model_dir: Path, of_config: int | list[int] | None, of_family: int | list[int] | None
) -> tuple[int, ...]:
    """Union of config.json's eos (given), generation_config.json's and the tokenizer's, in ascending order. Where
    neither config tells one, the family's counts as config.json's.

    The tokenizer's files are optional here and read leniently: whoever loads the tokenizer reports their faults.
    Raises ConfigError for a generation_config.json that cannot be read: an end of sequence would be missed.
    """
    path = model_dir / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    told = {*_ids(of_config), *_ids(generation.get("eos_token_id"))} or _ids(of_family)
    return tuple(sorted({*told, *_ids(_tokenizer_eos(model_dir))}))


def _ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ConfigError:
        return {}


def _tokenizer_eos(model_dir: Path) -> int | None:
    config = _read(model_dir / "tokenizer_config.json")
    token = config.get("eos_token") or _read(model_dir / "special_tokens_map.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    decoder = config.get("added_tokens_decoder")
    for id, added in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(added, dict) and added.get("content") == token and id.isdecimal():
            return int(id)
    tokenizer = _read(model_dir / "tokenizer.json")
    added_tokens = tokenizer.get("added_tokens")
    for added in added_tokens if isinstance(added_tokens, list) else ():
        if isinstance(added, dict) and added.get("content") == token:
            return added.get("id")
    vocab = (tokenizer.get("model") or {}).get("vocab") or _read(model_dir / "added_tokens.json")
    if isinstance(vocab, list):  # unigram: [piece, score] in the order of ids
        return next((i for i, (piece, _) in enumerate(vocab) if piece == token), None)
    return vocab.get(token)
