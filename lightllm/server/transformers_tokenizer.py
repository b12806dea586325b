"""Tokenizers that only transformers can load: SentencePiece files, tiktoken files, code of the checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from lightllm.server.tokenizer import FastTokenizer, Tokenizer
from lightllm.server.tokenizer_config import TokenizerConfig


def load_with_transformers(model_dir: str, trust_remote_code: bool) -> Tokenizer:
    """Raises whatever transformers raises; ImportError where SentencePiece's packages may be what it lacks."""
    try:
        hf = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception:
        readable = is_sentencepiece_available() and is_protobuf_available()
        if readable or not Path(model_dir, "tokenizer.model").is_file():
            raise
        # transformers then takes the file for another kind, and says what that would need
        raise ImportError("there is only a tokenizer.model: pip install sentencepiece protobuf") from None
    return from_transformers(hf)


def from_transformers(hf: Any) -> Tokenizer:
    """A transformers tokenizer as ours; a fast one without its wrapper unless that changes how it decodes."""
    templates = hf.chat_template or {}
    config = TokenizerConfig(
        named={name: AddedToken(text, special=True) for name, text in hf.special_tokens_map.items()},
        chat_templates={"default": templates} if isinstance(templates, str) else templates,
    )
    if isinstance(hf, PreTrainedTokenizerFast) and type(hf)._decode is PreTrainedTokenizerFast._decode:
        return FastTokenizer(hf.backend_tokenizer, config)
    return SlowTokenizer(hf, config)


class SlowTokenizer(Tokenizer):
    """A transformers tokenizer written in Python, or one with a decoding of its own."""

    def __init__(self, hf: Any, config: TokenizerConfig):
        super().__init__(config, len(hf), frozenset(hf.all_special_ids))
        self._hf = hf

    def token_to_id(self, token: str) -> int | None:
        return self._hf.convert_tokens_to_ids(token)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._hf.encode(text, add_special_tokens=add_special_tokens)

    def added_tokens(self) -> dict[str, bool]:
        return {token.content: token.special for token in self._hf.added_tokens_decoder.values()}

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        ids: list[int] = []
        for piece, is_token in pieces:
            if piece:
                ids += self._hf.encode(piece, add_special_tokens=False, split_special_tokens=not is_token)
        return ids

    def decode(self, ids: Sequence[int], spaces_between_special_tokens: bool = True) -> str:
        return self._hf.decode(
            [id for id in ids if id < self.vocab_size],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
