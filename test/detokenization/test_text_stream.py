"""Streams against the tokenizer's own decoding, for random ids and for every cut."""

import random

import pytest
from transformers import ByT5Tokenizer

from lightllm.server.detokenization.text_stream import REPLACEMENT, PieceStream, WindowStream, open_stream
from lightllm.server.tokenizer import Tokenizer
from lightllm.server.transformers_tokenizer import from_transformers

HIDDEN: frozenset[int] = frozenset()


def random_ids(rng: random.Random, tokenizer: Tokenizer, length: int) -> list[int]:
    """Real text and noise in turns: noise has broken characters, special tokens and ids past the vocabulary."""
    ids: list[int] = []
    while len(ids) < length:
        if rng.random() < 0.5:
            ids += [rng.randrange(tokenizer.vocab_size + 5) for _ in range(rng.randint(1, 6))]
        else:
            text = "".join(rng.choices("ab cé龜🫠Я\n,▁\u200d\ufffd", k=rng.randint(1, 6)))
            ids += tokenizer.encode(text, add_special_tokens=False)
    return ids[:length]


def joined(stream, ids: list[int]) -> str:
    return "".join([stream.feed(id) for id in ids] + [stream.flush()])


def has_mixed_run(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """A run of byte tokens with whole and broken characters: tokenizers shows none of it, a stream cannot know."""
    known = [id for id in ids if id < tokenizer.vocab_size] + [0]
    run = b""
    for id in known:
        token = tokenizer.hf.convert_ids_to_tokens(id)
        if token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        whole = run.decode("utf-8", "ignore")
        if whole and whole.encode() != run:
            return True
        run = b""
    return False


def test_stream_equals_decode_for_random_ids(tokenizer):
    rng = random.Random(1)
    compared = 0
    while compared < 2000:
        ids = random_ids(rng, tokenizer, rng.randint(1, 25))
        if has_mixed_run(tokenizer, ids):
            continue
        compared += 1
        stream = open_stream(tokenizer, [], HIDDEN, True)
        assert isinstance(stream, PieceStream)
        assert joined(stream, ids) == tokenizer.hf.decode(ids), ids


def test_stream_after_a_prompt_shows_what_the_prompt_does_not(tokenizer):
    rng = random.Random(2)
    compared = 0
    while compared < 2000:
        prompt, ids = random_ids(rng, tokenizer, rng.randint(1, 6)), random_ids(rng, tokenizer, rng.randint(1, 12))
        if has_mixed_run(tokenizer, prompt) or has_mixed_run(tokenizer, prompt + ids):
            continue
        compared += 1
        before, after = tokenizer.hf.decode(prompt), tokenizer.hf.decode(prompt + ids)
        while not after.startswith(before):  # ids complete a character that the prompt began
            before = before.removesuffix(REPLACEMENT)
        assert joined(open_stream(tokenizer, prompt, HIDDEN, True), ids) == after[len(before) :], (prompt, ids)


def test_broken_bytes_of_a_run_do_not_hide_its_characters(sentencepiece):
    byte = {value: sentencepiece.hf.convert_tokens_to_ids(f"<0x{value:02X}>") for value in range(256)}
    ids = [byte[value] for value in b"\xff" + "🫠".encode() + b"\xe9\xbe" + "龜".encode() + b"\xf0\x9f"]
    expected = f"{REPLACEMENT}🫠{REPLACEMENT * 2}龜{REPLACEMENT * 2}"
    assert joined(open_stream(sentencepiece, [], HIDDEN, True), ids) == expected


def test_half_characters_wait_and_whole_ones_do_not(tokenizer):
    ids = tokenizer.encode("🫠 a龜", add_special_tokens=False)
    stream = open_stream(tokenizer, tokenizer.encode("A", add_special_tokens=False), HIDDEN, True)
    shown = ""
    for count, id in enumerate(ids, 1):
        shown += stream.feed(id)
        assert REPLACEMENT not in shown
        whole = tokenizer.decode(ids[:count]).rstrip(REPLACEMENT)
        assert shown.strip() == whole.strip()


def test_broken_bytes_are_never_held_for_more_than_a_character(tokenizer):
    rng = random.Random(3)
    stream = open_stream(tokenizer, [], HIDDEN, True)
    silent = 0
    for id in (rng.randrange(256) + 3 for _ in range(5000)):
        silent = 0 if stream.feed(id) else silent + 1
        assert silent < 8  # four bytes at most, special tokens and a stripped space aside


@pytest.mark.parametrize("kind", ["bytes", "merges", "sentencepiece"])
def test_window_stream_equals_decode_for_valid_text(tokenizers, kind):
    tokenizer = tokenizers[kind]
    rng = random.Random(4)
    for _ in range(300):
        text = "".join(rng.choices("ab cé龜🫠Я\n,", k=rng.randint(1, 12)))
        prompt, ids = (tokenizer.encode(part, add_special_tokens=False) for part in ("Hello", text))
        for cut in range(len(ids) + 1):
            if has_mixed_run(tokenizer, prompt + ids[:cut]):
                continue
            stream = WindowStream(tokenizer.decode, list(prompt))
            before = tokenizer.decode(prompt)
            assert joined(stream, ids[:cut]) == tokenizer.decode(prompt + ids[:cut])[len(before) :]


@pytest.mark.parametrize("first", [1, 2])
def test_tokens_that_all_end_inside_of_a_character(first):
    """As tiktoken's may, whose checkpoints bring their own code: every character is whole with the next token."""
    text = "龜兔賽跑" * 3
    data = text.encode()
    tokens = [data[:first], *(data[begin : begin + 3] for begin in range(first, len(data), 3))]
    stream = WindowStream(lambda ids: b"".join(tokens[id] for id in ids).decode(errors="replace"), [])
    assert [stream.feed(id) for id in range(len(tokens))] == ["", *text] and not stream.flush()


def test_a_tokenizer_written_in_python():
    tokenizer = from_transformers(ByT5Tokenizer())  # its decoding drops half characters
    prompt, ids = (tokenizer.encode(text, add_special_tokens=False) for text in ("Hé", " é龜🫠\tЯ"))
    stream = open_stream(tokenizer, prompt, HIDDEN, True)
    assert isinstance(stream, WindowStream)
    unknown = tokenizer.vocab_size + 7
    deltas = [stream.feed(id) for id in [*ids, unknown, unknown, *ids, *[unknown] * 9, *ids]]
    assert "".join(deltas) == " é龜🫠\tЯ" * 3
    assert deltas[:6] == [" ", "", "é", "", "", "龜"]
    assert stream.flush() == ""


def test_window_stream_does_not_hold_broken_bytes_for_ever(byte_level):
    stream = WindowStream(byte_level.decode, [])
    shown = "".join(stream.feed(id) for id in byte_level.encode("a", False) + [byte_level.encode("é", False)[1]] * 100)
    assert shown.startswith("a") and len(shown) > 95
    assert len(stream._ids) < 10
