"""Answers and events have all that the official SDKs' types require; the SDKs themselves do not look."""

import json

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

ASK = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CASES = [
    ("/v1/completions", {"prompt": "A", "logprobs": 2}, Completion, Completion),
    (
        "/v1/chat/completions",
        {"messages": ASK, "logprobs": True, "top_logprobs": 2, "tools": [{"type": "function", "function": FUNCTION}]},
        ChatCompletion,
        ChatCompletionChunk,
    ),
    ("/v1/responses", {"input": "A", "tools": [{"type": "function"} | FUNCTION]}, Response, ResponseStreamEvent),
    (
        "/v1/messages",
        {"messages": ASK, "max_tokens": 300, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
        Message,
        RawMessageStreamEvent,
    ),
]


@pytest.mark.parametrize(("path", "body", "answer", "event"), CASES, ids=[case[0] for case in CASES])
def test_nothing_is_missing(client, engine, path, body, answer, event) -> None:
    engine.says = f"<think>hm</think>Look: {CALL}{CALL}"
    TypeAdapter(answer).validate_json(client.post(path, json=body).content, strict=True)
    lines = client.post(path, json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events
    for value in events:
        if event is Completion:  # whose type is that of the whole answer
            value["choices"][0]["finish_reason"] = "stop"
        TypeAdapter(event).validate_json(json.dumps(value), strict=True)


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, body, *_ in CASES[:2]])
def test_usage_is_null_in_chunks_before_the_one_that_tells_it(client, path, body) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = client.post(path, json=body | {"max_tokens": 2} | options).text.splitlines()
    usages = [json.loads(line[6:])["usage"] for line in lines if line.startswith("data: {")]
    assert usages[-1]["completion_tokens"] == 2 and set(map(str, usages[:-1])) == {"None"}
