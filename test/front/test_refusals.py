"""What cannot be served is refused in one shape, by name, and the front stays alive (cases 9, 16-41 of the bank)."""

import gzip
import json
import socket
import threading
import time

import pytest
from support.server import until

from lightllm.server.api_lightllm import LightLLMApi
from lightllm.server.api_models import Parameters

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


RAW_PARAMETERS = [
    ('{"exponential_decay_length_penalty": [1180591620717411303424, 1.5]}', "exponential_decay_length_penalty"),
    ('{"temperature": 1e400}', "temperature"),  # case 19
    ('{"temperature": NaN}', "temperature"),
    ('{"temperature": -1}', "temperature"),
    ('{"repetition_penalty": 0}', "repetition_penalty"),
    ('{"repetition_penalty": -1}', "repetition_penalty"),
    ('{"repetition_penalty": Infinity}', "repetition_penalty"),
    ('{"presence_penalty": 1e308}', "presence_penalty"),
    ('{"exponential_decay_length_penalty": [1, NaN]}', "exponential_decay_length_penalty"),
    ('{"top_p": 0}', "top_p"),  # case 17
    ('{"top_k": -5}', "top_k"),
    ('{"logit_bias": {"999999": 1}}', "logit_bias"),  # case 23
    ('{"logit_bias": {"-1": 1}}', "logit_bias"),
    ('{"logit_bias": {"x": 1}}', "logit_bias"),
    ('{"logit_bias": {"1": NaN}}', "logit_bias"),
    ('{"stop_sequences": ""}', "stop_sequences"),  # case 9
    ('{"stop_sequences": [""]}', "stop_sequences"),
    ('{"stop_sequences": ["", "zzz"]}', "stop_sequences"),
    ('{"max_new_tokens": 0}', "max_new_tokens"),  # case 38
    ('{"max_new_tokens": -1}', "max_new_tokens"),
    ('{"max_new_tokens": 1000000000000}', "max_new_tokens"),
    ('{"max_new_tokens": "5"}', "max_new_tokens"),
    ('{"max_new_tokens": 1.5}', "max_new_tokens"),
    ('{"max_new_tokens": true}', "max_new_tokens"),
    ('{"n": 9}', "n"),
    ('{"return_details": 1}', "return_details"),
    ('{"max_tokens": 5}', "max_tokens"),
    ('{"guided_json": 5}', "guided_json"),
    ("[]", "parameters"),
    ("null", "parameters"),
]


def test_a_compressed_body_is_refused_and_a_byte_order_mark_is_not(client) -> None:
    body = b'{"inputs": "A", "parameters": {"max_new_tokens": 1}}'
    packed = client.post("/generate", content=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert "gzip" in check_error(packed, 415)
    assert post(client, b"\xef\xbb\xbf" + body).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("parameters, field", RAW_PARAMETERS)
def test_parameters_are_refused_by_name(client, engine, path, parameters, field):
    message = check_error(post(client, f'{{"inputs": "A", "parameters": {parameters}}}', path), 400, field)
    assert field in message
    assert engine.requests == []


def test_after_refusals_the_front_is_alive(client):
    for parameters, _ in RAW_PARAMETERS:
        post(client, f'{{"inputs": "A", "parameters": {parameters}}}')
    check_alive(client)


@pytest.mark.parametrize(
    "body, field",
    [
        ('{"inputs": "A"}', "parameters"),
        ('{"parameters": {}}', "inputs"),
        ('{"inputs": null, "parameters": {}}', "inputs"),  # case 34
        ('{"inputs": "", "parameters": {}}', "inputs"),
        ('{"inputs": [], "parameters": {}}', "inputs"),
        ('{"inputs": [[]], "parameters": {}}', "inputs"),
        ('{"inputs": ["", "A"], "parameters": {}}', "inputs"),
        ('{"inputs": [32, 320], "parameters": {}}', "inputs"),  # case 33
        ('{"inputs": [-1], "parameters": {}}', "inputs"),
        ('{"inputs": [2147483648], "parameters": {}}', "inputs"),
        ('{"inputs": [5279552648203111001], "parameters": {}}', "inputs"),
        ('{"inputs": [1.5], "parameters": {}}', "inputs"),
        ('{"inputs": [true], "parameters": {}}', "inputs"),
        ('{"inputs": [null], "parameters": {}}', "inputs"),
        ('{"inputs": [[32], [999999]], "parameters": {}}', "inputs"),
        ('{"inputs": "A", "parameters": {}, "multimodal_params": {"images": [1]}}', "multimodal_params"),
        ('{"inputs": "A", "parameters": {}, "colour": 1}', "colour"),
    ],
)
def test_bodies_are_refused_by_field(client, body, field):
    check_error(post(client, body), 400, field)
    check_alive(client)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b'{"inputs": "\xff", "parameters": {}}',
        b'{"inputs": "A", "param',
        b"[1]",
        b"7",
        b'"A"',
        b"null",
        b'{"inputs": "\\ud800", "parameters": {}}',
        b'{"inputs": "A", "parameters": {"stop_sequences": ["\\uDC00"]}}',
        b'{"inputs": ' + b"[" * 100_000,
        b'{"inputs": ' + b"[" * 100 + b"]" * 100 + b', "parameters": {}}',
        b'{"inputs": [' + b"9" * 5000 + b'], "parameters": {}}',
    ],
    ids=lambda body: repr(body[:30]),
)
@pytest.mark.parametrize("path", [*PATHS, "/tokens"])
def test_what_is_no_json_object(client, path, body):
    answer = post(client, body, path)
    assert answer.status_code == 400 and set(answer.json()) == {"error"}
    check_alive(client)


def test_content_type(client):
    form = post(client, b"inputs=A", content_type="application/x-www-form-urlencoded")
    assert "application/json" in check_error(form, 415)
    body = b'{"inputs": "A", "parameters": {"max_new_tokens": 1}}'
    assert post(client, body, content_type="application/x-www-form-urlencoded").status_code == 200  # curl -d
    assert client.post("/generate", content=body).status_code == 200


def test_odd_but_valid_bodies(client, engine):
    zero = post(client, '{"inputs": "a\\u0000b", "parameters": {"max_new_tokens": 1}}')
    assert zero.status_code == 200 and len(engine.prompt()) == 3
    twice = post(client, '{"inputs": "A", "inputs": "B", "parameters": {"max_new_tokens": 9, "max_new_tokens": 1}}')
    assert twice.json()["count_output_tokens"] == 1
    emoji = post(client, '{"inputs": "\\ud83e\\udee0", "parameters": {"max_new_tokens": 1}}')
    assert emoji.status_code == 200 and len(engine.prompt()) == 4
    assert post(client, '{"inputs": [310], "parameters": {"max_new_tokens": 1}}').status_code == 200


def test_nulls_are_as_absent(client, engine):  # case 39
    body = {
        "inputs": "A",
        "parameters": dict.fromkeys(Parameters.__struct_fields__) | {"max_new_tokens": 2},
        "multimodal_params": None,
    }
    assert client.post("/generate", json=body).json()["generated_text"] == ["ab"]
    assert client.post("/", json=body | {"stream": None}).json()["generated_text"] == ["ab"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("length", [1998, 1999, 2000, 2001, 4000, 100_000])
def test_context_boundary(client, path, length):  # case 31
    for inputs in ("x" * length, [5] * length):
        for parameters in ({"max_new_tokens": 1}, {"max_new_tokens": 100}, {}):
            answer = client.post(path, json={"inputs": inputs, "parameters": parameters})
            if length + parameters.get("max_new_tokens", 1) <= 2000:
                assert answer.status_code == 200
            else:
                error = answer.json()["error"]
                assert answer.status_code == 400 and "2000" in error["message"]


def test_not_found_and_wrong_method(client):
    check_error(client.get("/nothing"), 404)
    check_error(client.post("/generate/", json={}), 404)
    check_error(client.get("/generate"), 405)
    check_error(client.post("/health"), 405)


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


@pytest.mark.parametrize("text", ["a" * 15_000_000, "Ω rand om wörds " * 900_000], ids=["one word", "words"])
def test_health_while_a_long_prompt_comes(client, front, engine, text):  # case 41
    engine.pace = 0.02
    answers = []
    body = json.dumps({"inputs": text, "parameters": {}}, ensure_ascii=False).encode()
    poster = threading.Thread(target=lambda: answers.append(post(client, body)))
    slowest = 0.0
    with client.stream(
        "POST", "/generate_stream", json={"inputs": "A", "parameters": {"max_new_tokens": 1000}}
    ) as stream:
        chunks = stream.iter_raw()
        poster.start()
        while poster.is_alive():
            start = time.monotonic()
            assert client.get("/health").status_code == 200
            next(chunks)
            slowest = max(slowest, time.monotonic() - start)
    poster.join()
    check_error(answers[0], 400, "inputs")
    assert slowest < 10, slowest
    until(lambda: engine.running == 0)


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
