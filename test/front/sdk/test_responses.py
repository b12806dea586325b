"""/v1/responses through the official SDK, on a real front with a scripted engine."""

import json

import msgspec
import openai
import pytest

from lightllm.server.api_responses_models import ResponsesBody

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'


def ask(sdk, **fields):
    return sdk.responses.create(**{"model": "scripted", "input": "hi", "max_output_tokens": 300} | fields)


def test_text(sdk, engine, front) -> None:
    engine.says = "hello"
    answer = ask(sdk, instructions="be brief", temperature=0.5, user="u", metadata={"a": "b"}, store=False)
    assert (answer.output_text, answer.status, answer.model) == ("hello", "completed", "scripted")
    assert (answer.id[:5], answer.output[0].id[:4]) == ("resp_", "msg_")
    assert answer.usage.output_tokens == 6 and answer.usage.input_tokens == len(engine.prompt())
    text = front.tokenizer.decode(engine.prompt())
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi")
    assert engine.requests[0].client == "u"


def test_cut_text_is_incomplete(sdk) -> None:
    answer = ask(sdk, max_output_tokens=3)
    assert (answer.output_text, answer.status, answer.incomplete_details.reason) == (
        "abc",
        "incomplete",
        "max_output_tokens",
    )


def test_items(sdk, engine, front) -> None:
    engine.says = "ok"
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "what"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]
    ask(sdk, input=items, tools=[WEATHER])
    text = front.tokenizer.decode(engine.prompt())
    assert '<tool_call>{"city": "Bern"}</tool_call>' in text and "<|im_start|>tool\nsunny" in text


def test_thoughts_go_with_the_message_that_follows_them() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}
    asked = {"role": "user", "content": "what"}
    for own in ({"role": "assistant", "content": "so"}, call):
        chat = msgspec.convert({"input": [asked, thought, own]}, ResponsesBody).chat()
        assert [message["role"] for message in chat.messages] == ["user", "assistant"]
        assert chat.messages[1]["reasoning_content"] == "hm"
        assert chat.messages[1].get("content") == own.get("content")


def test_calls_and_thoughts(sdk, engine) -> None:
    engine.says = f"<think>hm</think>Look: {CALL}{CALL.replace('Zürich', 'Bern')}"
    answer = ask(sdk, tools=[WEATHER])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output[0].content[0].text == "hm" and answer.output_text == "Look:"
    assert [json.loads(item.arguments)["city"] for item in answer.output[2:]] == ["Zürich", "Bern"]
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize(
    "says",
    ["just text", f"text {CALL}", CALL + CALL, f"<think>hm</think>{CALL}", [CALL[:-20], f"{CALL[-20:]} after"], ""],
)
def test_streams(sdk, engine, says) -> None:
    engine.says = says
    whole = ask(sdk, tools=[WEATHER])
    kinds = []
    with sdk.responses.stream(model="scripted", input="hi", max_output_tokens=300, tools=[WEATHER]) as stream:
        for number, event in enumerate(stream):
            assert getattr(event, "sequence_number", number) == number
            kinds.append(event.type)
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(final.output)
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]


def test_tools_of_openai_beside_functions_are_passed_over(sdk, engine) -> None:
    """As Codex lists them, whatever the server."""
    others = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {"type": "text"}}]
    answer = sdk.responses.with_raw_response.create(model="scripted", input="hi", tools=[*others, WEATHER])
    assert answer.headers["x-ignored-fields"] == "tools[type=custom], tools[type=web_search]"
    assert [tool.name for tool in answer.parse().tools] == ["weather"]


@pytest.mark.parametrize("name", ["mcp__sky", "mcp__sky__"])
def test_functions_of_a_namespace(sdk, engine, front, name) -> None:
    """As Codex tells those of an MCP server: it finds a called one by both names."""
    inner = [{k: v for k, v in WEATHER.items() if k != "strict"}, {"type": "custom", "name": "x"}]
    space = {"type": "namespace", "name": name, "description": "of MCP", "tools": inner}
    engine.says = CALL.replace('"weather"', '"mcp__sky__weather"')
    answer = ask(sdk, tools=[space])
    (call,) = answer.output
    assert (call.type, call.namespace, call.name, json.loads(call.arguments)) == (
        "function_call", name, "weather", {"city": "Zürich"},
    )  # fmt: skip
    assert '"name": "mcp__sky__weather"' in front.tokenizer.decode(engine.prompt())
    assert (answer.tools[0].type, answer.tools[0].tools[0].name) == ("namespace", "weather")
    with sdk.responses.stream(model="scripted", input="hi", max_output_tokens=300, tools=[space]) as stream:
        assert [item.namespace for item in stream.get_final_response().output] == [name]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True), result]
    chat = msgspec.convert({"input": items}, ResponsesBody).chat()
    assert chat.messages[1]["tool_calls"][0]["function"]["name"] == "mcp__sky__weather"


def test_json_schema(sdk, engine) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    ask(sdk, text={"format": form})
    assert engine.requests[0].sampling.guided_grammar
    with pytest.raises(openai.BadRequestError, match="bar") as refused:
        ask(sdk, text={"format": form | {"schema": {"type": "bar"}}})
    assert refused.value.param == "text"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user", "content": "x"}] * 5000}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
    ],
)
def test_refusals(sdk, engine, fields, param) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.post("/responses", body={"model": "scripted", "input": "hi"} | fields, cast_to=object)
    assert refused.value.param == param and engine.requests == []
    assert "item_reference" not in str(fields) or "store false" in refused.value.message
