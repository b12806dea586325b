"""Forms: what an output must look like, whatever library enforces it. They travel as JSON. Torch-free."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

MAX_CHARACTERS = 256 << 10  # of a form
MAX_MESSAGE = 500  # characters of what a library says of it
MAX_REPEAT = 10_000  # of a part of a regular expression
MAX_RULES = 2000  # of a grammar: with thousands libraries take minutes
DEAD_END = "no token may come next"  # why a text cannot go on that is not at its end
RULE = re.compile(r"^[^\S\n]*[?!\w-][^\"'/:\n]*:", re.MULTILINE)
REPEATS = re.compile(r"(?<!\\)\{(\d+)(?:,(\d*))?\}")


SAYS_NOTHING = (("propertyNames", {"type": "string"}), ("uniqueItems", False))  # zod says the first of every record
VALUES = frozenset({"const", "default", "enum", "examples"})  # keywords of schemas that hold no schemas
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # by any names


class GrammarRefused(ValueError):
    """A schema, regular expression or grammar that cannot be enforced; the message says what is wrong with it."""


def shortened(message: str) -> str:
    """What a library says, on one line."""
    return " ".join(message.split())[:MAX_MESSAGE]


class TagToken(msgspec.Struct, frozen=True):
    """A tag that is one token and plain text as well, as Qwen 3 has `</think>`: a model may also spell it."""

    text: str
    id: int


Piece = str | int | TagToken
"""Plain text, the id of a special token, which no text can spell, or a tag that is both."""


class Json(msgspec.Struct, frozen=True, tag="json"):
    """JSON that a schema describes, with one space at most in one place: a weak model cannot loop on whitespace."""

    schema: dict[str, Any]


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """A match of a regular expression, from its first to its last character."""

    pattern: str


class Lark(msgspec.Struct, frozen=True, tag="lark"):
    """A text of a grammar in Lark's words, or in GBNF (rules with `::=`)."""

    grammar: str


class CallTag(msgspec.Struct, frozen=True):
    """A call of one tool as it is written behind the trigger: `begin`, arguments that the schema describes, `end`."""

    begin: list[Piece]
    schema: dict[str, Any]
    end: list[Piece]


class Calls(msgspec.Struct, frozen=True, tag="calls"):
    """Any text; but what follows `trigger` is one of the calls. free: tokens that may stand in the text as well.

    answer: what an output without calls must be, instead of any text; calls then stand alone.
    """

    trigger: Piece
    tags: list[CallTag]
    free: list[Piece] = []
    answer: Json | Regex | Lark | None = None


class Thoughts(msgspec.Struct, frozen=True, tag="thoughts"):
    """Any text up to `end`, then what `form` describes.

    begin: what opens the thoughts, which may then be left out; None where the prompt has opened them.
    """

    begin: Piece | None
    end: Piece
    form: Json | Regex | Lark | Calls


Form = Json | Regex | Lark | Thoughts | Calls
_decoder = msgspec.json.Decoder(Form)


def encode(form: Form) -> str:
    return msgspec.json.encode(form).decode()


def decode(text: str) -> Form:
    return _decoder.decode(text)


def json_form(schema: str | dict[str, Any]) -> Json:
    """Of a schema as text or as an object. Raises GrammarRefused."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise GrammarRefused(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise GrammarRefused("a schema is an object")
    return Json(telling(schema))


def telling(schema: Any) -> Any:
    """A JSON schema without keywords that bound nothing, which libraries refuse all the same."""
    if isinstance(schema, list):
        return [telling(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    told = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            told[key] = {name: telling(part) for name, part in value.items()}
        elif (key, value) not in SAYS_NOTHING:
            told[key] = value if key in VALUES else telling(value)
    return told


def choice_form(choices: list[str]) -> Lark:
    """One of these texts. Raises GrammarRefused."""
    if not choices or not all(choices):
        raise GrammarRefused("there must be choices, none of them empty")
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    # ::= would say that it is GBNF, and DEL may not stand in a text
    return Lark("start: CHOICE\nCHOICE: " + texts.replace("::=", "\\u003a:=").replace("\x7f", "\\u007f"))


def parts(form: Form) -> Iterator[Json | Regex | Lark]:
    """What is to be enforced of it, without how it is put together."""
    match form:
        case Thoughts(form=inner):
            yield from parts(inner)
        case Calls(tags=tags, answer=answer):
            yield from (Json(tag.schema) for tag in tags)
            if answer is not None:
                yield answer
        case _:
            yield form


def check_size(form: Form) -> None:
    """Raises GrammarRefused for what no library should be asked to look at: nothing, too much."""
    if (length := len(encode(form))) > MAX_CHARACTERS:
        raise GrammarRefused(f"{length} characters; at most {MAX_CHARACTERS}")
    for part in parts(form):
        match part:
            case Regex(text) | Lark(text) if not text.strip():
                raise GrammarRefused("it is empty")
            case Lark(grammar) if (count := len(RULE.findall(grammar))) > MAX_RULES:
                raise GrammarRefused(f"{count} rules; at most {MAX_RULES}")
            case Regex(pattern):
                _check_repeats(pattern)
            case Json(schema):
                _check_patterns(schema)


def _check_patterns(schema: Any) -> None:
    if isinstance(schema, list):
        for item in schema:
            _check_patterns(item)
    elif isinstance(schema, dict):
        for key, item in schema.items():
            if key == "pattern" and isinstance(item, str):
                _check_repeats(item)
            _check_patterns(item)


def _check_repeats(pattern: str) -> None:
    for match in REPEATS.finditer(pattern):
        count = max(int(number) for number in match.groups() if number)
        if count > MAX_REPEAT:
            raise GrammarRefused(f"{match[0]} repeats more than {MAX_REPEAT} times")
