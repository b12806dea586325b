"""Clients that leave, read slowly, or come all at once (cases 42, 43, 54 of the bank, on the front's side)."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from front.scripted_engine import LONG, connect, serving
from support.server import until

from lightllm.server import api_openai_completions
from lightllm.server.httpserver import manager

SAMPLED = {"max_new_tokens": 1500, "do_sample": True}
BEST_OF = SAMPLED | {"best_of": 2, "details": True, "top_n_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1500, "n": 2, "logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
@pytest.mark.parametrize("hold", [True, False], ids=["waiting", "decoding"])
def test_a_client_that_leaves_is_aborted_and_that_is_no_error(front, engine, client, caplog, path, hold):
    engine.pace, engine.hold = 0.01, hold
    connections = [connect(front, path, LONG) for _ in range(5)]
    until(lambda: len(engine.requests) == 5)
    if not hold and path == "/generate_stream":
        assert connections[0].recv(4096)
    for connection in connections:
        connection.close()
    until(lambda: sorted(engine.aborted) == sorted(request.id for request in engine.requests))
    assert engine.running == 0
    assert client.get("/health").status_code == 200  # the front has gone on
    assert [record for record in caplog.records if record.name != "lightllm.requests"] == []


def test_a_client_that_leaves_while_tokenizing_never_reaches_the_engine(front, engine, client, monkeypatch):
    entered, leave = threading.Event(), threading.Event()
    encode = front.tokenizer.encode

    def slow_encode(text, add_special_tokens=True):
        if len(text) > 5000:
            entered.set()
            leave.wait(30)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(front.tokenizer, "encode", slow_encode)
    connection = connect(front, "/generate", {"inputs": "x" * 6000, "parameters": {}})
    assert entered.wait(30)
    connection.close()
    assert client.get("/health").status_code == 200  # the loop is free, and has seen the end of the connection
    leave.set()
    assert client.post("/generate", json={"inputs": "A", "parameters": {"max_new_tokens": 2}}).status_code == 200
    assert len(engine.requests) == 1


def test_the_loop_goes_on_between_the_prompts_of_a_request(client, front, monkeypatch):
    others, seen = [], []
    encode = front.tokenizer.encode

    def watched_encode(text, add_special_tokens=True):
        seen.append(len(others))
        asyncio.get_running_loop().call_soon(others.append, text)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(front.tokenizer, "encode", watched_encode)
    answer = client.post("/v1/completions", json={"prompt": ["A", "B", "C"], "max_tokens": 1})
    assert answer.status_code == 200 and seen == [0, 1, 2]


def test_a_prompt_is_echoed_once_while_the_loop_goes_on(client, monkeypatch):
    entered, leave, calls = threading.Event(), threading.Event(), []
    open_stream = api_openai_completions.open_stream

    def slow_stream(*args):
        calls.append(args)
        entered.set()
        leave.wait(30)
        return open_stream(*args)

    monkeypatch.setattr(api_openai_completions, "open_stream", slow_stream)
    asked = {"prompt": "Hi", "echo": True, "logprobs": 1, "n": 3, "max_tokens": 2}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/v1/completions", json=asked)
        assert entered.wait(30)
        assert client.get("/health").status_code == 200
        leave.set()
    assert [choice["text"][:2] for choice in answer.result().json()["choices"]] == ["Hi"] * 3 and len(calls) == 1


@pytest.mark.parametrize(
    ("path", "asked", "tgi"),
    [
        ("/generate", {"inputs": "A", "parameters": SAMPLED | {"n": 2, "logprobs": 2}}, False),
        ("/generate", {"inputs": "A", "parameters": BEST_OF}, True),
        ("/v1/chat/completions", CHAT, False),
    ],
)
def test_many_logprobs_are_put_together_while_the_loop_goes_on(chat_tokenizer, monkeypatch, path, asked, tgi):
    entered, leave = threading.Event(), threading.Event()
    token_text = chat_tokenizer.token_text

    def slow_text(token_id):
        entered.set()
        leave.wait(30)
        return token_text(token_id)

    monkeypatch.setattr(chat_tokenizer, "token_text", slow_text)
    with serving(chat_tokenizer, use_tgi_api=tgi) as (front, engine), ThreadPoolExecutor(1) as pool:
        engine.burst = 100
        answer = pool.submit(httpx.post, front.url + path, json=asked, timeout=60)
        assert entered.wait(30)
        assert httpx.get(front.url + "/health").status_code == 200
        leave.set()
        assert answer.result().status_code == 200


def test_a_finished_request_is_not_aborted(client, engine):
    for path in ("/generate", "/generate_stream"):
        client.post(path, json={"inputs": "A", "parameters": {"max_new_tokens": 5, "n": 1}})
    assert engine.aborted == []


def test_one_failed_output_of_several_ends_the_others(client, engine):
    engine.failing_after = 2
    answer = client.post("/generate", json={"inputs": "A", "parameters": {"max_new_tokens": 9, "n": 3}})
    assert answer.status_code == 500
    until(lambda: engine.aborted == [engine.requests[0].id])


def test_a_slow_reader_does_not_hold_the_engine(front, engine, client):  # case 54
    engine.burst = 10
    stalled = [connect(front, "/generate_stream", LONG) for _ in range(20)]
    until(lambda: len(engine.requests) == 20 and engine.running == 0)
    assert client.post("/generate", json={"inputs": "A", "parameters": {"max_new_tokens": 5}}).status_code == 200
    received = bytearray()
    while not received.endswith(b"0\r\n\r\n"):
        received += stalled[0].recv(65536)
    assert received.count(b"data: ") == 1500
    for connection in stalled:
        connection.close()


def test_many_at_once(front, engine):
    def ask(client, i):
        answer = client.post(
            "/generate", json={"inputs": "A" * (i % 7 + 1), "parameters": {"max_new_tokens": i % 30 + 1}}
        )
        counts[i] = (answer.json()["count_output_tokens"], answer.json()["prompt_tokens"])

    counts: dict[int, tuple[int, int]] = {}
    with httpx.Client(base_url=front.url, timeout=60, limits=httpx.Limits(max_connections=64)) as client:
        threads = [threading.Thread(target=ask, args=(client, i)) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts == {i: (i % 30 + 1, i % 7 + 1) for i in range(64)}


def test_an_engine_that_is_silent_is_not_healthy(front, engine, client, monkeypatch):
    monkeypatch.setattr(manager, "SILENCE_TIMEOUT", 0.3)
    engine.hold = True
    connection = connect(front, "/generate", LONG)
    until(lambda: engine.running == 1)
    until(lambda: client.get("/health").status_code == 503)
    assert client.get("/healthz").json() == {"message": "Error"}
    connection.close()
    until(lambda: client.get("/health").status_code == 200)  # nothing is in flight


def test_a_request_that_only_waits_is_no_silence_while_others_make_progress(front, engine, client, monkeypatch):
    monkeypatch.setattr(manager, "SILENCE_TIMEOUT", 0.2)
    monkeypatch.setattr(manager, "HEALTH_TIMEOUT", 60)  # the router may be slow, and is not silent
    engine.hold = True
    engine.steps_of_others = 1
    connection = connect(front, "/generate", LONG)
    until(lambda: engine.running == 1)
    for _ in range(20):
        time.sleep(0.05)
        engine.steps_of_others += 1
        assert client.get("/health").status_code == 200
    until(lambda: client.get("/health").status_code == 503)  # now nobody makes progress
    connection.close()
