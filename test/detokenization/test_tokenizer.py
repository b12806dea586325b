"""Encoding off the GIL, one BOS (case 74), and the text of single tokens."""

import json
import threading
import time

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from lightllm.server import transformers_tokenizer
from lightllm.server.tokenizer import TokenizerNotFound, load_tokenizer


@pytest.fixture(scope="module")
def with_bos(sentencepiece, tmp_path_factory):
    """The SentencePiece tokenizer from a directory, with a template that prepends <s>, truncation and padding."""
    folder = tmp_path_factory.mktemp("tokenizer")
    sentencepiece.hf.save_pretrained(folder)
    file = str(folder / "tokenizer.json")
    backend = Backend.from_file(file)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(file)
    return load_tokenizer(str(folder))


def test_one_bos(with_bos):
    hello = with_bos.encode("Hello world", add_special_tokens=False)
    assert 1 not in hello
    assert with_bos.encode("Hello world") == [1, *hello]
    assert with_bos.encode("<s>Hello world") == with_bos.encode("<s>Hello world", add_special_tokens=False)
    assert with_bos.encode("<s>")[:2] == [1]
    assert len(with_bos.encode("a" * 100)) > 100


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (dict(tokenizer_class="LlamaTokenizerFast", add_bos_token=True), [257]),
        (dict(tokenizer_class="LlamaTokenizer", add_bos_token=True), [257]),
        (dict(tokenizer_class="LlamaTokenizerFast", add_bos_token=False), []),
        (dict(tokenizer_class="PreTrainedTokenizerFast", add_bos_token=True), []),  # has always ignored the word
    ],
)
def test_a_bos_that_only_the_configuration_asks_for(byte_level, tmp_path, words, begins):
    """As DeepSeek V2, V3, R1 and the models distilled from it have it."""
    byte_level.hf.save_pretrained(tmp_path)
    bos = dict(content="<|im_start|>", lstrip=False, rstrip=False, normalized=True, single_word=False)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words | dict(bos_token=bos, eos_token="<|eos|>")))
    ours, hello = load_tokenizer(str(tmp_path)), byte_level.encode("hello")
    assert ours.encode("hello") == ours.encode("<|im_start|>" * len(begins) + "hello") == [*begins, *hello]
    assert ours.encode("hello", add_special_tokens=False) == hello
    assert ours.encode("") == begins


def test_special_tokens_in_the_text_are_tokens(byte_level):
    assert byte_level.encode("<|im_start|>a") == [257, *byte_level.encode("a")]
    assert byte_level.special_ids >= {257} and not byte_level.special_ids & {0, 259}


def test_token_text(tokenizers):
    byte_level, pieces = tokenizers["bytes"], tokenizers["sentencepiece"]
    assert [byte_level.token_text(id) for id in (258, 259, 260, 9999)] == ["<|im_end|>", " added word", "é龜", ""]
    assert [byte_level.token_text(id) for id in byte_level.encode("a é")] == ["a", " ", "\ufffd", "\ufffd"]
    names = ["▁Hello", "<0x41>", "<0xF0>", "</s>"]
    texts = [pieces.token_text(id) for id in pieces.hf.convert_tokens_to_ids(names)]
    assert texts == [" Hello", "A", "\ufffd", "</s>"]


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(TokenizerNotFound, match=str(tmp_path)):
        load_tokenizer(str(tmp_path))


def test_what_reads_a_sentencepiece_model_is_named(tmp_path, monkeypatch):
    """Alone, as Vicuna has it; transformers says that it wants tiktoken."""
    monkeypatch.setattr(transformers_tokenizer, "is_sentencepiece_available", lambda: False)
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(TokenizerNotFound, match="pip install sentencepiece"):
        load_tokenizer(str(tmp_path))


def test_other_threads_run_while_a_long_text_is_encoded(byte_level):
    encoding = threading.Thread(target=byte_level.encode, args=("hello world " * 100_000,))
    encoding.start()
    ticks = 0
    while encoding.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks >= 5
