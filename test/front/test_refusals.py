"""What cannot be served is refused in one shape, by name, and the front stays alive.

Which parameters and bodies are: test_sampling_params.py, and test/cases/test_b_sampling.py and test_c_limits.py.
"""

import gzip
import json
import socket

import pytest

from lightllm.server.api_lightllm import LightLLMApi

PATHS = ["/generate", "/generate_stream", "/"]


def check_error(answer, status: int, param: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    body = json.loads(answer.text, parse_constant=lambda literal: pytest.fail(f"{literal} is not JSON"))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (status, param)
    assert "Traceback" not in answer.text and "Error(" not in answer.text
    return body["error"]["message"]


def check_alive(client) -> None:
    answer = client.post("/generate", json={"inputs": "A", "parameters": {"max_new_tokens": 3}})
    assert answer.json()["generated_text"] == ["abc"]


def post(client, body: str | bytes, path="/generate", content_type="application/json"):
    return client.post(path, content=body, headers={"content-type": content_type})


def test_a_compressed_body_is_refused_and_a_byte_order_mark_is_not(client) -> None:
    body = b'{"inputs": "A", "parameters": {"max_new_tokens": 1}}'
    packed = client.post("/generate", content=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert "gzip" in check_error(packed, 415)
    assert post(client, b"\xef\xbb\xbf" + body).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "parameters, field",
    [
        ('{"exponential_decay_length_penalty": [1180591620717411303424, 1.5]}', "exponential_decay_length_penalty"),
        ('{"temperature": NaN}', "temperature"),
        ('{"return_details": 1}', "return_details"),
        ('{"max_tokens": 5}', "max_tokens"),
        ('{"guided_json": 5}', "guided_json"),
        ("[]", "parameters"),
    ],
)
def test_parameters_are_refused_by_name(client, engine, path, parameters, field):
    message = check_error(post(client, f'{{"inputs": "A", "parameters": {parameters}}}', path), 400, field)
    assert field in message
    assert engine.requests == []
    check_alive(client)


@pytest.mark.parametrize("field, value", [("multimodal_params", '{"images": [1]}'), ("colour", "1")])
def test_bodies_are_refused_by_field(client, field, value):
    check_error(post(client, f'{{"inputs": "A", "parameters": {{}}, "{field}": {value}}}'), 400, field)
    check_alive(client)


def test_a_body_over_the_limit(client, front):
    over = b" " * (20 * 1024 * 1024 + 1)
    assert "max_body_size" in check_error(post(client, over), 413)

    def chunks():
        for _ in range(25):
            yield b" " * (1024 * 1024)

    check_error(client.post("/generate", content=chunks()), 413)
    check_alive(client)


def test_a_body_announced_too_large_is_refused_unread(front):
    with socket.create_connection(("127.0.0.1", front.port)) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{")
        connection.settimeout(30)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
    with socket.create_connection(("127.0.0.1", front.port)) as connection:
        head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head)
        connection.settimeout(30)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("item", ["1,", "[],", "[[[[1]]]],", '{"a":1},'])
def test_a_body_of_too_many_values_is_not_parsed(client, item):
    body = '{"inputs": [' + item * 600_000 + '1], "parameters": {}}'
    assert "2000 tokens" in check_error(post(client, body), 400)
    assert post(client, '{"inputs": "' + "," * 15000 + '", "parameters": {}}').json()["error"]["param"] == "inputs"


@pytest.mark.parametrize("status, reason", [(400, "it can never fit"), (429, "the queue is full"), (500, "it broke")])
@pytest.mark.parametrize("path", PATHS)
def test_refused_by_the_router(client, engine, path, status, reason):
    engine.refusal = (status, reason)
    answer = client.post(path, json={"inputs": "A", "parameters": {}})
    assert check_error(answer, status) == reason
    assert ("retry-after" in answer.headers) == (status == 429)


def test_a_failure_in_a_stream_is_an_event(client, engine):
    engine.failing_after = 3
    body = {"inputs": "A", "parameters": {"max_new_tokens": 10}}
    answer = client.post("/generate_stream", json=body)
    frames = [json.loads(frame.removeprefix("data: ")) for frame in answer.text.split("\n\n")[:-1]]
    assert answer.status_code == 200 and len(frames) == 4
    assert frames[3] == {"error": {"message": "the row failed", "type": "server_error", "param": None, "code": 500}}
    check_error(client.post("/generate", json=body), 500)


def test_an_unexpected_error_is_a_plain_500(client, front, engine, monkeypatch):
    def broken(*args):
        raise KeyError("a secret")

    monkeypatch.setattr(LightLLMApi, "_detail", broken)
    body = {"inputs": "A", "parameters": {"max_new_tokens": 2, "return_details": True}}
    for path in ("/generate", "/generate_stream"):
        answer = client.post(path, json=body)
        assert check_error(answer, 500) == "internal error"
        assert "secret" not in answer.text


@pytest.mark.parametrize("priority", [1001, -1001, 2**63, 2**70])
@pytest.mark.parametrize(
    "path, body",
    [
        ("/generate", {"inputs": "A", "parameters": {}}),
        ("/v1/completions", {"prompt": "A"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A"}]}),
    ],
)
def test_a_priority_that_the_router_cannot_hold(client, engine, path, body, priority):
    """Larger than 64 bits it was a 500; larger than 63 it ended the router."""
    body.get("parameters", body)["priority"] = priority
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority"), answer.text
    assert engine.requests == []
