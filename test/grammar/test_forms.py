"""What can be enforced compiles, everything else is refused with a reason (cases 99, 100, 111)."""

import pytest

from lightllm.common.grammar.backend import checked
from lightllm.common.grammar.forms import (
    Calls,
    CallTag,
    Form,
    GrammarRefused,
    Lark,
    Regex,
    Thoughts,
    choice_form,
    decode,
    json_form,
)

BACKENDS = ("llguidance", "xgrammar")
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
    ({"type": "string", "pattern": "(?<=x)+"}, "(?i)look"),
    ({"type": "string", "pattern": "a{1000000000}"}, "repeats"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum|Unsat"),
]
MALFORMED = [
    {"type": {}}, {"type": "object", "properties": []}, {"type": "object", "properties": {"a": {}}, "required": 5},
    {"type": "array", "prefixItems": None}, {"type": "string", "pattern": 5}, {"type": "string", "format": ["uuid"]},
    {"anyOf": True}, {"enum": 1.5}, {"$ref": 5}, {"$ref": "#/$defs/a", "$defs": [{}]}, {"type": "array", "items": "x"},
]  # fmt: skip
REGEXES_REFUSED = [
    "",
    " ",
    "(",
    "[",
    "(?<=x)+",
    "a{1000000000}",
    "(a+)+$" * 10000,
    r"\p{Foo}",
    r"\Aa\Z",
    "a{5,99999999}",
]
GRAMMARS_REFUSED = ["", "start: undefined_rule", "start", "start: /(/", 'root ::= nowhere "x"', "x" * (300 << 10)]


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.mark.parametrize(("schema", "word"), SCHEMAS_REFUSED)
def test_schemas_that_are_refused(backend: str, schema, word: str) -> None:
    with pytest.raises(GrammarRefused, match=word):
        checked(json_form(schema), backend)


def test_keywords_that_bound_nothing_are_not_refused(backend: str) -> None:
    """zod names the names of a record's keys, which are always texts."""
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}
    texts = {"type": "array", "items": {"type": "string"}, "uniqueItems": False}
    schema = {"type": "object", "properties": {"record": record, "uniqueItems": texts}, "required": ["record"]}
    checked(json_form(schema), backend)
    odd = {"properties": {"uniqueItems": False, "x": {"enum": [{"uniqueItems": False}]}}}
    assert json_form(odd).schema == odd, "neither a property nor a value is a keyword"


@pytest.mark.parametrize("schema", MALFORMED, ids=str)
def test_what_is_no_schema_is_refused(backend: str, schema) -> None:
    with pytest.raises(GrammarRefused) as refused:
        checked(json_form(schema), backend)
    assert ".cc:" not in str(refused.value)


def test_chains_of_references_keep_xgrammar_for_minutes() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(501)} | {"d501": {"type": "integer"}}
    with pytest.raises(GrammarRefused, match="at most 500"):
        checked(json_form({"$ref": "#/$defs/d0", "$defs": chain}), "xgrammar")


def test_the_patterns_of_a_schema_are_bounded_together() -> None:
    patterns = {f"k{i}": {"type": "string", "pattern": "[a-z]{0,99}"} for i in range(51)}
    with pytest.raises(GrammarRefused, match="5049 parts"):
        checked(json_form({"type": "object", "properties": patterns}), "xgrammar")


def test_many_optional_properties_keep_xgrammar_for_minutes() -> None:
    wide = {"type": "object", "properties": {f"k{i}": {"type": "null"} for i in range(20)}, "required": ["k0"]}
    names = [f"o{i}" for i in range(16)]
    schema = {"type": "object", "properties": dict.fromkeys(names[:15], wide), "required": names[:15]}
    assert checked(json_form(schema), "xgrammar")
    with pytest.raises(GrammarRefused, match="304 properties"):
        checked(json_form(schema | {"properties": dict.fromkeys(names, wide), "required": names}), "xgrammar")


@pytest.mark.parametrize("pattern", REGEXES_REFUSED, ids=lambda p: p[:12])
def test_regular_expressions_that_are_refused(backend: str, pattern: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        checked(Regex(pattern), backend)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("pattern", ["((a{1,100}){1,100}){1,100}", "(([a-z]{1,50}){1,50}){1,50}", "(ab|[)(]{30}){500}"])
def test_repeats_of_repeats_cannot_hold_up_xgrammar(pattern: str) -> None:
    for form in (Regex(pattern), json_form({"type": "string", "pattern": pattern})):
        with pytest.raises(GrammarRefused, match="parts"):
            checked(form, "xgrammar")
        assert checked(form, "llguidance")


@pytest.mark.parametrize("grammar", GRAMMARS_REFUSED, ids=lambda g: g[:12])
def test_grammars_that_are_refused(backend: str, grammar: str) -> None:
    with pytest.raises(GrammarRefused):
        checked(Lark(grammar), backend)


def test_choices_that_are_refused() -> None:
    for choices in ([], ["", "a"]):
        with pytest.raises(GrammarRefused):
            choice_form(choices)


CITY = {"type": "object", "properties": {"c": {"enum": ["x"]}}, "required": ["c"], "additionalProperties": False}
GOOD: list[Form] = [
    json_form({}),
    Regex("(a|b)+c?"),
    choice_form(['a"b', "é\n"]),
    Lark('start: "a" b\nb: /[0-9]+/'),
    Lark('root ::= "a" b\nb ::= [0-9]+'),
    Thoughts("<think>", "</think>", json_form(CITY)),
    Calls("<tool_call>", [CallTag(['{"name": "f", "arguments": '], CITY, ["}</tool_call>"])]),
]


@pytest.mark.parametrize("form", GOOD, ids=lambda form: str(form)[:40])
def test_what_can_be_enforced(backend: str, form: Form) -> None:
    assert decode(checked(form, backend)) == form


def test_a_schema_may_come_as_text() -> None:
    assert json_form('{"type": "object"}') == json_form({"type": "object"})
