"""Bodies that are valid JSON and nothing that a client would send: a 400 that says so, whatever the dialect."""

import json
from typing import Any

import pytest

ASK = [{"role": "user", "content": "hi"}]


def deep(levels: int) -> str:
    return '{"properties": {"a":' * levels + "{}" + "}}" * levels


def function(parameters: str) -> str:
    return f'[{{"type": "function", "name": "f", "function": {{"name": "f", "parameters": {parameters}}}}}]'


DEEP: list[tuple[str, str]] = []
for levels in (130, 240, 450, 5000):
    nested, arguments = deep(levels), json.dumps(deep(levels))
    call = f'{{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", "arguments": {arguments}}}}}]}}'
    use = f'{{"role": "assistant", "content": [{{"type": "tool_use", "id": "a", "name": "f", "input": {nested}}}]}}'
    ask = json.dumps(ASK[0])
    DEEP += [
        ("/v1/chat/completions", f'{{"messages": [{ask}], "tools": {function(nested)}}}'),
        ("/v1/chat/completions", f'{{"messages": [{ask}], "tools": {function(nested)}, "tool_choice": "required"}}'),
        ("/v1/chat/completions", f'{{"messages": [{ask}], "chat_template_kwargs": {nested}}}'),
        ("/v1/chat/completions", f'{{"messages": [{ask}], "guided_json": {arguments}}}'),
        ("/v1/chat/completions", f'{{"messages": [{ask}, {call}, {ask}]}}'),
        ("/v1/messages", f'{{"messages": [{ask}, {use}, {ask}], "max_tokens": 2}}'),
        ("/v1/responses", f'{{"input": "hi", "tools": {function(nested)}}}'),
        ("/generate", f'{{"inputs": "A", "parameters": {{"max_new_tokens": 2, "guided_json": {nested}}}}}'),
    ]


@pytest.mark.parametrize(("path", "body"), DEEP, ids=lambda value: f"{value[:40]} {len(value)}")
def test_nesting_without_end_is_refused(client, path: str, body: str) -> None:
    answer = client.post(path, content=body)
    assert answer.status_code in (200, 400), answer.text
    assert answer.status_code == 400 or len(body) < 40_000


@pytest.mark.parametrize(
    "content", [["text"], [{"type": "text", "text": 1}], [{"text": "a"}], 5, {"type": "text"}, [None]]
)
def test_results_of_tools_are_text_or_blocks(client, content: Any) -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": content}]}
    answer = client.post("/v1/messages", json={"messages": [*ASK, use, result], "max_tokens": 2})
    assert answer.status_code == 400 and "tool_result" in answer.json()["error"]["message"]


def test_tools_have_names_as_long_as_those_of_mcp_servers(client) -> None:
    for length, status in ((128, 200), (129, 400)):
        tools = [{"name": "n" * length, "input_schema": {"type": "object"}}]
        answer = client.post("/v1/messages", json={"messages": ASK, "max_tokens": 2, "tools": tools})
        assert answer.status_code == status


def test_a_call_with_half_a_character_is_told_without_its_input(client, engine) -> None:
    engine.says = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    answer = client.post("/v1/messages", json={"messages": ASK, "max_tokens": 200, "tools": tools})
    (block,) = answer.json()["content"]
    assert (block["name"], block["input"]) == ("f", {})
