"""Calls of strict tools: what the form makes a model write is what the parser of its format reads."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from lightllm.common.grammar.forms import Calls, Regex
from lightllm.server.chat_constraints import constrained
from lightllm.server.chat_format import Chat, ChatFormat
from lightllm.server.core.sampling_params import InvalidParameter, SamplingParams
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.output_parsers.registry import TOOL_PARSERS, AnswerParser
from lightllm.server.tokenizer import load_tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"const": "Bern"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather.of-city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]
CHAT = Chat([{"role": "user", "content": "hi"}], TOOLS, strict_tools=frozenset({"weather.of-city"}))


def format_of(model_dir, tmp_path, parser: str, special: str | None) -> ChatFormat:
    backend = Backend.from_file(str(model_dir / "tokenizer.json"))
    if special:
        backend.add_special_tokens([AddedToken(special, special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatFormat(load_tokenizer(str(tmp_path)), ServerArgs(model_dir=str(tmp_path), tool_call_parser=parser))


@pytest.mark.parametrize(
    ("parser", "special"),
    [
        ("hermes", None), ("qwen3", "<tool_call>"), ("llama3", None), ("mistral", "[TOOL_CALLS]"), ("deepseekv3", None),
        ("deepseekv3", "<｜tool▁call▁begin｜>"), ("deepseekv31", None),
    ],
)  # fmt: skip
def test_the_parser_reads_what_the_form_demands(model_dir, tmp_path, parser: str, special: str | None) -> None:
    format = format_of(model_dir, tmp_path, parser, special)
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


def test_calls_may_take_the_place_of_a_constrained_answer(model_dir, tmp_path) -> None:
    asked = SamplingParams(guided_regex="yes|no")
    _, constraint = constrained(format_of(model_dir, tmp_path, "hermes", None), CHAT, asked)
    assert constraint is not None and constraint.field == "guided_regex"
    assert isinstance(constraint.form, Calls) and constraint.form.answer == Regex("yes|no")
    _, constraint = constrained(format_of(model_dir, tmp_path, "glm4", None), CHAT, asked)
    assert constraint is not None and constraint.form == Regex("yes|no"), "this format's calls hold no JSON"


def test_a_thinking_model_may_think(model_dir, tmp_path) -> None:
    format = format_of(model_dir, tmp_path, "hermes", "<think>")
    format.reasons = True
    _, constraint = constrained(format, CHAT, SamplingParams())
    assert constraint is not None and isinstance(constraint.form, Calls)
    assert constraint.form.free == [format.tokenizer.token_to_id("<think>")], "the end of thoughts is plain text here"


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm4", "pythonic", "none"])
def test_formats_without_json_refuse(model_dir, tmp_path, parser: str) -> None:
    with pytest.raises(InvalidParameter, match="strict tools"):
        constrained(format_of(model_dir, tmp_path, parser, None), CHAT, SamplingParams())
