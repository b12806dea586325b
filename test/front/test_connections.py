"""Connections that bring no whole request, or several: none is held for ever, none outlives its client."""

import gc
import itertools
import json
import socket
import struct
from contextlib import suppress

import pytest
from front.scripted_engine import LONG, connect
from support.server import until

from lightllm.server import api_connection, api_protocol

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def open_connection(front, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", front.port), timeout=30)
    connection.sendall(sent)
    return connection


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


@pytest.mark.parametrize("piece", [b"X-%d: a\r\n", b"%d" + b"a" * 1000], ids=["many", "long"])
def test_a_head_without_end_is_refused(front, engine, monkeypatch, piece: bytes) -> None:
    monkeypatch.setattr(api_protocol, "LINGER_BYTES", 1 << 20)
    connection = open_connection(front, POST + b"X-A: ")
    with pytest.raises(ConnectionError):  # it is closed while more is sent
        for number in itertools.count():
            connection.sendall(piece % number)
    assert engine.requests == []


@pytest.mark.parametrize(
    "head, reason",
    [
        (POST + b"X-A: " + b"a" * 66000, b"at most 65536 bytes."),
        (b"\x16\x03\x01\r\n\r\n", b"Invalid HTTP request received."),
    ],
    ids=["long", "no_http"],
)
def test_the_reason_is_told_to_who_still_writes(front, engine, head: bytes, reason: bytes) -> None:
    connection = open_connection(front, head)
    connection.recv(1, socket.MSG_PEEK)  # the answer is there
    for _ in range(20):
        connection.sendall(b"a" * 50000)
    received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 400 ") and received.endswith(reason)


def test_a_reset_connection_leaves_no_timer(front, engine) -> None:
    connection = open_connection(front, b"GET /liveness HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.recv(65536)
    protocols = (each for each in gc.get_objects() if isinstance(each, api_protocol.BoundedProtocol))
    (protocol,) = (each for each in protocols if each.client == connection.getsockname())
    until(lambda: protocol.timeout_keep_alive_task is not None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    until(lambda: protocol.parser is None)
    assert protocol.timeout_keep_alive_task is None


def test_what_cannot_be_read_ends_the_answer_before_it(front, engine) -> None:
    engine.pace = 0.01
    connection = connect(front, "/generate", LONG)
    until(lambda: engine.running == 1)
    connection.sendall(b"\x16\x03\x01\r\n\r\n")
    assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    until(lambda: engine.running == 0)
    assert len(engine.aborted) == 1


@pytest.mark.parametrize("name, bound", [("LINGER_SECONDS", 0.1), ("LINGER_BYTES", 1000)])
def test_nobody_writes_for_ever_behind_a_reason(front, engine, monkeypatch, name: str, bound: float) -> None:
    monkeypatch.setattr(api_protocol, name, bound)
    connection = open_connection(front, b"\x16\x03\x01\r\n\r\n")
    with pytest.raises(ConnectionError):
        while True:
            connection.sendall(b"a" * 1000)


@pytest.mark.parametrize("sent", [b"", b"PO", POST, POST + b"X-A: "])
def test_a_head_that_does_not_come_closes_the_connection(front, engine, monkeypatch, sent: bytes) -> None:
    monkeypatch.setattr(api_protocol, "HEAD_TIMEOUT", 0.2)
    connection = open_connection(front)
    with suppress(ConnectionError):  # closed before the server had read what was sent
        connection.sendall(sent)
        assert read_all(connection) == b""


def test_a_body_that_does_not_come_is_told(front, engine, monkeypatch) -> None:
    monkeypatch.setattr(api_connection, "BODY_TIMEOUT", 0.2)
    head, _, body = read_all(open_connection(front, POST + b'Content-Length: 50\r\n\r\n{"prompt":')).partition(
        b"\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error" and engine.requests == []


def test_a_slow_answer_is_not_a_slow_request(front, engine, monkeypatch) -> None:
    connection = kept_connection(front)
    for module, name in ((api_protocol, "HEAD_TIMEOUT"), (api_connection, "BODY_TIMEOUT")):
        monkeypatch.setattr(module, name, 0.2)
    engine.pace = 0.1
    connection.sendall(generate_request(6))
    assert b'["abcdef"]' in answers(connection, 1)


def test_who_leaves_behind_several_requests_ends_them_all(front, engine, caplog) -> None:
    engine.pace = 0.01
    body = json.dumps(LONG).encode()
    one = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    connection = open_connection(front, one * 3)
    until(lambda: engine.running == 1)
    connection.close()
    until(lambda: engine.running == 0)
    assert len(engine.requests) == len(engine.aborted) == 1
    assert [record for record in caplog.records if record.name != "lightllm.requests"] == []


def generate_request(count: int, padding: int = 0) -> bytes:
    body = json.dumps({"inputs": "A", "parameters": {"max_new_tokens": count}}).encode() + b" " * padding
    return b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def answers(connection: socket.socket, number: int) -> bytes:
    received = b""
    while received.count(b'"generated_text"') < number:
        piece = connection.recv(65536)
        assert piece, f"closed after {received!r}"
        received += piece
    return received


def kept_connection(front) -> socket.socket:
    """One that has had an answer: the time of the next head begins with its first byte."""
    connection = open_connection(front, generate_request(1))
    answers(connection, 1)
    return connection


def test_several_requests_of_a_connection_are_answered_in_order(front, engine) -> None:
    received = answers(open_connection(front, b"".join(map(generate_request, (1, 2, 3)))), 3)
    assert [text in received for text in (b'["a"]', b'["ab"]', b'["abc"]')] == [True] * 3


@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
@pytest.mark.parametrize("cut", [0, 10], ids=["whole", "in_pieces"])
def test_an_offer_to_upgrade_is_left_unheard(front, engine, offer: bytes, cut: int) -> None:
    """Java's HttpClient and curl --http2 make one with every request; what they ask is asked in HTTP 1.1."""
    offered = b"HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABk\r\n" % offer
    requests = b"".join(generate_request(count) for count in (1, 2)).replace(b"HTTP/1.1\r\n", offered)
    connection = open_connection(front, requests[: len(requests) - cut])
    if cut:
        until(lambda: len(engine.requests) == 1)
        connection.sendall(requests[-cut:])
    received = answers(connection, 2)
    assert b'["a"]' in received and b'["ab"]' in received


def test_what_comes_before_a_head_is_not_of_it(front, engine) -> None:
    one, two = generate_request(1, padding=api_protocol.MAX_HEAD), generate_request(2)
    connection = open_connection(front, one + two[:10])
    answers(connection, 1)
    connection.sendall(two[10:])
    answers(connection, 1)


def test_a_head_may_wait_for_the_answers_before_it(front, engine, monkeypatch) -> None:
    connection = kept_connection(front)
    monkeypatch.setattr(api_protocol, "HEAD_TIMEOUT", 0.2)
    engine.pace = 0.1
    connection.sendall(generate_request(5) + b"POST")
    answers(connection, 1)
    assert b"HTTP/1.1" not in read_all(connection)  # then it must come


def test_what_begins_no_request_leaves_a_connection_idle(front, engine, monkeypatch) -> None:
    connection = kept_connection(front)
    monkeypatch.setattr(
        api_protocol.BoundedProtocol, "timeout_keep_alive", property(lambda _: 0.2, lambda *_: None), raising=False
    )
    connection.sendall(b"\r\n")
    assert b"HTTP/1.1" not in read_all(connection)
