"""A front that drains, and one whose engine has failed (cases 46, 50 of the bank, on the front's side)."""

import json
import os
import socket
import tempfile
import threading
from dataclasses import asdict

import httpx
import pytest
from front.scripted_engine import ENGINE, LONG, ScriptedEngine, connect, serving
from support.server import until

from lightllm.server import api_http
from lightllm.server.core.server_args import ServerArgs
from lightllm.utils.process_utils import ChildProcess


@pytest.fixture
def served(tokenizer):
    """A front for each test, which closes it."""
    with serving(tokenizer) as front_and_engine:
        yield front_and_engine


def background(target) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(target()))
    thread.start()
    return thread, results


def running_stream(front) -> tuple[threading.Thread, list]:
    """A stream that has had its first event."""
    streaming = threading.Event()

    def read() -> httpx.Response:
        with httpx.stream("POST", f"{front.url}/generate_stream", json=LONG, timeout=60) as response:
            streaming.set()  # the headers come with the first event
            response.read()
        return response

    stream, streamed = background(read)
    assert streaming.wait(60)
    return stream, streamed


def last_event(stream: httpx.Response) -> dict:
    return json.loads(stream.text.split("\n\n")[-2].removeprefix("data: "))


def test_drain_lets_requests_end(front, engine):
    engine.pace = 0.01
    whole, answers = background(
        lambda: httpx.post(f"{front.url}/generate", json=LONG | {"parameters": {"max_new_tokens": 100}}, timeout=60)
    )
    until(lambda: engine.running == 1)
    front.launcher.command({"drain": 60})
    whole.join(60)
    assert answers[0].json()["count_output_tokens"] == 100
    front.thread.join(30)
    assert not front.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{front.url}/health")


def test_drain_ends_the_rest_in_time(front, engine):
    engine.pace = 0.05
    stream, streamed = running_stream(front)
    whole, answers = background(lambda: httpx.post(f"{front.url}/generate", json=LONG, timeout=60))
    until(lambda: engine.running == 2)
    front.launcher.command({"drain": 0.5})
    for thread in (stream, whole, front.thread):
        thread.join(30)
    assert answers[0].status_code == 503 and "shut down" in answers[0].json()["error"]["message"]
    assert last_event(streamed[0])["error"]["code"] == 503
    until(lambda: len(engine.aborted) == 2)


def test_while_draining_a_kept_connection_is_refused(front, engine):
    engine.hold = True
    body = json.dumps(LONG).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    busy = connect(front, "/generate", LONG)
    arriving = socket.create_connection(("127.0.0.1", front.port))
    arriving.sendall(head + body[:10])  # accepted before the drain, complete only after it
    until(lambda: engine.running == 1)
    front.launcher.command({"drain": 60})
    until(lambda: _refused(front.port))
    arriving.sendall(body[10:])
    arriving.settimeout(30)
    answer = arriving.recv(65536).lower()
    assert answer.startswith(b"http/1.1 503") and b"connection: close" in answer
    front.launcher.command({"drain": 0})
    busy.settimeout(30)
    assert busy.recv(65536).startswith(b"HTTP/1.1 503")


def _refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_stalled_reader_does_not_hold_the_exit(front, engine):
    engine.burst = 100
    sockets = [connect(front, "/generate_stream", LONG) for _ in range(3)]
    until(lambda: len(engine.requests) == 3 and engine.running == 0)
    front.launcher.command({"drain": 0.2})
    front.thread.join(30)
    assert not front.thread.is_alive()
    for connection in sockets:
        connection.close()


def test_a_failed_engine_ends_every_request(front, engine, client, monkeypatch):
    monkeypatch.setattr(api_http, "FAILED_LINGER", 60)
    engine.pace = 0.05
    stream, streamed = running_stream(front)
    whole, answers = background(lambda: httpx.post(f"{front.url}/generate", json=LONG, timeout=60))
    until(lambda: engine.running == 2)
    client.get("/health")
    front.launcher.command({"failed": "lightllm-tp0 was killed"})
    for thread in (stream, whole):
        thread.join(30)
    assert answers[0].status_code == 503 and "lightllm-tp0 was killed" in answers[0].json()["error"]["message"]
    assert "lightllm-tp0" in last_event(streamed[0])["error"]["message"]
    health = client.get("/health")
    assert (health.status_code, health.json()) == (503, {"message": "Error"})
    assert client.get("/readiness").status_code == 503
    assert client.post("/generate", json=LONG).status_code == 503
    monkeypatch.setattr(api_http, "FAILED_LINGER", 0.1)
    front.launcher.command({"failed": "lightllm-tp0 was killed"})
    front.thread.join(30)
    assert not front.thread.is_alive()


def test_a_front_process(model_dir):
    """As the launcher runs it: a process with a control pipe and an inherited listener."""
    listener = socket.create_server(("127.0.0.1", 0))
    args = asdict(ServerArgs(model_dir=str(model_dir), model_name="served"))
    with tempfile.TemporaryDirectory(prefix="front") as socket_dir:
        engine = ScriptedEngine(socket_dir)
        config = dict(args=args, socket_dir=socket_dir, index=0, listen_fd=listener.fileno())
        process = ChildProcess("lightllm-http0", "lightllm.server.api_http:main", config, [listener.fileno()])
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            process.send({"engine": ENGINE})
            os.set_blocking(process.status_fd, True)
            assert [event.kind for event in process.read_status()] == ["ready"]
            process.send({"serve": True})
            answer = httpx.post(
                f"{url}/generate", json={"inputs": "A", "parameters": {"max_new_tokens": 3}}, timeout=60
            )
            assert answer.json()["generated_text"] == ["abc"]
            assert httpx.get(f"{url}/get_model_name", timeout=60).json() == {"model_name": "served"}
            process.send({"drain": 1})
            assert process.exit_status() == 0
        finally:
            process.kill()
            engine.close()
            listener.close()
