from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from front.scripted_engine import Front, ScriptedEngine, serving
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from lightllm.server.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte is a token (0..255), 256 is the end of sequence."""
    backend = Backend(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|eos|>", special=True, normalized=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>"))


@pytest.fixture(scope="module")
def served(tokenizer) -> Iterator[tuple[Front, ScriptedEngine]]:
    """One front and its engine for all tests of a file."""
    with serving(tokenizer) as front_and_engine:
        yield front_and_engine


@pytest.fixture
def front(served) -> Front:
    return served[0]


@pytest.fixture
def engine(served) -> ScriptedEngine:
    served[1].reset()
    return served[1]


@pytest.fixture
def client(front, engine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=front.url, timeout=60) as client:
        yield client
