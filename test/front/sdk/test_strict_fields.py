"""Unknown fields: ignored and named in a header, in strict mode refused by name (every dialect but LightLLM's own)."""

from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
from front.scripted_engine import Front, ScriptedEngine, serving
from support.sdk import anthropic_sdk, openai_sdk

ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def strict(chat_tokenizer, chat_dir) -> Iterator[tuple[Front, ScriptedEngine]]:
    with serving(chat_tokenizer, model_dir=str(chat_dir), strict_fields=True) as front_and_engine:
        yield front_and_engine


def bodies() -> list:
    return [
        ("/v1/chat/completions", {"messages": ASK, "max_tokens": 2}),
        ("/v1/completions", {"prompt": "A", "max_tokens": 2}),
        ("/v1/responses", {"input": "A", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"messages": ASK}),
    ]


@pytest.mark.parametrize(("path", "body"), bodies())
def test_an_unknown_field_is_named(client, path, body) -> None:
    answer = client.post(path, json=body | {"zebra": 1, "ape": None, "cat": {}})
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "cat, zebra"
    assert "x-ignored-fields" not in client.post(path, json=body).headers


def test_a_header_holds_no_control_characters(client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "A", "max_tokens": 2, "a\0\x1f\x7f\r\n龜": 1})
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == r"a\x00\x1f\x7f\r\n\u9f9c"


@pytest.mark.parametrize(("path", "body"), bodies())
def test_in_strict_mode_it_is_refused(strict, path, body) -> None:
    front, engine = strict
    engine.reset()
    answer = httpx.post(front.url + path, json=body | {"zebra": 1, "metadata": {}}, timeout=60)
    assert answer.status_code == 400 and "zebra" in answer.json()["error"]["message"]
    assert engine.requests == []
    assert httpx.post(front.url + path, json=body | {"metadata": {}}, timeout=60).status_code == 200, (
        "known, and changes nothing"
    )


NESTED = [
    ("/v1/chat/completions", {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "A", "x": 1}], "y": 1, "name": None}]},
     "messages[].content[].x, messages[].y"),
    ("/v1/chat/completions", {"messages": ASK, "response_format": {"type": "text", "z": 1}, "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"any": 1}, "w": 0}}]},
     "response_format.z, tools[].function.w"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}, "x": {}}]}]}, "messages[].content[].x"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "names"), NESTED)
def test_fields_inside_others_are_named_by_their_place(client, strict, path, body, names) -> None:
    body = body | {"max_tokens": 2}
    answer = client.post(path, json=body)
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == names
    refused = httpx.post(strict[0].url + path, json=body, timeout=60)
    assert refused.status_code == 400 and names.partition(",")[0] in refused.json()["error"]["message"]


def test_the_sdks_raise_their_own_exceptions(strict) -> None:
    with openai_sdk(strict[0].url) as sdk, pytest.raises(openai.BadRequestError, match="zebra") as refused:
        sdk.chat.completions.create(model="chat0", messages=ASK, extra_body={"zebra": 1, "model": None})
    assert refused.value.param == "zebra"
    with anthropic_sdk(strict[0].url) as sdk, pytest.raises(anthropic.BadRequestError, match="zebra"):
        sdk.messages.create(model="x", messages=ASK, max_tokens=1, extra_body={"zebra": 1, "model": None})
