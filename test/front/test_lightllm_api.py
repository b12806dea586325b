"""Shapes of the LightLLM dialect (shared/reference/lightllm.md 1.2, 1.3, "Ours")."""

import json

import pytest

from lightllm.common.grammar.forms import Json, Regex, decode
from lightllm.server.core.messages import Load


def strict(text: str):
    def fail(literal):
        raise AssertionError(f"{literal} is not JSON")

    return json.loads(text, parse_constant=fail)


def events(text: str) -> list[dict]:
    frames = text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    return [strict(frame.removeprefix("data: ")) for frame in frames]


def generate(client, path="/generate", inputs="A", **parameters):
    return client.post(path, json={"inputs": inputs, "parameters": parameters})


def test_generate(client, engine):
    answer = generate(client, inputs="hello", max_new_tokens=3)
    assert answer.status_code == 200
    assert strict(answer.text) == {
        "generated_text": ["abc"],
        "count_output_tokens": 3,
        "finish_reason": "length",
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "logprobs": [-0.5, -0.5, -0.5],
    }
    assert not engine.requests[0].open_ended and engine.aborted == []


def test_absent_max_new_tokens_is_open_ended(client, engine):
    engine.hold = False
    answer = generate(client, inputs="hello").json()
    assert answer["count_output_tokens"] == 2000 - 5
    assert engine.requests[0].open_ended


def test_generate_details(client):
    answer = strict(generate(client, max_new_tokens=2, return_details=True, logprobs=3).text)
    top = [{"id": 64, "text": "a", "logprob": -0.5}, {"id": 65, "text": "b", "logprob": -1.5}]
    assert answer["tokens"] == [
        dict(
            id=64 + i,
            text="ab"[i],
            logprob=-0.5,
            special=False,
            count_output_tokens=i + 1,
            prompt_tokens=1,
            cached_tokens=2,
            logprobs=top,
        )
        for i in range(2)
    ]
    assert answer["top_logprobs"] == [top, top]  # case 24: the impossible third is left out


def test_several_outputs_are_lists(client, engine):
    answer = generate(client, n=3, max_new_tokens=2, return_details=True).json()
    assert answer["generated_text"] == ["ab"] * 3
    assert answer["count_output_tokens"] == [2] * 3
    assert answer["finish_reason"] == ["length"] * 3
    assert answer["prompt_tokens"] == 1
    assert answer["logprobs"] == [[-0.5, -0.5]] * 3
    assert [[token["text"] for token in output] for output in answer["tokens"]] == [["a", "b"]] * 3
    assert engine.requests[0].sampling.n == 3


def test_prompt_logprobs(client):
    answer = generate(client, inputs=[5, 6, 7], max_new_tokens=1, prompt_logprobs=2, n=2).json()
    assert answer["prompt_token_ids"] == [5, 6, 7]
    assert answer["prompt_logprobs"] == [None, {"6": -1.0, "0": -2.0, "1": -2.0}, {"7": -1.0, "0": -2.0, "1": -2.0}]
    assert "prompt_logprobs" not in generate(client, max_new_tokens=1).json()


@pytest.mark.parametrize("path, extra", [("/generate_stream", {}), ("/", {"stream": True})])
def test_stream(client, path, extra):
    answer = client.post(path, json={"inputs": "AB", "parameters": {"max_new_tokens": 30}} | extra)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    got = events(answer.text)
    assert got[0] == {
        "token": {
            "id": 64, "text": "a", "logprob": -0.5, "special": False,
            "count_output_tokens": 1, "prompt_tokens": 2, "cached_tokens": 2, "logprobs": None,
        },
        "generated_text": None, "finished": False, "finish_reason": None, "details": None,
    }  # fmt: skip
    assert [event["token"]["count_output_tokens"] for event in got] == list(range(1, 31))
    assert [event["finished"] for event in got] == [False] * 29 + [True]
    assert [event["finish_reason"] for event in got] == [None] * 29 + ["length"]
    assert (
        "".join(event["token"]["text"] for event in got)
        == generate(client, max_new_tokens=30).json()["generated_text"][0]
    )


def test_stream_events_that_come_together_share_a_chunk(client, engine):
    engine.burst = 50
    with client.stream(
        "POST", "/generate_stream", json={"inputs": "A", "parameters": {"max_new_tokens": 500}}
    ) as answer:
        chunks = list(answer.iter_raw())
    assert len(chunks) < 500
    assert len(events(b"".join(chunks).decode())) == 500


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_stream_of_several_outputs_is_refused(client, name):
    answer = generate(client, "/generate_stream", **{name: 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


def test_root_without_stream(client):
    for said in ({}, {"stream": False}):
        answer = client.post("/", json={"inputs": "A", "parameters": {"max_new_tokens": 2}} | said)
        assert answer.json()["generated_text"] == ["ab"]
    assert client.get("/").status_code == 405


def test_tokens(client):
    for method in ("GET", "POST"):
        answer = client.request(method, "/tokens", json={"text": "héllo", "parameters": {"add_special_tokens": False}})
        assert answer.json() == {"ntokens": 6}
    for body, count in (({"text": "abc"}, 3), ({"text": "é!", "parameters": None}, 3), ({"text": ""}, 0)):
        assert client.post("/tokens", json=body).json() == {"ntokens": count}
    for body in ({}, {"text": 5}):
        answer = client.post("/tokens", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "text")


def test_token_load(client):
    numbers = dict.fromkeys(Load.__struct_fields__, 0)
    assert client.get("/token_load").json() == numbers | {
        "current_load": 0.1,
        "logical_max_load": 0.5,
        "dynamic_max_load": 0.5,
        "used_tokens": 500,
        "predicted_peak": 2500,
        "max_total_token_num": 5000,
        "running": 0,
        "waiting": 3,
    }


def test_status_endpoints(client):
    for path in ("/health", "/healthz"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()) == (200, {"message": "Ok"})
    assert client.head("/health").status_code == 200 and client.head("/generate").status_code == 405
    assert client.get("/generate").headers["allow"] == "POST"
    for path in ("/liveness", "/readiness"):
        for method in ("GET", "POST"):
            assert client.request(method, path).json() == {"status": "ok"}
    assert client.get("/get_model_name").json() == client.post("/get_model_name").json() == {"model_name": "scripted"}
    info = client.get("/get_server_info").json()
    assert (info["max_queue"], info["engine"]["vocab_size"]) == (2048, 320)
    models = client.get("/v1/models").json()
    assert models["object"] == "list"
    assert [(card["id"], card["object"], card["max_model_len"]) for card in models["data"]] == [
        ("scripted", "model", 2000)
    ]


def test_openapi_describes_bodies_and_answers(client):
    described = client.get("/openapi.json").json()
    body = described["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/GenerateBody"}
    schemas = described["components"]["schemas"]
    assert "return_details" in schemas["Parameters"]["properties"]
    assert {"GenerateAnswer", "StreamEvent", "ErrorAnswer"} <= set(schemas)
    assert client.get("/docs").status_code == 200


def test_sampling_reaches_the_engine_resolved(client, engine):
    generate(
        client, max_new_tokens=1, temperature=0.5, logit_bias={"5": 2}, stop_sequences="zz", stop_token_ids=[9], seed=3
    )
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.logit_bias, sampling.seed) == (0.5, {5: 2.0}, 3)
    assert (sampling.stop_sequences, set(sampling.stop_token_ids)) == (["zz"], {9, 256})


def test_request_ids_are_apart_by_sample(client, engine):
    for _ in range(3):
        generate(client, max_new_tokens=1)
    ids = [request.id for request in engine.requests]
    assert len(set(ids)) == 3 and all(request_id & 7 == 0 and request_id >> 48 == 0 for request_id in ids)


def test_older_words_for_constraints(client, engine) -> None:
    for given, form in (({"regular_constraint": "a+"}, Regex("a+")), ({"guided_grammar": "json"}, Json({}))):
        client.post("/generate", json={"inputs": "A", "parameters": {"max_new_tokens": 1} | given})
        assert decode(engine.requests[-1].sampling.guided_grammar) == form


def test_a_long_name_of_a_user_is_not_carried_around(client, engine) -> None:
    names = ["a" * 256, "a" * 257, "b" * 1_000_000, "a" * 257]
    for name in names:
        client.post("/generate", json={"inputs": "A", "parameters": {"max_new_tokens": 1, "user": name}})
    clients = [request.client for request in engine.requests]
    assert clients[0] == names[0] and clients[1] == clients[3] != clients[2] and max(map(len, clients)) == 256
