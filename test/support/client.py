"""A client that forgives nothing: strict JSON, strict server-sent events, and connections that can be dropped."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TIMEOUT = 120.0  # seconds without a byte


def strict_json(text: str | bytes) -> Any:
    """JSON without NaN and Infinity, in UTF-8."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text.decode() if isinstance(text, bytes) else text, parse_constant=refuse)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]  # lower-case names
    body: bytes

    def json(self) -> Any:
        assert self.headers["content-type"].split(";")[0] == "application/json", self.headers
        return strict_json(self.body)

    def error(self) -> dict[str, Any]:
        """The error in the one shape that this dialect has."""
        (name, error), *others = self.json().items()
        assert name == "error" and not others, self.body
        assert_error(error)
        assert error["code"] == self.status, error
        return error


def assert_error(error: dict[str, Any]) -> None:
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"], error
    assert "Traceback" not in error["message"], error


class EventsOf:
    """The events of a stream as they come: each frame is exactly `data: ` + JSON. Closing drops the connection."""

    def __init__(self, sock: socket.socket, response: http.client.HTTPResponse):
        self._sock = sock
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self._events = self._read()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Goes on where the last look ended: one read may bring several events."""
        return self._events

    def _read(self) -> Iterator[dict[str, Any]]:
        assert self.status == 200, self._response.read()
        assert self.headers["content-type"].startswith("text/event-stream")
        rest = b""
        while chunk := self._response.read1(1 << 16):
            *frames, rest = (rest + chunk).split(b"\n\n")
            for frame in frames:
                assert frame.startswith(b"data: ") and b"\n" not in frame, frame
                yield strict_json(frame[len(b"data: ") :])
        assert not rest, f"the stream ends inside a frame: {rest!r}"

    def close(self) -> None:
        """At once, whatever is still on its way."""
        self._response.close()
        self._sock.close()

    def __enter__(self) -> EventsOf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """One server; every request has a connection of its own, and threads may share a Client. key: an API key."""

    def __init__(self, host: str, port: int, timeout: float = TIMEOUT, key: str = ""):
        self._own_headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.host = host
        self.port = port
        self.timeout = timeout

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """body: bytes as they are, anything else as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout or self.timeout)
        try:
            self._send(connection, method, path, body, headers)
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()

    def get(self, path: str, timeout: float | None = None) -> Answer:
        return self.request("GET", path, timeout=timeout)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None, timeout: float | None = None) -> Answer:
        return self.request("POST", path, body, headers, timeout)

    def open_stream(self, body: Any, path: str = "/generate_stream") -> EventsOf:
        """Returns once the head of the answer is there."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        self._send(connection, "POST", path, body, None)
        sock = connection.sock
        return EventsOf(sock, connection.getresponse())

    def send_and_leave(self, path: str, body: Any) -> socket.socket:
        """A request whose answer nobody reads; closing the socket drops it."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        self._send(connection, "POST", path, body, None)
        return connection.sock

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: dict[str, str] | None
    ) -> None:
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection.request(
            method, path, body, {"Content-Type": "application/json"} | self._own_headers | (headers or {})
        )
