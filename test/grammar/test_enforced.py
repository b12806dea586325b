"""Random texts that a mask allows satisfy the schema, or the schema was refused (case 100), by both libraries."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from cases.test_g_dialects import SCHEMAS
from grammar.test_many_schemas import random_schema
from support.checkpoints import EOS, VOCABULARY, byte_tokenizer
from tokenizers import AddedToken

from lightllm.common.grammar.backend import Backend, backend_named, checked
from lightllm.common.grammar.forms import GrammarRefused, Lark, Regex, choice_form, decode, json_form

MOST_TOKENS = 2000
NUM_RANDOM = 60
HARD: list[dict[str, Any]] = [
    {"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 5},
    {"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": {"type": "string", "minLength": 2, "maxLength": 3}}},
    {"type": "string", "pattern": "^[ab]{3}$", "maxLength": 2},
    {"type": "string", "pattern": "^a$b"},
    {"enum": ["long", 1], "type": "integer"},
    {"minimum": 5},
    {"required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "null"}}, "minProperties": 1, "additionalProperties": False},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "date-time"},
    {"type": "array", "items": {"type": "string", "format": "uuid"}, "maxItems": 1},
    {"const": {"<|eos|>": "<|im_start|>"}},
    *(
        {"type": "string", "pattern": pattern}
        for pattern in (
            "^.{3}é[^β-δ]{3}🫠$",
            '^a"b$',
            r"^\\$",
            "^\t$",
            r"^(\n|b)$",
            r"^[\t-\r]$",
            r"^\x22\u005C$",
            r'^[^"\n]{2}\.[^\]\\]$',
        )
    ),
]


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(backend, tmp_path_factory) -> Backend:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return backend_named(backend)(Path(folder, "tokenizer.json"), VOCABULARY, [EOS])


def walk(engine: Backend, grammar: str, rng: random.Random) -> str | None:
    """A random text, which ends as soon as it may; None if it is long."""
    matcher, data = engine.first(decode(grammar)), bytearray()
    characters = byte_tokenizer().convert_ids_to_tokens(range(256))
    values = {character: value for value, character in enumerate(characters)}
    assert len(values) == 256
    mask = np.zeros((VOCABULARY + 31) // 32, dtype=np.int32)
    for _ in range(MOST_TOKENS):
        engine.fill(matcher, mask)
        assert not matcher.failure
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCABULARY].nonzero()[0].tolist()
        assert allowed and max(allowed) <= EOS, "no control token, none without text"
        if EOS in allowed:
            return byte_tokenizer().decode(list(data))
        printable = [token for token in allowed if 32 <= ord(characters[token]) < 127]
        token = rng.choice(printable if printable and rng.random() < 0.9 else allowed)
        data.append(token)
        matcher.accept(token)
        assert not matcher.failure
    return None


@pytest.mark.parametrize("number", range(len(SCHEMAS) + len(HARD) + NUM_RANDOM))
def test_what_the_mask_allows_validates(backend: str, engine: Backend, number: int) -> None:
    fixed = [*SCHEMAS, *HARD]
    schema = fixed[number] if number < len(fixed) else random_schema(random.Random(number))
    try:
        grammar = checked(json_form(schema), backend)
    except GrammarRefused as refused:
        assert number < len(fixed) or "format" in str(refused), "what small models are asked for is served"
        return
    rng = random.Random(number)
    texts = [text for _ in range(8) if (text := walk(engine, grammar, rng)) is not None]
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for text in texts:
        checker.validate(json.loads(text))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Backend:
    """llguidance with an ordinary added token that looks like a tag, as Qwen 3 and DeepSeek have it."""
    folder, tokenizer = tmp_path_factory.mktemp("tokenizer"), byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.save_pretrained(folder)
    return backend_named("llguidance")(folder / "tokenizer.json", VOCABULARY, [EOS])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Regex(r"<think>a<\|im_end\|>"), "<think>a<|im_end|>"),
        (choice_form(["<|eos|>"]), "<|eos|>"),
        (json_form({"enum": ["<think>"]}), '"<think>"'),
        (Lark('root ::= "<|eos|>" [a] "<think>"'), "<|eos|>a<think>"),
    ],
)
def test_text_that_spells_tokens(thinking: Backend, form, text: str) -> None:
    """Also where no other text may follow."""
    assert walk(thinking, checked(form, "llguidance"), random.Random(0)) == text


def test_tokens_that_a_grammar_names(thinking: Backend) -> None:
    """In Lark's words: outside of strings, expressions and comments."""
    grammar = 'start: "<think>" <|im_end|> /<think>"/ <think> "b" // <think>'
    think = byte_tokenizer().encode("<think>")
    matcher, mask = thinking.first(Lark(grammar)), np.zeros((VOCABULARY + 31) // 32, dtype=np.int32)
    for token in [*think, 258, *think, *byte_tokenizer().encode('"'), 259, *byte_tokenizer().encode("b"), EOS]:
        thinking.fill(matcher, mask)
        assert mask[token // 32] >> (token % 32) & 1 and not matcher.failure
        matcher.accept(token)
