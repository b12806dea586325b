"""Case 98: whatever is wrong with a request, its error has the one shape of its dialect and says nothing of Python."""

import json
from typing import Any

import pytest

ASK = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 2},
    "/v1/completions": {"prompt": "A", "max_tokens": 2},
    "/v1/responses": {"input": "A", "max_output_tokens": 2},
    "/v1/messages": {"messages": ASK, "max_tokens": 2},
    "/generate": {"inputs": "A", "parameters": {"max_new_tokens": 2}},
}
LONG = "x" * 3000
WRONG: dict[str, tuple[int, dict[str, Any]]] = {
    "wrong type": (400, {"messages": 5, "prompt": {}, "input": 5, "inputs": 5}),
    "missing": (400, {"messages": None, "prompt": None, "input": None, "inputs": None}),
    "too long": (400, {"messages": [{"role": "user", "content": LONG}], "prompt": LONG, "input": LONG, "inputs": LONG}),
    "model": (404, {"model": "nope"}),
}


def assert_shape(path: str, body: bytes, status: int) -> None:
    value = json.loads(body)
    if path == "/v1/messages":
        assert set(value) == {"type", "error"} and value["type"] == "error"
        assert set(value["error"]) == {"type", "message"}
    else:
        assert set(value) == {"error"} and set(value["error"]) == {"message", "type", "param", "code"}
    message = value["error"]["message"]
    assert message and not any(word in message for word in ("Traceback", "object at", "detail", "msgspec", "<class"))
    if path != "/generate":
        kind = {404: "not_found_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
        kind = "request_too_large" if status == 413 and path == "/v1/messages" else kind
        assert value["error"]["type"] == kind or status >= 500


@pytest.mark.parametrize("problem", WRONG)
@pytest.mark.parametrize("path", GOOD)
def test_a_wrong_field(client, engine, path: str, problem: str) -> None:
    status, fields = WRONG[problem]
    if path == "/generate" and problem == "model":
        return
    known = {name: value for name, value in fields.items() if name in GOOD[path] or name == "model"}
    answer = client.post(path, json=GOOD[path] | known)
    assert answer.status_code == status, answer.text
    assert_shape(path, answer.content, status)
    assert engine.requests == []


@pytest.mark.parametrize("path", GOOD)
def test_an_error_quotes_little(client, engine, path: str) -> None:
    long = "x\n" * 100_000
    for fields in ({"model": long}, {"messages": [{"role": long, "content": "a"}]}, {long: 1}, {"user": [long]}):
        answer = client.post(path, json=GOOD[path] | fields)
        assert len(answer.content) + len(str(answer.headers)) < 5000, answer.content[:100]
    assert len(client.post(path + "a" * 50_000).content) < 5000


@pytest.mark.parametrize("path", GOOD)
def test_what_is_no_request(client, engine, path: str) -> None:
    for content in (b"{", b"[1]", b"\xff", b"", b"null"):
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (content, answer.text)
        assert_shape(path, answer.content, 400)
    assert_shape(path, client.post(path, content=b"{", headers={"content-type": "text/plain"}).content, 415)
    wrong_method = client.put(path, json=GOOD[path])
    assert wrong_method.status_code == 405
    assert_shape(path, wrong_method.content, 405)
    nowhere = client.post(path + "/nowhere", json=GOOD[path])
    assert nowhere.status_code == 404
    assert_shape(path, nowhere.content, 404)
    huge = client.post(path, content=b"x" * (21 << 20))
    assert huge.status_code == 413
    assert_shape(path, huge.content, 413)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(("status", "stream"), [(429, False), (429, True), (503, False), (500, True)])
def test_what_the_engine_says(client, engine, path: str, status: int, stream: bool) -> None:
    engine.refusal = (status, "so it is")
    url = path + "_stream" if stream and path == "/generate" else path
    answer = client.post(url, json=GOOD[path] | ({"stream": True} if stream and path != "/generate" else {}))
    assert answer.status_code == status and "so it is" in answer.text
    assert_shape(path, answer.content, status)
    assert ("retry-after" in answer.headers) is (status == 429)
