"""Tokenizers of the three kinds that checkpoints bring: bytes as tokens, byte-level BPE with merges, SentencePiece."""

import random

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from lightllm.server.core.sampling_params import SamplingParams
from lightllm.server.tokenizer import FastTokenizer, Tokenizer
from lightllm.server.transformers_tokenizer import from_transformers

SPECIALS = ["<|eos|>", "<|im_start|>", "<|im_end|>"]
SENTENCES = [
    "Hello world! The quick brown fox jumps over 13 lazy dogs.\n",
    "Где находится столица? 龜兔賽跑 — 🫠🫠 naïve café, 日本語のテキスト。",
    '{"key": [1, 2, 3], "emoji": "👩‍👩‍👧"}\n\tindented   spaces',
]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """As the F1 checkpoints: ids 0..255 are bytes, 256.. the special tokens, then two added words."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    return _byte_level(backend)


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on a few sentences: tokens end and begin inside characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    rng = random.Random(0)
    words = [word for sentence in SENTENCES for word in sentence.split(" ")]
    backend.train_from_iterator([" ".join(rng.choices(words, k=8)) for _ in range(200)], trainer)
    return _byte_level(backend)


def _byte_level(backend: Backend) -> PreTrainedTokenizerFast:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    backend.add_tokens([AddedToken(" added word", normalized=False), AddedToken("é龜", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>", clean_up_tokenization_spaces=False)


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As LLaMA-1/2: pieces with ▁ for a space, bytes for what has no piece, one leading space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "!", "▁▁", "▁Hel", "lo", "é", "龜", "\n", *"abcdefghijklmnopqrstuvwxyz,.ABC"]
    backend = Backend(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


class Referenced(FastTokenizer):
    """Ours, with the transformers tokenizer that it is made from as reference."""

    def __init__(self, hf: PreTrainedTokenizerFast):
        self.hf = hf
        super().__init__(hf.backend_tokenizer, from_transformers(hf).config)


BUILDERS = {"bytes": byte_tokenizer, "merges": merging_tokenizer, "sentencepiece": sentencepiece_tokenizer}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: Referenced(build()) for name, build in BUILDERS.items()}


@pytest.fixture(scope="session", params=list(BUILDERS))
def tokenizer(request, tokenizers) -> Tokenizer:
    return tokenizers[request.param]


@pytest.fixture(scope="session")
def byte_level(tokenizers) -> Tokenizer:
    return tokenizers["bytes"]


@pytest.fixture(scope="session")
def sentencepiece(tokenizers) -> Tokenizer:
    return tokenizers["sentencepiece"]


@pytest.fixture
def params():
    """Resolved parameters: what the front would send on."""
    return lambda **given: SamplingParams(**({"max_new_tokens": 100} | given))
