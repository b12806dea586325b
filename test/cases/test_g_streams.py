"""What a stream tells is what the whole answer holds, for random requests in every dialect."""

import json
import random
from typing import Any

import pytest
from support.client import strict_json
from support.server import RunningServer

TOOLS = [
    {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"c": {"enum": ["Bern", "Züri", "🫠"]}}, "required": ["c"]},
    },
    {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
STOPS = [["a"], ["é", "zz"], ["\ufffd"], [" ", "\n", "0"], ["}"], ["AB", "BA"]]


def events(body: bytes) -> list[dict[str, Any]]:
    data = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    return [strict_json(line) for line in data if line != "[DONE]"]


def rough(value: Any) -> Any:
    """Without fractions: what the second asking finds in the cache was computed in other steps."""
    return json.loads(json.dumps(value), parse_float=lambda _: 0.0)


def both(server: RunningServer, path: str, asked: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    whole, stream = (server.post(path, asked | {"stream": streams}) for streams in (False, True))
    assert (whole.status, stream.status) == (200, 200), (asked, whole.body, stream.body)
    return whole.json(), events(stream.body)


def common(choose: random.Random) -> dict[str, Any]:
    menu = {
        "stop": choose.choice(STOPS), "temperature": choose.choice([0, 0.7, 2.0]), "ignore_eos": True, "top_k": 20,
        "presence_penalty": 1.0, "min_tokens": 1, "logit_bias": {"200": 5, "65": 9},
        "include_stop_str_in_output": True, "n": choose.choice([2, 3]), "skip_special_tokens": False,
    }  # fmt: skip
    fields = {name: menu[name] for name in choose.sample(sorted(menu), choose.randrange(5))}
    seed = choose.randrange(-5, 10**6)
    return {"max_tokens": choose.choice([1, 2, 7, 40]), "seed": 3 if seed == -1 else seed, "temperature": 1.0} | fields


def one_completion(server: RunningServer, choose: random.Random) -> None:
    menu = {
        "logprobs": choose.randrange(4),
        "echo": True,
        "prompt": choose.choice([["A", "Bé"], [[65, 200], [66]], "🫠x"]),
    }
    asked = {"prompt": "A"} | common(choose) | {name: menu[name] for name in choose.sample(sorted(menu), 2)}
    whole, chunks = both(server, "/v1/completions", asked)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"], asked
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]], asked
        if choice["logprobs"]:
            for name, values in choice["logprobs"].items():
                told = [value for c in mine for value in c["logprobs"][name]]
                assert rough(told) == rough(values), (name, asked)


def one_chat(server: RunningServer, choose: random.Random) -> None:
    asked = {"messages": [{"role": "user", "content": "hé"}]} | common(choose)
    if choose.random() < 0.4:
        asked |= {"logprobs": True, "top_logprobs": choose.randrange(4)}
    form = choose.choice(["free", "json", "auto", "required", "named"])
    if form == "json":
        asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    elif form != "free":
        asked["tools"] = [{"type": "function", "function": tool} for tool in TOOLS]
        asked["tool_choice"] = {"type": "function", "function": {"name": "clock"}} if form == "named" else form
    whole, chunks = both(server, "/v1/chat/completions", asked)
    for choice in whole["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        message = choice["message"]
        assert "".join(c["delta"].get("content") or "" for c in mine) == (message["content"] or ""), asked
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]], asked
        told = [c for one in mine if one.get("logprobs") for c in one["logprobs"]["content"]]
        assert rough(told) == rough((choice["logprobs"] or {"content": []})["content"]), asked
        calls: list[list[str]] = []
        for part in [part for c in mine for part in c["delta"].get("tool_calls") or []]:
            if part["index"] == len(calls):
                calls.append([part["function"]["name"], ""])
            calls[part["index"]][1] += part["function"]["arguments"]
        expected = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or []]
        assert calls == expected, asked


def one_message(server: RunningServer, choose: random.Random) -> None:
    fields = common(choose)
    asked = {"messages": [{"role": "user", "content": "hé"}], "max_tokens": fields["max_tokens"], "temperature": 0}
    if "stop" in fields:
        asked["stop_sequences"] = fields["stop"]
    form = choose.choice(["free", "json", "auto", "any"])
    if form == "json":
        asked["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
    elif form != "free":
        asked["tools"] = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in TOOLS]
        asked["tool_choice"] = {"type": form}
    whole, stream = both(server, "/v1/messages", asked)
    blocks: list[dict[str, Any]] = []
    for event in stream:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                delta = event["delta"]
                blocks[-1]["text"] = blocks[-1].get("text", "") + delta.get("text", "")
                blocks[-1]["json"] += delta.get("partial_json", "")
    assert [block["type"] for block in blocks] == [block["type"] for block in whole["content"]], asked
    for block, expected in zip(blocks, whole["content"]):
        if expected["type"] == "text":
            assert block["text"] == expected["text"], asked
        elif whole["stop_reason"] == "tool_use":
            assert (block["name"], json.loads(block["json"])) == (expected["name"], expected["input"]), asked
    (ending,) = [event for event in stream if event["type"] == "message_delta"]
    told = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert ending["delta"] == told and ending["usage"]["output_tokens"] == whole["usage"]["output_tokens"], asked


def one_response(server: RunningServer, choose: random.Random) -> None:
    asked = {"input": "hé", "max_output_tokens": choose.choice([1, 2, 7, 40]), "temperature": 0}
    form = choose.choice(["free", "json", "auto", "required"])
    if form == "json":
        asked["text"] = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    elif form != "free":
        asked |= {"tools": [{"type": "function", "strict": False, **tool} for tool in TOOLS], "tool_choice": form}
    whole, stream = both(server, "/v1/responses", asked)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    last = stream[-1]["response"]
    assert stream[-1]["type"] == f"response.{whole['status']}" and last["status"] == whole["status"], asked

    def shown(response: dict[str, Any]) -> list[Any]:
        return [(i["type"], i.get("name"), i.get("arguments"), i.get("content")) for i in response["output"]]

    assert shown(last) == shown(whole), asked
    deltas = [event["delta"] for event in stream if event["type"] == "response.output_text.delta"]
    texts = [part["text"] for item in whole["output"] for part in item.get("content") or []]
    assert "".join(deltas) == "".join(texts), asked


@pytest.mark.parametrize("one", [one_completion, one_chat, one_message, one_response])
def test_a_stream_is_its_answer(serve, one: Any, seeds: range = range(15)) -> None:
    server = serve("llama", max_position_embeddings=2048)
    for seed in seeds:
        one(server, random.Random(seed))
