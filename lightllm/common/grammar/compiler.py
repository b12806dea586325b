"""What a request demands of its output's form, as a grammar that llguidance reads. Torch-free."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

MAX_GRAMMAR_CHARACTERS = 256 << 10
MAX_REPEAT = 10_000  # of a part of a regular expression
# One space at most, and only behind a separator: a weak model cannot loop on whitespace.
JSON_OPTIONS = {"item_separator": ",[ ]?", "key_separator": ":[ ]?", "whitespace_flexible": False}
CACHED = 256
REPEATS = re.compile(r"(?<!\\)\{(\d+)(?:,(\d*))?\}")


class GrammarRefused(ValueError):
    """A schema, regular expression or grammar that cannot be enforced; the message says what is wrong with it."""


def compile_json(schema: str | dict[str, Any]) -> str:
    """Of a JSON schema, as text or as an object. Whatever of it cannot be enforced is refused by its keyword."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise GrammarRefused(f"the schema is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise GrammarRefused("a schema is an object")
    _check_patterns(schema)
    return _compiled("json", json.dumps(schema))


def compile_regex(pattern: str) -> str:
    _check_repeats(pattern)
    return _compiled("regex", pattern)


def compile_lark(grammar: str) -> str:
    """Of a grammar in Lark's words, or in GBNF (rules with `::=`)."""
    return _compiled("lark", grammar)


def compile_choice(choices: list[str]) -> str:
    """One of these texts."""
    if not choices or not all(choices):
        raise GrammarRefused("there must be choices, none of them empty")
    return _compiled("lark", "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


@lru_cache(CACHED)
def _compiled(kind: str, text: str) -> str:
    """The grammar, checked. Takes milliseconds, hundreds of them for the largest; raises GrammarRefused."""
    try:
        from llguidance import LLMatcher, gbnf_to_lark
    except ImportError:
        raise GrammarRefused("the server lacks the extra `grammar` (pip install 'lightllm[grammar]')") from None
    if not text.strip():
        raise GrammarRefused("it is empty")
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarRefused(f"{len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS}")
    try:
        if kind == "json":
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
        elif kind == "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        else:
            grammar = LLMatcher.grammar_from_lark(gbnf_to_lark.any_to_lark(text) if "::=" in text else text)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    except Exception as error:
        raise GrammarRefused(_short(str(error))) from None
    if failed:
        raise GrammarRefused(_short(messages[0]))
    return grammar


def limits() -> Any:
    """Bounds of time and memory of one matcher."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def _short(message: str) -> str:
    return " ".join(message.split())[:500]


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
