"""What a user types is text: no control token comes out of it, and everything else is encoded as ever (case 107)."""

import random

import pytest
from detokenization.conftest import BUILDERS
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from lightllm.server.control_tokens import CLOSE, OPEN, any_of, mark, split_marked
from lightllm.server.tokenizer import FastTokenizer
from lightllm.server.tokenizer_config import TokenizerConfig
from lightllm.server.transformers_tokenizer import from_transformers

TEXTS = [
    "a",
    " b",
    "Hello world!",
    "\n",
    "é龜🫠",
    "<|",
    "|>",
    "im_start",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    " added word",
]


@pytest.fixture(params=list(BUILDERS))
def own(request):
    hf = BUILDERS[request.param]()
    if request.param == "sentencepiece":
        hf.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return from_transformers(hf)


def test_a_prompt_without_marks_is_encoded_as_ever(own) -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices(TEXTS, k=rng.randint(0, 9)))
        pieces = split_marked(text, tuple(own.added_tokens()))
        assert own.encode_pieces(pieces) == own.encode(text, add_special_tokens=False), text


def test_marked_tokens_are_text(own) -> None:
    tokens = own.added_tokens()
    own_ids = {own.token_to_id(token) for token in tokens}
    start, end = own.token_to_id("<|im_start|>"), own.token_to_id("<|im_end|>")
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choices(TEXTS, k=rng.randint(1, 9)))
        prompt = f"<|im_start|>{mark(text, any_of(tuple(tokens)))}<|im_end|>"
        ids = own.encode_pieces(split_marked(prompt, tuple(tokens)))
        assert (ids[0], ids[-1]) == (start, end)
        assert not own_ids & set(ids[1:-1]), text
        assert own.decode(ids[1:-1]).strip() == text.strip()


def test_a_template_that_cuts_marked_tokens_joins_nothing(own) -> None:
    tokens = list(own.added_tokens())
    typed = mark("<|im_<|im_end|>start|>", any_of(tuple(tokens)))
    for cut in (typed.replace("<|im_end|>", ""), "".join(typed.split("<|im_end|>")), typed.replace(OPEN, "")):
        ids = own.encode_pieces(split_marked(cut, tuple(tokens)))
        assert own.token_to_id("<|im_start|>") not in ids


def test_the_names_that_tokens_have_in_between_cannot_be_typed(own) -> None:
    ids = {own.token_to_id(token) for token in own.added_tokens()}
    pieces = [
        piece for i in range(9) for piece in (f"\U000f0002{chr(0x100000 + i)}\U000f0003", f"\U0010fff2{i}\U0010fff3")
    ]
    assert not ids & set(own.encode_pieces([(piece, False) for piece in pieces]))


def test_marks_that_a_user_types_are_dropped() -> None:
    pattern = any_of(("<s>",))
    assert mark(f"{CLOSE}<s>{OPEN}<s>", pattern) == f"{OPEN}<s>{CLOSE}" * 2
    assert mark({f"a{OPEN}": ["<s>", 1, None]}, pattern) == {"a": [f"{OPEN}<s>{CLOSE}", 1, None]}


def test_a_sentencepiece_text_gets_its_space_once() -> None:
    hf = BUILDERS["sentencepiece"]()
    hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    own = from_transformers(hf)
    text = "<s>Hello</s>Hello"
    assert own.encode_pieces(split_marked(text, tuple(own.added_tokens()))) == own.encode(text, False)


def test_added_tokens_that_merges_make_are_made_as_ever() -> None:
    """As Gemma's of several spaces or line ends. What merges would make of a typed control token stays text."""
    plain, special = ("▁▁", "\n\n"), ("<s>", "<e>")
    pieces = [*special, *plain, *"▁\n<se>ab", "ab", "<e"]
    merges = [("▁", "▁"), ("\n", "\n"), ("a", "b"), ("<", "e"), ("<e", ">")]
    backend = Backend(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=merges))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])
    own = FastTokenizer(backend, TokenizerConfig())
    text = "a  b\n\nab"
    prompt = f"<s>{mark(f'{text}<s><e>', any_of(special))}<e>"
    ids = own.encode_pieces(split_marked(prompt, tuple(own.added_tokens())))
    typed = [pieces.index(piece) for piece in ("<", "s", ">", "<e", ">")]
    assert ids == [0, *own.encode(text, False), *typed, 1]
