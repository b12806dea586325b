import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from front.scripted_engine import Front, ScriptedEngine, serving
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from lightllm.server.chat_format import ChatFormat
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = """{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] -%}
<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if think %}<think>
{% endif %}{% endif %}{# </think> #}"""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """A directory with a tokenizer only: a byte is a token (0..255), 256 is the end of sequence."""
    folder = tmp_path_factory.mktemp("model")
    backend = Backend(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|eos|>", special=True, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_dir) -> Tokenizer:
    return load_tokenizer(str(model_dir))


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
    with httpx.Client(base_url=front.url, timeout=60, verify=False) as client:  # to read certificates takes 25 ms
        yield client


@pytest.fixture(scope="session")
def chat_dir(model_dir, tmp_path_factory) -> Path:
    """The byte tokenizer with ChatML's special tokens and a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    backend = Backend.from_file(str(model_dir / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>", "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer(chat_dir) -> Tokenizer:
    return load_tokenizer(str(chat_dir))


@pytest.fixture
def format_of(model_dir, tmp_path):
    """A format for a template; the specials are special tokens of its tokenizer."""

    def make(templates: str | list[dict], *specials: str, **flags) -> ChatFormat:
        backend = Backend.from_file(str(model_dir / "tokenizer.json"))
        backend.add_special_tokens([AddedToken(text, special=True) for text in specials])
        backend.save(str(tmp_path / "tokenizer.json"))
        config = {"eos_token": "<|eos|>", "chat_template": templates}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return ChatFormat(load_tokenizer(str(tmp_path)), ServerArgs(model_dir=str(tmp_path), **flags))

    return make
