"""Thoughts before constrained answers, and strict tools that the model may call, on real servers, by both libraries."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from support.checkpoints import Row, build, token_id, token_ids
from support.sdk import openai_sdk
from support.server import RunningServer, start_server

BACKENDS = ["llguidance", pytest.param("xgrammar", marks=pytest.mark.slow)]
ASK = [{"role": "user", "content": "hi"}]
THINKING = """{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]
{% if enable_thinking is not defined %}<think>
{% else %}<think></think>
{% endif %}"""
ARGUMENTS = {
    "type": "object",
    "properties": {"c": {"enum": ["Bern", "Züri"]}},
    "required": ["c"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> str:
    return request.param


def serving(backend: str, folder: Path, rows: dict[int, Row], *flags: str) -> RunningServer:
    model_dir = build("script", folder, rows=rows, max_position_embeddings=2048)
    common = ("--max_total_token_num", "20000", "--model_name", "m", "--grammar_backend", backend)
    return start_server(model_dir, *common, *flags)


@pytest.fixture(scope="module")
def thinker(backend, tmp_path_factory) -> Iterator[openai.OpenAI]:
    """Writes `om</think>` behind the newline of its prompt, and then would like to write z for ever."""
    folder = tmp_path_factory.mktemp("thinker")
    rows: dict[int, Row] = dict(itertools.pairwise(token_ids("\nom</think>z")))
    rows[token_id("z")] = token_id("z")
    template = folder / "template.jinja"
    template.write_text(THINKING)
    with (
        serving(backend, folder / "model", rows, "--chat_template", str(template)) as server,
        openai_sdk(server.url) as sdk,
    ):
        yield sdk


def converse(sdk: openai.OpenAI, **fields: Any) -> Any:
    return sdk.chat.completions.create(model="m", messages=ASK, temperature=0, max_tokens=60, **fields).choices[0]


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["yes"]}}}},
        {"extra_body": {"guided_regex": '"yes"'}},
        {"extra_body": {"guided_choice": ['"yes"']}},
        {"extra_body": {"guided_grammar": 'start: "\\"yes\\""'}},
    ],
    ids=str,
)
def test_thoughts_come_before_what_is_constrained(thinker: openai.OpenAI, constraint: dict[str, Any]) -> None:
    choice = converse(thinker, **constraint)
    assert (choice.message.reasoning_content, choice.message.content) == ("om", '"yes"')
    assert choice.finish_reason == "stop"


def test_an_answer_that_is_not_to_think_is_constrained_at_once(thinker: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["yes"]}}}
    for asked in ({"chat_template_kwargs": {"enable_thinking": False}}, {"separate_reasoning": False}):
        choice = converse(thinker, response_format=schema, extra_body=asked)
        assert choice.message.content == '"yes"' and not getattr(choice.message, "reasoning_content", None)


def test_case_93_a_required_call_has_no_thoughts_before_it(thinker: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": ARGUMENTS}}
    choice = converse(thinker, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), ARGUMENTS)
    assert choice.finish_reason == "tool_calls"


@pytest.fixture(scope="module")
def caller(backend, tmp_path_factory) -> Iterator[openai.OpenAI]:
    """Writes `<tool_call>` once in a hundred times, then z, or whatever else it may."""
    rows: dict[int, Row] = dict(itertools.pairwise(token_ids("A<to")))
    rows |= dict(itertools.pairwise(token_ids("_cal"))) | {token_id(">"): token_id("z")}
    rows[token_id("o")] = dict.fromkeys(token_ids("ol"), 9.0)
    rows[token_id("l")] = dict.fromkeys(token_ids("_l>"), 9.0)
    with (
        serving(backend, tmp_path_factory.mktemp("caller"), rows) as server,
        openai_sdk(server.url) as sdk,
    ):
        yield sdk


def test_a_strict_tool_follows_its_schema_once_it_is_called(caller: openai.OpenAI) -> None:
    function = {"name": "weather", "parameters": ARGUMENTS, "strict": True}
    clock = {"type": "function", "function": {"name": "clock"}}
    choices = []
    for seed in range(24):
        answer = caller.chat.completions.create(
            model="m", messages=ASK, tools=[{"type": "function", "function": function}, clock], temperature=1, n=8,
            seed=seed, max_tokens=80,
        )  # fmt: skip
        choices += answer.choices
    called = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    assert called and len(called) < len(choices), "the model is free to call or not"
    names = set()
    for call in (call for choice in called for call in choice.message.tool_calls):
        names.add(call.function.name)
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            jsonschema.validate(arguments, ARGUMENTS)
    assert "weather" in names and names <= {"weather", "clock"}
    assert all("<tool_call>" not in (choice.message.content or "") for choice in choices)
