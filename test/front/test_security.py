"""API keys on every route but liveness (case 114), CORS off by default."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from front.scripted_engine import Front, ScriptedEngine, serving

from lightllm.server.api_http import routes

KEYS = ["first-key", "second-kéy"]
PATHS = ["/nothing", "/v1/nothing", "//v1/models", "/v1/models/", "/docs", "/openapi.json", "/liveness/", "/LIVENESS"]


@pytest.fixture(scope="module")
def served(tokenizer, model_dir) -> Iterator[tuple[Front, ScriptedEngine]]:
    with serving(tokenizer, model_dir=str(model_dir), api_key=KEYS) as front_and_engine:
        yield front_and_engine


def every_route(front: Front) -> list[tuple[str, str]]:
    class Manager:
        tokenizer = front.tokenizer

    table = routes(Manager(), front.args, Path())  # type: ignore[arg-type]
    return [(method, route.path.replace("{name:path}", "x")) for route in table for method in route.methods]


def test_every_route_wants_a_key(front, client) -> None:
    table = every_route(front)
    assert ("POST", "/v1/chat/completions") in table
    for method, path in [*table, *(("GET", path) for path in PATHS)]:
        for verb in {method, "HEAD", "OPTIONS"}:
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"x-api-key": "first-ke"},
                {"authorization": "first-key"},
            ):
                answer = client.request(verb, path, headers=headers)
                assert answer.status_code == (401 if path != "/liveness" else answer.status_code), (verb, path)
    assert client.get("/liveness").status_code == 200


def test_the_refusal_has_the_shape_of_its_dialect(client) -> None:
    assert client.get("/token_load").json()["error"]["code"] == 401
    assert client.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
    assert "www-authenticate" in client.get("/v1/models").headers


@pytest.mark.parametrize("key", KEYS)
def test_a_key_opens(client, engine, key) -> None:
    basic = httpx.BasicAuth("anybody", key)
    for headers in (
        {"authorization": f"Bearer {key}".encode()},
        {"authorization": f"bearer  {key}".encode()},
        {"x-api-key": key.encode()},
    ):
        assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.get("/v1/models", auth=basic).status_code == 200
    body = {"prompt": "A", "max_tokens": 1, "user": "u"}
    client.post("/v1/completions", json=body, headers={"x-api-key": key.encode()})
    assert engine.requests[0].client == f"key{KEYS.index(key)}/u"


def test_the_key_is_told_to_nobody(client) -> None:
    info = client.get("/get_server_info", headers={"x-api-key": KEYS[0]})
    assert info.status_code == 200 and KEYS[0] not in info.text


def test_no_cors_unless_allowed(client, tokenizer, model_dir) -> None:
    preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    assert not any(
        name.startswith("access-control") for name in client.options("/v1/models", headers=preflight).headers
    )
    with (
        serving(tokenizer, model_dir=str(model_dir), allowed_origins=["http://good.example"], api_key=KEYS) as (
            front,
            _,
        ),
        httpx.Client(base_url=front.url, timeout=60) as asking,
    ):
        allowed = asking.options("/v1/models", headers=preflight | {"origin": "http://good.example"})
        assert allowed.headers["access-control-allow-origin"] == "http://good.example"
        assert "access-control-allow-origin" not in asking.options("/v1/models", headers=preflight).headers
