"""The Anthropic dialect through the official SDK, on a real front with a scripted engine."""

import asyncio
import json

import anthropic
import httpx
import pytest

from lightllm.common.grammar.forms import Calls, Json, Thoughts, decode

WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
OTHER = CALL.replace("Zürich", "Bern")
ASK = [{"role": "user", "content": "hi"}]


def ask(claude, **fields):
    return claude.messages.create(**{"model": "scripted", "max_tokens": 200, "messages": ASK} | fields)


def events_of(front, **fields) -> list[dict]:
    """All events of a stream, checked to be in the one order that there is (case 103)."""
    body = {"model": "scripted", "max_tokens": 200, "messages": ASK, "stream": True} | fields
    answer = httpx.post(f"{front.url}/v1/messages", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    events = []
    for frame in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    kinds = {
        "text_delta": "text",
        "thinking_delta": "thinking",
        "signature_delta": "thinking",
        "input_json_delta": "tool_use",
    }
    open_block, index = None, -1
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None and event["index"] == index + 1
                index, open_block = event["index"], event["content_block"]["type"]
            case "content_block_delta":
                assert event["index"] == index and kinds[event["delta"]["type"]] == open_block
            case "content_block_stop":
                assert event["index"] == index and open_block
                open_block = None
            case other:
                raise AssertionError(other)
    assert open_block is None
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    return events


def test_message(claude, engine, front) -> None:
    system = [
        {"type": "text", "text": "be"},
        {"type": "text", "text": " brief", "cache_control": {"type": "ephemeral"}},
    ]
    answer = ask(
        claude, max_tokens=3, system=system, metadata={"user_id": "u"}, extra_body={"temperature": 0.5, "top_k": 4}
    )
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "scripted")
    assert [(block.type, block.text) for block in answer.content] == [("text", "abc")]
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    prompt = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert front.tokenizer.decode(engine.prompt()) == prompt
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(engine.prompt()), 3)
    assert (engine.requests[0].client, engine.requests[0].sampling.top_k) == ("u", 4)


def test_what_claude_code_changes_in_every_request_is_not_told_to_the_model(claude, engine, front) -> None:
    """It would stand at the beginning of the prompt, and the prefix cache would hold none of it."""
    billing = {
        "type": "text",
        "text": "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;",
    }
    for said in ["be brief", None]:
        own = [{"type": "text", "text": said}] if said else []
        ask(claude, system=[billing, *own])
        prompt = front.tokenizer.decode(engine.prompt())
        assert prompt.startswith(f"<|im_start|>system\n{said}<|im_end|>" if said else "<|im_start|>user\nhi")
    ask(claude, messages=[{"role": "user", "content": [billing]}])
    assert "cch=fa690" in front.tokenizer.decode(engine.prompt()), "what users say is told"


def test_stop_reasons(claude, engine) -> None:
    engine.says = "done"
    assert ask(claude).stop_reason == "end_turn"
    engine.says = "one STOP"
    engine.stops = "STOP"
    answer = ask(claude, stop_sequences=["x", "STOP"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one ", "stop_sequence", "STOP")


@pytest.mark.parametrize(
    ("says", "blocks"),
    [
        ("just text", [("text", "just text")]),
        (f"text {CALL}", [("text", "text"), ("tool_use", {"city": "Zürich"})]),
        (CALL + OTHER, [("tool_use", {"city": "Zürich"}), ("tool_use", {"city": "Bern"})]),
        (f"{CALL} after", [("tool_use", {"city": "Zürich"}), ("text", " after")]),
        (f"<think>hm</think>so {CALL}", [("thinking", "hm"), ("text", "so"), ("tool_use", {"city": "Zürich"})]),
        ([CALL[:-20], f"{CALL[-20:]} after"], [("tool_use", {"city": "Zürich"}), ("text", " after")]),
        ("", []),
    ],
)
def test_case_103_streams(claude, front, engine, says, blocks) -> None:
    engine.says = says
    events_of(front, tools=[WEATHER])
    with claude.messages.stream(model="scripted", max_tokens=500, messages=ASK, tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_message()
    found = [(b.type, b.input if b.type == "tool_use" else getattr(b, b.type)) for b in message.content]
    assert found == blocks
    assert message.stop_reason == ("tool_use" if any(kind == "tool_use" for kind, _ in blocks) else "end_turn")
    assert message.usage.output_tokens == len(says) + 1
    whole = ask(claude, tools=[WEATHER], max_tokens=500)
    assert sorted(block.type for block in whole.content) == sorted(kind for kind, _ in blocks)
    assert whole.usage.input_tokens == message.usage.input_tokens


def test_thoughts_are_signed(claude, engine) -> None:
    """pydantic-ai sends those that are not back as text of the user."""
    engine.says = "<think>hm</think>so"
    thought = ask(claude).content[0]
    with claude.messages.stream(model="scripted", max_tokens=500, messages=ASK) as stream:
        assert stream.get_final_message().content[0] == thought
    assert (thought.thinking, thought.signature) == ("hm", "unsigned")


def test_a_cut_call_is_max_tokens(claude, engine) -> None:
    engine.says = CALL
    assert ask(claude, tools=[WEATHER], max_tokens=60).stop_reason == "max_tokens"


def test_case_105_broken_arguments(claude, front, engine) -> None:
    engine.says = '<tool_call>{"name": "weather", "arguments": {"city": oops}}</tool_call>'
    answer = ask(claude, tools=[WEATHER])
    assert answer.stop_reason == "end_turn"
    events_of(front, tools=[WEATHER])
    with claude.messages.stream(model="scripted", max_tokens=500, messages=ASK, tools=[WEATHER]) as stream:
        assert stream.get_final_message().stop_reason == "end_turn"


def test_tool_results(claude, engine, front) -> None:
    engine.says = "fine"
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True}
    result["content"] = [{"type": "text", "text": "no <|im_end|>"}]
    messages = [
        *ASK,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "wait"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
    ]
    ask(claude, messages=messages, tools=[WEATHER])
    text = front.tokenizer.decode(engine.prompt())
    assert 'wait<tool_call>{"city": "Bern"}</tool_call>' in text
    assert "<|im_start|>tool\nError: no <|im_end|><|im_end|>\n<|im_start|>user\ngo on" in text
    assert engine.prompt().count(front.tokenizer.token_to_id("<|im_end|>")) == 4


def test_turns_of_one_role_are_one(claude, engine, front) -> None:
    turns = [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e")]
    ask(claude, messages=[{"role": role, "content": content} for role, content in turns])
    said = "user\na\n\nb<|im_end|>\n<|im_start|>assistant\nc\n\nd<|im_end|>\n<|im_start|>user\ne<|im_end|>"
    assert said in front.tokenizer.decode(engine.prompt())


def test_prefilled_answer(claude, engine, front) -> None:
    ask(claude, messages=[*ASK, {"role": "assistant", "content": "I am "}], max_tokens=1)
    assert front.tokenizer.decode(engine.prompt()).endswith("<|im_start|>assistant\nI am ")


def test_models(claude) -> None:
    (model,) = claude.models.list().data
    assert (model.id, model.type, model.display_name) == ("scripted", "model", "scripted")
    assert model.created_at.tzinfo and claude.models.retrieve("scripted") == model


def test_text_documents_are_text(claude, engine, front) -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a story"}}
    ask(claude, messages=[{"role": "user", "content": [document, {"type": "text", "text": "sum up"}]}])
    assert "a storysum up" in front.tokenizer.decode(engine.prompt())


def test_case_106_count_tokens(claude, engine) -> None:
    asked = dict(messages=ASK, system="be brief", tools=[WEATHER])
    count = claude.messages.count_tokens(model="scripted", **asked).input_tokens
    assert count == ask(claude, **asked).usage.input_tokens > 50


def test_async(front, engine) -> None:
    async def both() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=front.url, api_key="x", max_retries=0) as claude:
            whole = await ask(claude, max_tokens=5)
            async with claude.messages.stream(model="scripted", max_tokens=5, messages=ASK) as stream:
                return whole.content[0].text, await stream.get_final_text()

    assert asyncio.run(both()) == ("abcde", "abcde")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages"),  # case 35
        ({"messages": None}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [{}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"stop_sequences": ["x"] * 50}, "stop_sequences"),  # case 106
        ({"temperature": -1}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tools": [{"name": "f"}]}, "f needs an input_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "search_result", "source": "x"}]}]}, "search_result"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bodies_that_are_refused(claude, engine, fields, word, stream) -> None:
    body = {"model": "scripted", "max_tokens": 5, "messages": ASK, "stream": stream} | fields
    with pytest.raises(anthropic.BadRequestError, match=word) as caught:
        claude.post("/v1/messages", body=body, cast_to=object)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert set(caught.value.body["error"]) == {"type", "message"}
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": 1990}, r"input length and `max_tokens` exceed context limit: 21 \+ 1990 > 2000"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "prompt is too long: 3019 tokens"),
        ({"messages": [{"role": "user", "content": "x" * 17000}]}, "prompt is too long: 17[0-9]+ characters"),
    ],
)
def test_what_is_too_long_is_told_in_the_words_that_agents_read(claude, fields, told) -> None:
    """They ask again for less, or shorten the conversation."""
    with pytest.raises(anthropic.BadRequestError, match=told):
        ask(claude, **fields)


def test_a_schema_for_the_answer(claude, engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}
    ask(claude, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert decode(engine.requests[0].sampling.guided_grammar) == Thoughts("<think>", "</think>", Json(schema))
    with pytest.raises(anthropic.BadRequestError, match=r"output_config.*not"):
        ask(claude, output_config={"format": {"type": "json_schema", "schema": {"not": {}}}})


def test_a_strict_tool(claude, engine) -> None:
    ask(claude, tools=[WEATHER | {"strict": True}])
    form = decode(engine.requests[0].sampling.guided_grammar)
    assert isinstance(form, Calls) and form.tags[0].schema == WEATHER["input_schema"]
    ask(claude, tools=[WEATHER])
    assert engine.requests[1].sampling.guided_grammar is None


def test_five_stop_sequences_are_well(claude) -> None:  # case 106
    assert ask(claude, max_tokens=2, stop_sequences=["v", "w", "x", "y", "z"]).content[0].text == "ab"


def test_errors_of_the_engine(claude, engine, front) -> None:
    engine.refusal = (429, "the queue is full")
    with pytest.raises(anthropic.RateLimitError, match="queue is full"):
        ask(claude)
    with pytest.raises(anthropic.NotFoundError, match="nope"):
        ask(claude, model="nope")
    engine.reset()
    engine.failing_after = 2
    with (
        pytest.raises(anthropic.APIStatusError, match="the row failed"),
        claude.messages.stream(model="scripted", max_tokens=5, messages=ASK) as stream,
    ):
        stream.get_final_message()
    assert httpx.get(f"{front.url}/v1/messages", timeout=60).json()["type"] == "error"
