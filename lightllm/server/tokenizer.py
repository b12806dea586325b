"""The tokenizer of a checkpoint: text to ids, and ids to the pieces of text they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

# SentencePiece models that fall back to bytes spell a byte as this token.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerNotFound(ValueError):
    """The model directory holds no tokenizer that can be loaded."""


def load_tokenizer(model_dir: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer saved in a Hugging Face directory.

    trust_remote_code: run tokenizer code that the checkpoint brings along.
    Raises TokenizerNotFound with the cause.
    """
    try:
        hf = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        raise TokenizerNotFound(f"no usable tokenizer in {model_dir}: {type(error).__name__}: {error}") from error
    return Tokenizer(hf)


class Tokenizer:
    """A transformers tokenizer with one meaning of decoding: from left to right, never cleaned up afterwards.

    hf: the transformers tokenizer, for chat templates.
    vocab_size: ids 0..vocab_size-1 may be known to the tokenizer; a model may have more. Those decode to "".
    pieces: what each id adds to a text, or None when the tokenizer's decoder is not a plain joining of pieces.
    strips_space: one space at the very start of a text is dropped (as SentencePiece does).
    """

    def __init__(self, hf: Any):
        self.hf = hf
        self.vocab_size = len(hf)
        self._backend = hf.backend_tokenizer if _decodes_like_its_backend(hf) else None
        self.pieces: Pieces | None = None
        self.strips_space = False
        if self._backend is None:
            self.special_ids = frozenset(hf.all_special_ids)
        else:
            self._backend.no_truncation()
            self._backend.no_padding()
            added = self._backend.get_added_tokens_decoder()
            self.special_ids = frozenset(id for id, token in added.items() if token.special)
            self.pieces, self.strips_space = _pieces_of(self._backend)
        self._adds_bos = hf.encode("")[:1] == [hf.bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, special tokens spelled in it included; a BOS that the text already begins with is not doubled.

        Other threads run meanwhile if the tokenizer is a fast one: its batch call is the one that lets go of the GIL.
        """
        if self._backend is not None:
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        else:
            ids = self.hf.encode(text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self._adds_bos and ids[:2] == [self.hf.bos_token_id] * 2:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], spaces_between_special_tokens: bool = True) -> str:
        """Text of ids, special tokens included; ids that the tokenizer does not know add nothing.

        spaces_between_special_tokens: only tokenizers written in Python know this; fast ones add no spaces.
        """
        if self._backend is not None:
            return self._backend.decode(ids, skip_special_tokens=False)
        return self.hf.decode(
            [id for id in ids if id < self.vocab_size],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )

    def token_text(self, id: int) -> str:
        """One token as it would show inside a text: with its leading space, U+FFFD for half a character."""
        if self.pieces is None:
            return self.decode([id])
        piece = self.pieces[id]
        return piece if isinstance(piece, str) else piece.decode("utf-8", "replace")

    def is_special(self, id: int) -> bool:
        return id in self.special_ids


class Pieces(dict[int, "str | bytes"]):
    """id -> what it adds to a text, made when first asked for: bytes where it is not whole characters.

    byte_level: characters of a token stand for bytes (GPT-2's alphabet); otherwise a byte is a token of its own.
    replacements: (pattern, content) applied to every token.
    """

    def __init__(self, backend: Any, byte_level: bool, replacements: list[tuple[str, str]]):
        super().__init__()
        self._backend = backend
        self.byte_level = byte_level
        self._replacements = replacements

    def __missing__(self, id: int) -> str | bytes:
        token = self._backend.id_to_token(id)
        piece: str | bytes = "" if token is None else self._piece(token)
        if isinstance(piece, bytes):
            with suppress(UnicodeDecodeError):
                piece = piece.decode()
        self[id] = piece
        return piece

    def _piece(self, token: str) -> str | bytes:
        if self.byte_level:
            try:
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token with another character stands for itself, as in tokenizers' ByteLevel
                return token
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (https://github.com/openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


def _decodes_like_its_backend(hf: Any) -> bool:
    return isinstance(hf, PreTrainedTokenizerFast) and type(hf)._decode is PreTrainedTokenizerFast._decode


def _pieces_of(backend: Any) -> tuple[Pieces | None, bool]:
    """Pieces, and whether a leading space is stripped; None unless the decoder is ByteLevel or SentencePiece's."""
    if backend.decoder is None:
        return None, False
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Pieces(backend, True, []), False
    replaces = list(takewhile(lambda step: step["type"] == "Replace" and "String" in step["pattern"], steps))
    strips_space = steps[-1] == {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    joins = steps[len(replaces) : len(steps) - strips_space]
    if [step["type"] for step in joins] != ["ByteFallback", "Fuse"]:
        return None, False
    return Pieces(backend, False, [(step["pattern"]["String"], step["content"]) for step in replaces]), strips_space
