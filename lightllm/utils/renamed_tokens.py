"""Added tokens under names that no text spells: a tokenizer then takes whatever looks like one of them for text."""

import secrets
from collections.abc import Container, Iterable
from typing import Any


def secret_names(tokens: Iterable[str]) -> dict[str, str]:
    """A name for each that nobody can type, in tag brackets as most of their own are."""
    secret = secrets.token_hex(8)
    return {token: f"<\U0010fff2{secret}{i}\U0010fff3>" for i, token in enumerate(tokens)}


def rename_tokens(description: dict[str, Any], names: dict[str, str], unmade: Container[str]) -> None:
    """Changes what tokenizer.json says: these added tokens get other names and keep their ids.

    unmade: no merges lead to these any more. Others that merges make, as Gemma's of several spaces, keep their own
    names beside the new ones.
    """
    added = [token for token in description["added_tokens"] if token["content"] in names]
    ids = {token["content"]: token["id"] for token in added}
    for token in added:
        token["content"] = names[token["content"]]
    model = description["model"]
    kept: dict[str, int] = {}
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        merges = [pair for pair in pairs if not any(piece in unmade for piece in (*pair, "".join(pair)))]
        made = {piece for pair in merges for piece in (*pair, "".join(pair))}
        kept = {token: id for token, id in ids.items() if token in made}
        model["merges"] = merges
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): id for token, id in model["vocab"].items()} | kept
    else:  # unigram: [piece, score] in the order of ids
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    description["post_processor"] = None
