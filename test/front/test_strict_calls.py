"""Calls of strict tools: what the form makes a model write is what the parser of its format reads."""

import json

import pytest

from lightllm.common.grammar.forms import Calls, Regex
from lightllm.server.chat_constraints import constrained
from lightllm.server.chat_format import Chat
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.output_parsers.registry import TOOL_PARSERS, AnswerParser

SCHEMA = {"type": "object", "properties": {"city": {"const": "Bern"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather.of-city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]
CHAT = Chat([{"role": "user", "content": "hi"}], TOOLS, strict_tools=frozenset({"weather.of-city"}))


TEMPLATE = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("parser", "special"),
    [
        ("hermes", None), ("qwen3", "<tool_call>"), ("llama3", None), ("mistral", "[TOOL_CALLS]"), ("deepseekv3", None),
        ("deepseekv3", "<｜tool▁call▁begin｜>"), ("deepseekv31", None),
    ],
)  # fmt: skip
def test_the_parser_reads_what_the_form_demands(format_of, parser: str, special: str | None) -> None:
    format = format_of(TEMPLATE, *filter(None, [special]), tool_call_parser=parser)
    chat, constraint = constrained(format, CHAT, SamplingParams())
    assert constraint is not None and constraint.field == "tools" and not chat.constrained
    form = constraint.form
    assert isinstance(form, Calls) and isinstance(form.trigger, int if special else str)
    assert [tag.schema for tag in form.tags] == [SCHEMA, {"type": "object"}]
    for tag, name in zip(form.tags, ("weather.of-city", "clock")):
        pieces = [form.trigger, *tag.begin, '{"city": "Bern"}', *tag.end]
        text = "".join(format.tokenizer.token_text(p) if isinstance(p, int) else p for p in pieces)
        answer = AnswerParser(None, TOOL_PARSERS[parser](TOOLS))
        deltas = [answer.feed(text), answer.flush()]
        calls = [call for delta in deltas for call in delta.calls]
        assert calls[0].name == name and answer.completed == 1
        assert json.loads("".join(call.arguments for call in calls)) == {"city": "Bern"}
        assert "".join(delta.text for delta in deltas) == ""


def test_calls_may_take_the_place_of_a_constrained_answer(format_of) -> None:
    asked = SamplingParams(guided_regex="yes|no")
    _, constraint = constrained(format_of(TEMPLATE, tool_call_parser="hermes"), CHAT, asked)
    assert constraint is not None and constraint.field == "guided_regex"
    assert isinstance(constraint.form, Calls) and constraint.form.answer == Regex("yes|no")
    _, constraint = constrained(format_of(TEMPLATE, tool_call_parser="glm4"), CHAT, asked)
    assert constraint is not None and constraint.form == Regex("yes|no"), "this format's calls hold no JSON"


def test_a_thinking_model_may_think(format_of) -> None:
    format = format_of(TEMPLATE, "<think>", tool_call_parser="hermes")
    format.reasons = True
    _, constraint = constrained(format, CHAT, SamplingParams())
    assert constraint is not None and isinstance(constraint.form, Calls)
    assert constraint.form.free == [format.tokenizer.token_to_id("<think>")], "the end of thoughts is plain text here"


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm4", "pythonic", "none"])
def test_formats_without_json_refuse(format_of, parser: str) -> None:
    with pytest.raises(InvalidParameter, match="strict tools"):
        constrained(format_of(TEMPLATE, tool_call_parser=parser), CHAT, SamplingParams())
