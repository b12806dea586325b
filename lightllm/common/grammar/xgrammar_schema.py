"""What of JSON schemas xgrammar enforces: it passes over the rest in silence, so the rest is refused here."""

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import msgspec

from lightllm.common.grammar.forms import GrammarRefused

TYPES: dict[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "x-guidance"})
ROOT = frozenset({"$schema", "$id", "$comment", "$defs", "definitions"})
FORMATS = frozenset({"uuid", "email"})  # of others it takes some that are none: 30 February, 1.02.3.4
MAX_PARTS = 5000  # of all patterns; more take the library longer than ten seconds
MAX_OPTIONAL = 300  # properties of all objects; the time grows with their square
PIECES = re.compile(r"\\.|\[(?:\\.|[^\]])*\]|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|.", re.DOTALL)
# characters that JSON escapes, `bad` where no negated class leaves them out
ESCAPED = re.compile(
    r"""\[\^(?:\\.|[^\]])*\]|(?P<bad>["\x00-\x1f]|\\(?:["\\0abefnrtv]|c.|(?:x|u00)(?:[01].|22|5[cC])|u\{))|\\.""",
    re.DOTALL,
)
FOREIGN = re.compile(r"\\?([^\x00-\x7f])")
CHOICES = ("$ref", "anyOf", "enum", "const")  # each of which stands alone


class _Shape(msgspec.Struct, rename={"ref": "$ref", "defs": "$defs"}):
    """Of keywords that are looked at here."""

    type: str | list[str] = []
    properties: dict[str, Any] = {}
    required: list[str] = []
    prefixItems: list[Any] = []
    enum: list[Any] = []
    anyOf: list[Any] = []
    defs: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    ref: str = ""
    pattern: str = ""
    format: str = ""


def check_schema(schema: Any) -> None:
    """Raises GrammarRefused naming the keyword that would not be enforced, or for what takes minutes to compile."""
    schemas = list(_schemas(schema))
    for part in schemas:
        _check(part)
    optional = sum(len(part.get("properties", {}).keys() - set(part.get("required", []))) for part in schemas)
    if optional > MAX_OPTIONAL:
        raise GrammarRefused(f"{optional} properties that are not required; at most {MAX_OPTIONAL}")
    _check_length([part["pattern"] for part in schemas if "pattern" in part])


def in_ascii(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy whose patterns spell other characters: beside such the library takes strings that are no JSON."""
    copied = deepcopy(schema)
    for part in _schemas(copied):
        if "pattern" in part:
            part["pattern"] = FOREIGN.sub(lambda match: f"\\u{{{ord(match[1]):x}}}", part["pattern"])
    return copied


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """It and those inside, without booleans."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise GrammarRefused("a schema is an object or boolean")
    try:
        msgspec.convert(schema, _Shape)
    except msgspec.ValidationError as error:
        raise GrammarRefused(f"no schema: {error}") from None
    yield schema
    inner = [schema[name] for name in ("items", "additionalProperties") if name in schema]
    for name in ("anyOf", "prefixItems"):
        inner += schema.get(name, [])
    for name in ("properties", "$defs", "definitions"):
        inner += schema.get(name, {}).values()
    for part in inner:
        yield from _schemas(part)


def _check(schema: dict[str, Any]) -> None:
    keywords = schema.keys() - NOTES - ROOT
    values = schema.get("enum", []) if "enum" in schema else [schema["const"]] if "const" in schema else []
    chosen = next((choice for choice in CHOICES if choice in keywords), None)
    if chosen is None:
        _check_typed(schema, keywords)
    elif others := keywords - {chosen, "type" if values else chosen}:
        raise GrammarRefused(f"{min(others)} beside {chosen} is not enforced")
    if values and not all(_has_type(value, _types(schema)) for value in values):
        raise GrammarRefused(f"{chosen} holds values that are not of the type {schema['type']}")
    if not (reference := schema.get("$ref", "#")).startswith("#"):
        raise GrammarRefused(f"$ref: {reference} is not in this schema")
    if "pattern" in schema:
        _check_anchors(schema["pattern"])
        for match in ESCAPED.finditer(schema["pattern"]):
            if match["bad"]:
                raise GrammarRefused(f"{match[0]!r} in a pattern would not be escaped as JSON has it")


def check_pattern(pattern: str) -> None:
    """Raises GrammarRefused for what is passed over in a regular expression, or for what takes minutes to compile."""
    _check_anchors(pattern)
    _check_length([pattern])


def _check_anchors(pattern: str) -> None:
    """They are enforced at its two ends only."""
    bare = re.sub(r"\\[^bBAZz]|\[(?:\\.|[^\]])*\]", "", pattern).removeprefix("^").removesuffix("$")
    if anchor := re.search(r"\^|\$|\\[bBAZz]", bare):
        raise GrammarRefused(f"{anchor[0]} inside a regular expression is not enforced")


def _check_length(patterns: list[str]) -> None:
    if (parts := sum(map(_parts_of_pattern, patterns))) > MAX_PARTS:
        raise GrammarRefused(f"regular expressions that repeat into {parts} parts; at most {MAX_PARTS}")


def _parts_of_pattern(pattern: str) -> int:
    """Characters of the pattern once its counted repeats are written out, which is what the library does."""
    counts, last = [0], 0
    for piece in PIECES.finditer(pattern):
        if piece[0] == "(":
            counts.append(0)
        elif piece[0] == ")" and len(counts) > 1:
            last = counts.pop()
            counts[-1] += last
        elif piece["most"] or piece["least"]:
            times = int(piece["most"] or piece["least"])
            counts[-1] += last * (times - 1)
            last *= times
        else:
            last = 1
            counts[-1] += 1
    return sum(counts)


def _types(schema: dict[str, Any]) -> list[str]:
    named = schema.get("type", [])
    return named if isinstance(named, list) else [named]


def _has_type(value: Any, types: list[str]) -> bool:
    kind = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    name = kind.get(type(value), "null")
    return not types or name in types or (name == "integer" and "number" in types)


def _check_typed(schema: dict[str, Any], keywords: set[str]) -> None:
    types = _types(schema)
    for name in types:
        if name not in TYPES:
            raise GrammarRefused(f"there is no type {name}")
    known = frozenset().union(*(TYPES[name] for name in types or TYPES)) | {"type"}
    if unknown := keywords - known:
        raise GrammarRefused(f"{min(unknown)} is not enforced")
    if not types and keywords:
        raise GrammarRefused(f"{min(keywords)} without a type is not enforced")
    if unnamed := set(schema.get("required", [])) - set(schema.get("properties", {})):
        raise GrammarRefused(f"required {min(unnamed)}, which is not among the properties, is not enforced")
    if {"pattern", "format"} & keywords and len({"pattern", "format", "minLength", "maxLength"} & keywords) > 1:
        raise GrammarRefused("pattern or format beside another bound of a text is not enforced")
    if "format" in keywords and schema["format"] not in FORMATS:
        raise GrammarRefused(f"format {schema['format']} is not enforced")
