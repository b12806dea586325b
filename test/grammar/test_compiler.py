"""What can be enforced compiles, everything else is refused with a reason (cases 99, 100, 111)."""

from __future__ import annotations

import pytest

from lightllm.common.grammar.compiler import (
    GrammarRefused,
    compile_choice,
    compile_json,
    compile_lark,
    compile_regex,
)

SCHEMAS_REFUSED = [
    ("not json", "JSON"),
    ("[1]", "object"),
    ({"type": "bar"}, "bar"),
    ({"properties": {"foo": "bar"}}, "object or boolean"),
    ({"$ref": "#/$defs/nowhere"}, "nowhere"),
    ({"$ref": "http://example.com/x.json"}, "x.json"),
    ({"enum": []}, "empty"),
    ({"not": {"type": "string"}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"contains": {"type": "string"}}, "contains"),
    ({"if": {}, "then": {}}, "if"),
    ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"oneOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 3}]}, "oneOf"),
    ({"type": "string", "format": "nonsense"}, "nonsense"),
    ({"type": "string", "pattern": "(?<=x)+"}, "look"),
    ({"type": "string", "pattern": "a{1000000000}"}, "repeats"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum|Unsat"),
]
REGEXES_REFUSED = ["", " ", "(", "[", "(?<=x)+", "a{1000000000}", "(a+)+$" * 10000, r"\p{Foo}", "a{5,99999999}"]
GRAMMARS_REFUSED = ["", "start: undefined_rule", "start", "start: /(/", 'root ::= nowhere "x"', "x" * (300 << 10)]


@pytest.mark.parametrize(("schema", "word"), SCHEMAS_REFUSED)
def test_schemas_that_are_refused(schema, word: str) -> None:
    with pytest.raises(GrammarRefused, match=word):
        compile_json(schema)


@pytest.mark.parametrize("pattern", REGEXES_REFUSED, ids=lambda p: p[:12])
def test_regular_expressions_that_are_refused(pattern: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        compile_regex(pattern)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("grammar", GRAMMARS_REFUSED, ids=lambda g: g[:12])
def test_grammars_that_are_refused(grammar: str) -> None:
    with pytest.raises(GrammarRefused):
        compile_lark(grammar)


def test_choices_that_are_refused() -> None:
    for choices in ([], ["", "a"]):
        with pytest.raises(GrammarRefused):
            compile_choice(choices)


def test_what_compiles() -> None:
    assert compile_json('{"type": "object"}') == compile_json({"type": "object"})
    assert compile_json({}) and compile_regex("(a|b)+c?") and compile_choice(['a"b', "é\n"])
    assert compile_lark('start: "a" b\nb: /[0-9]+/') and compile_lark('root ::= "a" b\nb ::= [0-9]+')
