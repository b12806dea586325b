"""The tokenizer of a checkpoint: text to ids, and ids to the pieces of text they stand for. Torch-free."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import tokenizers
from tokenizers.processors import TemplateProcessing

from lightllm.server.tokenizer_config import TokenizerConfig
from lightllm.utils.renamed_tokens import rename_tokens, secret_names
from lightllm.utils.start_refused import StartRefused

# SentencePiece models that fall back to bytes spell a byte as this token.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerNotFound(StartRefused, ValueError):
    """The model directory holds no tokenizer that can be loaded."""


def load_tokenizer(model_dir: str, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer saved in a Hugging Face directory.

    tokenizer.json is read as it is, in hundredths of a second. Only where there is none, or where the checkpoint's own
    tokenizer code may run (`trust_remote_code`) and exists, transformers loads the tokenizer.
    Raises TokenizerNotFound with the cause.
    """
    file = Path(model_dir, "tokenizer.json")
    try:
        config = TokenizerConfig.read(Path(model_dir))
        if file.is_file() and not (trust_remote_code and config.has_own_code):
            tokenizer = FastTokenizer(tokenizers.Tokenizer.from_file(str(file)), config)
            tokenizer.serves_grammars = True
            return tokenizer
        from lightllm.server.transformers_tokenizer import load_with_transformers

        return load_with_transformers(model_dir, trust_remote_code)
    except Exception as error:
        raise TokenizerNotFound(f"no usable tokenizer in {model_dir}: {type(error).__name__}: {error}") from error


class Tokenizer(ABC):
    """A tokenizer with one meaning of decoding: from left to right, never cleaned up afterwards.

    config: names of special tokens, chat templates.
    vocab_size: ids 0..vocab_size-1 may be known to the tokenizer; a model may have more. Those decode to "".
    special_ids: ids of the special tokens.
    pieces: what each id adds to a text, or None when the tokenizer's decoder is not a plain joining of pieces.
    strips_space: one space at the very start of a text is dropped (as SentencePiece does).
    serves_grammars: it is what tokenizer.json says, which the worker reads for its grammars.
    """

    def __init__(self, config: TokenizerConfig, vocab_size: int, special_ids: frozenset[int]):
        self.config = config
        self.vocab_size = vocab_size
        self.special_ids = special_ids
        self.pieces: Pieces | None = None
        self.strips_space = False
        self.serves_grammars = False

    @abstractmethod
    def token_to_id(self, token: str) -> int | None: ...

    @abstractmethod
    def decode(self, ids: Sequence[int], spaces_between_special_tokens: bool = True) -> str:
        """Text of ids, special tokens included; ids that the tokenizer does not know add nothing.

        spaces_between_special_tokens: only tokenizers written in Python know this; fast ones add no spaces.
        """

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, special tokens spelled in it included; a BOS that the text already begins with is not doubled.
        Other threads run meanwhile if the tokenizer is a fast one."""
        ids = self._encode(text, add_special_tokens)
        doubled = add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id
        if doubled and self._encode("", True)[:1] == ids[:1]:  # the first is the tokenizer's, not the text's
            del ids[0]
        return ids

    @abstractmethod
    def added_tokens(self) -> dict[str, bool]:
        """The tokens that are found in a text before anything else, and which of them are special."""

    @abstractmethod
    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of the joined pieces, without BOS; only pieces that say so are tokens of `added_tokens`.

        Whatever the other pieces hold is text: no added token is found in them, nor across their borders.
        """

    @property
    def bos_token_id(self) -> int | None:
        token = self.config.special_tokens.get("bos_token")
        return None if token is None else self.token_to_id(token)

    def token_text(self, id: int) -> str:
        """One token as it would show inside a text: with its leading space, U+FFFD for half a character."""
        if self.pieces is None:
            return self.decode([id])
        piece = self.pieces[id]
        return piece if isinstance(piece, str) else piece.decode("utf-8", "replace")

    def token_bytes(self, id: int) -> list[int]:
        """The bytes that one token adds to a text."""
        piece = self.token_text(id) if self.pieces is None else self.pieces[id]
        return list(piece.encode() if isinstance(piece, str) else piece)

    @cached_property
    def special_texts(self) -> list[tuple[int, str]]:
        """(id, text) of each special token that has one."""
        return [(id, text) for id in sorted(self.special_ids) if (text := self.token_text(id))]


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, which becomes this object's own.

    What `config` names as special tokens becomes one in the backend too, as transformers does.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig):
        backend.no_truncation()
        backend.no_padding()
        backend.add_tokens(config.added_tokens)
        known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        special = (*config.named.values(), *config.extra)
        backend.add_special_tokens([token for token in special if token.content not in known])
        added = backend.get_added_tokens_decoder()
        super().__init__(
            config,
            backend.get_vocab_size(with_added_tokens=True),
            frozenset(id for id, token in added.items() if token.special),
        )
        self._backend = backend
        self.pieces, self.strips_space = _pieces_of(backend)
        if config.adds_bos and (bos := self.bos_token_id) is not None and self._encode("", True)[:1] != [bos]:
            name = config.special_tokens["bos_token"]
            backend.post_processor = TemplateProcessing([name, "$A"], special_tokens=[(name, bos)])

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # the batch call is the one that lets go of the GIL
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def added_tokens(self) -> dict[str, bool]:
        return {token.content: token.special for token in self._backend.get_added_tokens_decoder().values()}

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        renamed, names = self._renamed
        text = "".join([names[piece] if is_token else piece for piece, is_token in pieces])
        return renamed.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """A twin in which every added token goes by a secret name, which nobody can type, and those names.

        It cuts a text at the renamed tokens exactly as this tokenizer does at its own, and has the same ids.
        """
        description = json.loads(self._backend.to_str())
        added = self.added_tokens()
        names = secret_names(added)
        rename_tokens(description, names, {token for token, special in added.items() if special})
        twin = tokenizers.Tokenizer.from_str(json.dumps(description))
        assert all(twin.token_to_id(name) == self.token_to_id(token) for token, name in names.items()), "ids are kept"
        return twin, names

    def decode(self, ids: Sequence[int], spaces_between_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


class Pieces(dict[int, "str | bytes"]):
    """id -> what it adds to a text, made when first asked for: bytes where it is not whole characters.

    byte_level: characters of a token stand for bytes (GPT-2's alphabet); otherwise a byte is a token of its own.
    replacements: (pattern, content) applied to every token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, byte_level: bool, replacements: list[tuple[str, str]]):
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


def _pieces_of(backend: tokenizers.Tokenizer) -> tuple[Pieces | None, bool]:
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
