"""Tool-call and reasoning parsers: however the answer is cut into pieces, text, thoughts and calls are the same."""

import json
import random
from typing import Any
from unittest.mock import Mock

import pytest

from lightllm.server.api_connection import encode_json
from lightllm.server.output_parsers.base import CallDelta, Delta
from lightllm.server.output_parsers.json_scanner import JsonScanner
from lightllm.server.output_parsers.listed import ConstrainedParser
from lightllm.server.output_parsers.reasoning import ReasoningParser
from lightllm.server.output_parsers.registry import TOOL_PARSERS, AnswerParser, reasons, tool_parser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
            },
        },
    }
]
ARGUMENTS = {"city": 'Zürich "龜" </x> {[', "days": 3}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL = '{"name": "weather", "arguments": ' + JSON + "}"
OTHER = '{"name": "other", "arguments": {}}'
BEGIN, END = "｜tool▁call▁begin｜", "｜tool▁call▁end｜"
V3 = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"

Expected = tuple[str, list[tuple[str, object]]]
TWO: list[tuple[str, object]] = [("weather", ARGUMENTS), ("other", {})]

CASES: list[tuple[str, str, Expected]] = [
    ("hermes", "Just text, with < and <tool and {}.", ("Just text, with < and <tool and {}.", [])),
    ("hermes", f"Wait.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{OTHER}</tool_call>", ("Wait.", TWO)),
    ("hermes", f"<tool_call>{CALL}</tool_call> Done.", (" Done.", TWO[:1])),
    ("hermes", '<tool_call>{"arguments": {}, "name": "other"}</tool_call>', ("", TWO[1:])),
    ("hermes", '<tool_call>{"name": "other", "arguments": "{}", "id": [1, {"a": null}]}</tool_call>', ("", TWO[1:])),
    ("hermes", '<tool_call>{"name": 1}</tool_call>', ('<tool_call>{"name": 1}</tool_call>', [])),
    ("hermes", "<tool_call>nothing</tool_call>", ("<tool_call>nothing</tool_call>", [])),
    ("hermes", '<tool_call>{"name": "other" ]</tool_call>x', ('<tool_call>{"name": "other" ]</tool_call>x', [])),
    ("hermes", "a <tool_call>", ("a<tool_call>", [])),
    ("hermes", "<tool_call>[]</tool_call>x", ("<tool_call>[]</tool_call>x", [])),
    ("qwen3_coder", "Now: <function=other>\n</function>\n</tool_call>\n<tool_call><function=other></function>"
     "</tool_call>", ("Now:", [*TWO[1:], *TWO[1:]])),
    ("qwen3_coder", "<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>\n",
     ("", [("weather", {"days": 3})])),
    ("qwen3_coder", "<function=other></function>\n<function=other>\n</function> Done.",
     (" Done.", [*TWO[1:], *TWO[1:]])),
    ("qwen3_coder", "what <function= and <func", ("what <function= and <func", [])),
    ("qwen3_coder", "Now:\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\nWest\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n<parameter=tags>\n[\"a\"]\n</parameter>\n</function>\n</tool_call>",
     ("Now:", [("weather", {"city": "Bern\nWest", "days": 3, "tags": ["a"]})])),
    ("qwen3_coder", "<tool_call><function=other></function></tool_call>", ("", TWO[1:])),
    ("qwen3_coder", "<tool_call>what</tool_call>", ("<tool_call>what</tool_call>", [])),
    ("glm4", "So <tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>3</arg_value>\n</tool_call><tool_call>other</tool_call>",
     ("So", [("weather", {"city": "12", "days": 3}), ("other", {})])),
    ("llama3", '{"name": "weather", "parameters": ' + JSON + '}; {"name": "other", "parameters": {}}', ("", TWO)),
    ("llama3", f"<|python_tag|>{CALL}", ("", TWO[:1])),
    ("llama3", "No {calls} here; none.", ("No {calls} here; none.", [])),
    ("llama3", f"<|python_tag|>no <|python_tag|>{CALL}", ("no", TWO[:1])),
    ("llama3", '<|python_tag|>{"name": "other"}', ("", TWO[1:])),
    ("llama3", '{"answer": 42}', ('{"answer": 42}', [])),
    ("llama3", '{"name": "Bob", "age": 42}', ('{"name": "Bob", "age": 42}', [])),
    ("mistral", f"Text[TOOL_CALLS] [{CALL}, {OTHER}]", ("Text", TWO)),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]other[ARGS]{{}}", ("", TWO)),
    ("mistral", f"[TOOL_CALLS]weather{JSON}", ("", TWO[:1])),
    ("mistral", "an [TOOL", ("an [TOOL", [])),
    ("mistral", f"Text [TOOL_CALLS]\n[TOOL_CALLS]weather[ARGS]{JSON}", ("Text", TWO[:1])),
    ("deepseekv3", "Hm." + V3.format(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>other<｜tool▁sep｜>{}<｜tool▁call▁end｜>"), ("Hm.", TWO)),
    ("deepseekv3", f"<{BEGIN}>what<{END}>", (f"<{BEGIN}>what<{END}>", [])),
    ("glm4", "<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", [])),
    ("pythonic", '[weather(city=\'Bern\', days=3), a.b(x={"y": [None, True]})]',
     ("", [("weather", {"city": "Bern", "days": 3}), ("a.b", {"x": {"y": [None, True]}})])),
    ("pythonic", "[1, 2] is a list", ("[1, 2] is a list", [])),
    ("pythonic", "plain", ("plain", [])),
]  # fmt: skip


GLM = "<tool_call>weather<arg_key>days</arg_key><arg_value>{}</arg_value></tool_call>"
HERMES = '<tool_call>{"arguments": %s, "name": "weather"}</tool_call>'
DEEP = '{"a": ' * 3000 + "1" + "}" * 3000

# What no JSON can hold, or what Python cannot read: it stays text, and nothing fails.
UNREADABLE: list[tuple[str, str, Expected]] = [
    *(("glm4", GLM.format(value), ("", [("weather", {"days": value})]))
      for value in ("NaN", "1e999", "...", "{1, 2}", "b'x'", "{[]: 1}", '"\\ud800"', DEEP, "-" * 9000 + "1")),
    *(("pythonic", text, (text, []))
      for text in ("[f(a=...)]", "[f(a={1, 2})]", "[f(a=1e999)]", "[f(**{'a': 1})]", "[f(a=" + "-" * 9000 + "1)]")),
    *(("hermes", HERMES % value, (HERMES % value, [])) for value in ('{"a": "\\ud800"}', '"1e999"', DEEP)),
    ("hermes", '<tool_call>{"name": "\\ud800x", "arguments": {}}</tool_call>', ("", [("?x", {})])),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "a\nb"}', ("", [("weather", {"city": "a\nb"})])),
]  # fmt: skip


def run(parser, pieces: list[str]) -> tuple[str, list[tuple[str, str]], list[Delta]]:
    """Text, (name, arguments) of each call, and the deltas."""
    deltas = [*map(parser.feed, pieces), parser.flush()]
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for part in delta.calls:
            if part.name is not None:
                assert part.index == len(calls), "calls come in order, and a name once"
                calls[part.index] = [part.name, ""]
            calls[part.index][1] += part.arguments
    return "".join(d.text for d in deltas), [(name, arguments) for name, arguments in calls.values()], deltas


def cuts(text: str) -> list[list[str]]:
    rng = random.Random(text)
    random_cuts = []
    for _ in range(20):
        places = sorted(rng.sample(range(len(text) + 1), min(len(text), 5)))
        random_cuts.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)])])
    return [[text], list(text), *random_cuts]


@pytest.mark.parametrize(("name", "answer", "expected"), CASES)
def test_every_cut_gives_the_same(name: str, answer: str, expected: Expected) -> None:
    for pieces in cuts(answer):
        text, calls, _ = run(TOOL_PARSERS[name](TOOLS), pieces)
        assert (text, [(name, json.loads(arguments)) for name, arguments in calls]) == expected, pieces


@pytest.mark.parametrize(("name", "answer", "expected"), UNREADABLE, ids=lambda value: str(value)[:40])
def test_what_cannot_be_read(name: str, answer: str, expected: Expected) -> None:
    text, calls, deltas = run(TOOL_PARSERS[name](TOOLS), [answer])
    assert (text, [(name, json.loads(arguments)) for name, arguments in calls]) == expected
    encode_json([part for delta in deltas for part in delta.calls])


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", f"<tool_call>{CALL}</tool_call>"),
        ("llama3", CALL),
        ("mistral", f"[TOOL_CALLS][{CALL}]"),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{JSON}"),
        ("deepseekv3", f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>"),
        ("deepseekv31", f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"),
    ],
)
def test_arguments_come_as_they_are_written(name: str, answer: str) -> None:
    _, calls, deltas = run(TOOL_PARSERS[name](TOOLS), list(answer))
    assert calls == [("weather", JSON)]
    assert sum(bool(part.arguments) for delta in deltas for part in delta.calls) == len(JSON)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("qwen3_coder", "<tool_call><function=weather>|<parameter=city>Bern</parameter>|"
         "<parameter=days>3</parameter>|</function></tool_call>|"),
        ("glm4", "<tool_call>weather<arg_key>|city</arg_key><arg_value>Bern</arg_value>|"
         "<arg_key>days</arg_key><arg_value>3</arg_value>|</tool_call>|"),
    ],
)  # fmt: skip
def test_parameters_come_one_by_one(name: str, answer: str) -> None:
    parser = TOOL_PARSERS[name](TOOLS)
    told = ["".join(part.arguments for part in parser.feed(piece).calls) for piece in answer.split("|")]
    assert told[:4] == ["{", '"city": "Bern"', ', "days": 3', "}"]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>VALUE</parameter></function></tool_call>"),
        ("glm4", "<tool_call>weather<arg_key>city</arg_key><arg_value>VALUE</arg_value></tool_call>"),
    ],
)
def test_a_long_value_is_not_looked_through_with_every_token(name: str, answer: str, monkeypatch) -> None:
    kind: Any = TOOL_PARSERS[name]
    pattern = Mock(wraps=kind._parameter)
    monkeypatch.setattr(kind, "_parameter", pattern)
    _, calls, _ = run(kind(TOOLS), list(answer.replace("VALUE", "x" * 1000)))
    assert calls == [("weather", json.dumps({"city": "x" * 1000}))]
    assert pattern.match.call_count == 1


def test_broken_arguments_of_the_newer_mistral_form_are_passed_on_up_to_the_break() -> None:
    for pieces in cuts('[TOOL_CALLS]weather[ARGS]{"days": 3, oops} after'):
        text, calls, _ = run(TOOL_PARSERS["mistral"](TOOLS), pieces)
        assert (text, calls) == ("oops} after", [("weather", '{"days": 3, ')])


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "string"}, {"8001": "8001", "null": "null", '{"a": 1}': '{"a": 1}'}),
        (
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            {"8001": "8001", "null": None, "[1]": "[1]", "true": "true"},
        ),
        ({"type": ["string", "null"]}, {"8001": "8001", "None": None}),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, {"8001": "8001", '["a"]': ["a"], "{}": "{}"}),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, {"8001": 8001, "null": None, "x": "x"}),
        ({"enum": ["1", "2"]}, {"1": "1"}),
        ({}, {"8001": 8001, "x": "x"}),
        ({"anyOf": 1, "enum": 2, "type": {}}, {"8001": 8001}),
    ],
)
def test_a_value_has_a_type_that_its_schema_names(schema: Any, values: dict[str, Any]) -> None:
    """Such as pydantic writes for a field of text that need not be given."""
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    for value, expected in values.items():
        answer = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
        _, [(_, arguments)], _ = run(TOOL_PARSERS["glm4"](tools), [answer])
        assert json.loads(arguments) == {"a": expected}


def test_a_parameter_that_never_ends_makes_no_call() -> None:
    parser = AnswerParser(None, TOOL_PARSERS["qwen3_coder"](TOOLS))
    run(parser, ["<tool_call><function=weather><parameter=city>Bern</function></tool_call>"])
    assert parser.completed == 0


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm4", "deepseekv3", "mistral", "llama3"])
def test_a_cut_call_is_not_complete(name: str) -> None:
    answers = {kind: answer for kind, answer, (_, calls) in CASES if len(calls) == 1 or kind == "deepseekv3"}
    answers["glm4"] = "<tool_call>weather<arg_key>city</arg_key><arg_value>1</arg_value></tool_call>"
    answer = answers[name].rstrip()
    end = answer.rindex(
        "}" if name in ("mistral", "llama3") else "<｜tool▁call▁end" if name == "deepseekv3" else "</tool_call>"
    )
    for length in range(end):
        parser = AnswerParser(None, TOOL_PARSERS[name](TOOLS))
        run(parser, [answer[:length]])
        assert parser.completed <= (name == "deepseekv3")


def test_broken_arguments_are_passed_on_up_to_the_break() -> None:
    parser = AnswerParser(None, TOOL_PARSERS["hermes"](TOOLS))
    text, calls, _ = run(
        parser, list('<tool_call>{"name": "weather", "arguments": {"days": 3, oops}}</tool_call> after')
    )
    assert calls == [("weather", '{"days": 3, ')] and text.endswith(" after")
    assert parser.completed == 0


def test_constrained_calls() -> None:
    for pieces in cuts(f"[{CALL},\n {OTHER}]"):
        _, calls, _ = run(ConstrainedParser(TOOLS), pieces)
        assert [(name, json.loads(arguments)) for name, arguments in calls] == TWO
    for length in range(len(CALL)):
        text, _, _ = run(ConstrainedParser(TOOLS), [f"[{CALL},\n {OTHER}]"[:length]])
        assert text == "", "a call that is cut is no text"


@pytest.mark.parametrize(
    ("answer", "opened", "reasoning", "text"),
    [
        ("<think>\nhm <b> 1\n</think>\n\nyes", False, "hm <b> 1", "yes"),
        ("  <think></think>yes", False, "", "yes"),
        ("hm\n</think>\nyes </think>", True, "hm", "yes </think>"),
        ("no thoughts <think>", False, "", "no thoughts <think>"),
        ("<think>never ends </thi", False, "never ends </thi", ""),
        ("<thin", False, "", "<thin"),
        ("", True, "", ""),
    ],
)
def test_reasoning(answer: str, opened: bool, reasoning: str, text: str) -> None:
    for pieces in cuts(answer):
        parser = ReasoningParser(opened)
        deltas = [*map(parser.feed, pieces), parser.flush()]
        assert ("".join(d.reasoning for d in deltas), "".join(d.text for d in deltas)) == (reasoning, text), pieces


def test_thoughts_then_calls() -> None:
    answer = f"<think>I need <tool_call></think>\n\nSo:<tool_call>{CALL}</tool_call>"
    for pieces in cuts(answer):
        parser = AnswerParser(ReasoningParser(False), TOOL_PARSERS["hermes"](TOOLS))
        text, calls, deltas = run(parser, pieces)
        assert "".join(d.reasoning for d in deltas) == "I need <tool_call>"
        assert (text, calls, parser.completed) == ("So:", [("weather", JSON)], 1)


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TO = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"{ANALYSIS}hm <b><|end|>{FINAL}yes", ("hm <b>", "yes", [])),
        (f"{ANALYSIS}hm<|end|><|start|>assistant{ANALYSIS}so<|end|>{FINAL}yes<|return|>", ("hm\nso", "yes", [])),
        (f"{ANALYSIS}hm<|end|><|start|>assistant{TO.format('other', '{}')}", ("hm", "", TWO[1:])),
        (f" to=functions.weather<|channel|>commentary json<|message|>{JSON}<|call|>", ("", "", TWO[:1])),
        (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{TO.format('weather', JSON)}"
         f"<|start|>assistant{TO.format('other', '{}')}", ("", "I look.", TWO)),
        (f"{ANALYSIS}never ends", ("never ends", "", [])),
        (f"{ANALYSIS}hm<|end|><|start|>assistant<|chan", ("hm", "", [])),
        ("<|channel|>fin", ("", "", [])),
        ('{"no": "channel"}', ("", '{"no": "channel"}', [])),
        ("to=x or assistant", ("", "to=x or assistant", [])),
    ],
)  # fmt: skip
def test_channels_of_gpt_oss(answer: str, expected) -> None:
    for pieces in cuts(answer):
        parser = AnswerParser(None, TOOL_PARSERS["gpt-oss"](TOOLS))
        text, calls, deltas = run(parser, pieces)
        found = [(name, json.loads(arguments)) for name, arguments in calls]
        assert ("".join(d.reasoning for d in deltas), text, found) == expected, pieces
        assert parser.completed == len(found)


def test_channels_without_tools_or_told_apart() -> None:
    for pieces in cuts(f"{ANALYSIS}hm<|end|><|start|>assistant{TO.format('other', '{}')}"):
        text, calls, _ = run(AnswerParser(None, TOOL_PARSERS["gpt-oss"]([]), separates=False), pieces)
        assert (text, calls) == ("hm{}", [])


def test_parsers_are_chosen_by_flag_or_template() -> None:
    assert tool_parser(None, "... <tool_call> ...") is TOOL_PARSERS["hermes"]
    assert tool_parser(None, "<tool_call><function=") is TOOL_PARSERS["qwen3_coder"]
    assert tool_parser(None, "<｜tool▁call▁begin｜>") is TOOL_PARSERS["deepseekv31"]
    assert tool_parser(None, "<｜tool▁call▁begin｜>```json") is TOOL_PARSERS["deepseekv3"]
    assert tool_parser(None, "<|channel|>final") is TOOL_PARSERS["gpt-oss"]
    assert tool_parser("mistral", "<tool_call>") is TOOL_PARSERS["mistral"]
    assert tool_parser("none", "<tool_call>") is None and tool_parser(None, "plain") is None
    assert reasons(None, "x.split('</think>')") and not reasons("none", "</think>") and reasons("qwen3", "")


def test_the_scanner_against_json() -> None:
    """It takes exactly what json takes, and an early refusal is never of a beginning that could have gone on."""
    rng = random.Random(3)
    alphabet = [*'{}[]",:\\ue0123.-tfn a\n', "true", "null", '"a"', '"a":', "1", "{}", "[]"]
    valid = 0
    for _ in range(30000):
        text = rng.choice("{[") + "".join(rng.choices(alphabet, k=rng.randint(1, 7))).rstrip()
        scanner = JsonScanner()
        released, rest = scanner.feed(text)
        if scanner.broken or rest:
            with pytest.raises(ValueError):
                json.loads(text)
            continue
        if scanner.done:
            json.loads(released)
            valid += 1
        else:
            with pytest.raises(ValueError):
                json.loads(text)
    assert valid > 100


def test_call_parts_say_when_a_call_is_complete() -> None:
    _, _, deltas = run(TOOL_PARSERS["hermes"](TOOLS), [f"<tool_call>{OTHER}</tool_call>"])
    assert deltas[0].calls[-1] == CallDelta(0, complete=True)
