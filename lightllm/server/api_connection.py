"""Between an endpoint and its connection: a bounded JSON body, work that ends when the client goes, an event stream."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lightllm.server.httpserver.generation import ARRIVAL, Arrival, RequestFailed
from lightllm.server.httpserver.manager import CHARACTERS_PER_TOKEN

BODY_TIMEOUT = 60.0  # seconds for the next piece of a body
LINGER_BYTES = 64 << 20  # of what is refused unread are read and dropped, so that the client reads why
LINGER_SECONDS = 30.0  # at most; most clients close as soon as they have read the answer
SPARE_VALUES = 500_000  # of a body, besides the characters or ids of the longest prompt: read in a tenth of a second
LINE_ENDS = [(end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029"]  # of Python's str.splitlines

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]
encode_json = msgspec.json.Encoder().encode  # NaN and infinities, which JSON lacks, become null


def event(value: Any, name: str = "") -> bytes:
    """A server-sent event that carries a value in JSON; what many clients take for the end of a line is escaped."""
    data = encode_json(value)
    if not data.isascii():
        for character, escape in LINE_ENDS:
            data = data.replace(character, escape)
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


class JSON(Response):
    """Any value msgspec can encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def _too_large(limit: int) -> RequestFailed:
    return RequestFailed(413, f"the request body is larger than the limit of {limit} bytes (--max_body_size)")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body of at most `limit` bytes. Raises ClientGone, RequestFailed 413 as soon as it is known, or 408."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                message = await request.receive()
        except TimeoutError:
            raise RequestFailed(408, f"nothing more of the request body came within {BODY_TIMEOUT:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


async def read_object(request: Request, max_mebibytes: int, token_limit: int) -> dict[str, Any]:
    """The JSON object in a request's body, from whose end on the server's time counts.

    Raises what `read_body` and `parse_object` raise, and RequestFailed 415 for a compressed body.
    """
    body = await read_body(request, max_mebibytes << 20)
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise RequestFailed(415, f"the body must be sent as it is, not with the content-encoding {coding}")
    ARRIVAL.set(Arrival(time.monotonic(), request.headers.get("traceparent", "")))
    return parse_object(body, request.headers.get("content-type", ""), token_limit)


def parse_object(body: bytes, content_type: str, token_limit: int) -> dict[str, Any]:
    """The JSON object in a body, whatever content type curl and others put on it.

    Raises RequestFailed 400, or 415 if what cannot be read was not said to be JSON. NaN and Infinity are let through as
    floats, so that the field they are in can be named. A body that may hold far more values than a request of
    `token_limit` tokens is refused unread: reading it would hold up everybody else.
    """
    max_values = CHARACTERS_PER_TOKEN * token_limit + SPARE_VALUES
    if sum(map(body.count, (b",", b"[", b"{"))) > max_values:
        raise RequestFailed(
            400, f"the body holds more than {max_values} values; a request has at most {token_limit} tokens"
        )
    try:
        text = body.decode("utf-8-sig")  # Windows likes to begin with a mark
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        if content_type and "json" not in content_type:
            raise RequestFailed(415, f"the body must be JSON (application/json), not {content_type}") from None
        raise RequestFailed(400, f"the body is not valid JSON: {_json_problem(error)}") from None
    if not isinstance(value, dict):
        raise RequestFailed(400, f"the body must be a JSON object, not {type(value).__name__}")
    return value


def _json_problem(error: ValueError | RecursionError) -> str:
    if isinstance(error, UnicodeError):
        return "not UTF-8"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects: then raises ClientGone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class Answering:
    """An endpoint as an application: sends its answer, or what `error_response` makes of the exception instead.

    count: is told the status of each answer.
    """

    endpoint: Endpoint
    error_response: Callable[[Exception], Response]
    count: Callable[[int], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracking(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                self.count(message["status"])
            await send(message)

        try:
            answer = await self.endpoint(Request(scope, receive))
            await answer(scope, receive, tracking)
        except ClientGone:
            pass
        except Exception as error:
            if started:
                raise
            await self.error_response(error)(scope, receive, tracking)


class EventStream(Response):
    """Server-sent events, each chunk one write.

    Nothing is sent before the first chunk is there: what it raises becomes an answer with a status of its own. A later
    error becomes the last chunk, `error_event`. The generator of the chunks is closed when the client goes.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        error_event: Callable[[Exception], bytes],
        headers: dict[str, str] | None = None,
    ):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | (headers or {}))
        del self.headers["content-length"]
        self._chunks = chunks
        self._error_event = error_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._chunks):
            chunk: bytes | None = await anext(self._chunks)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while chunk is not None:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await self._next_chunk()
        await send({"type": "http.response.body", "body": b""})

    async def _next_chunk(self) -> bytes | None:
        try:
            return await anext(self._chunks, None)
        except Exception as error:
            return self._error_event(error)


class LingeringClose(JSON):
    """An answer sent before the body is read, most of which is then read and dropped.

    A client that still writes when the connection closes would lose the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if not any(name == b"expect" for name, _ in scope["headers"]):  # such a client waits before it writes
            with suppress(TimeoutError):
                await asyncio.wait_for(_drop_body(receive), LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b""})


async def _drop_body(receive: Receive) -> None:
    dropped = 0
    while dropped < LINGER_BYTES:
        message = await receive()
        dropped += len(message.get("body", b""))
        if not message.get("more_body", False):
            return
