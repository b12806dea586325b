"""One connection of a front: uvicorn's protocol, which knows no bounds for the head of a request."""

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import ASGI3Application, HttpToolsProtocol, RequestResponseCycle

from lightllm.server.api_connection import LINGER_BYTES, LINGER_SECONDS

MAX_HEAD = 64 << 10  # bytes of a request before its body; what one read brings is looked at afterwards
HEAD_TIMEOUT = 60.0  # seconds for them, and for a new connection to begin


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections whose next request has no end or does not come.

    A connection that is lost ends the request that is being answered, also if others were sent behind it.
    """

    _answering: RequestResponseCycle | None = None
    _head = 0  # bytes of the one that is being read
    _timer: asyncio.TimerHandle | None = None  # while there is one
    _lingering: asyncio.TimerHandle | None = None  # since a request was refused that cannot be read
    _dropped = 0  # bytes since then

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        if not self._offers_upgrade():
            self._end_head()
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._offers_upgrade():
            super().on_message_complete()

    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.close()
            return
        self._head += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._timer is None:
            self._stay_idle()
        elif self._head > MAX_HEAD:
            self.send_400_response(f"The head of a request has at most {MAX_HEAD} bytes.")

    def _parse(self, data: bytes) -> None:
        """A request that offers to go on in another protocol, behind whose head the parser stops, is read again without
        the offer."""
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self._offers_upgrade():
                    return
                line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
                fields = [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
                data = b"\r\n".join([line, *fields, b"", data[offer.args[0] :]])

    def send_400_response(self, msg: str) -> None:
        """Tells the client why the connection ends, and drops what it still writes until it has read that: closing a
        connection with unread bytes resets it, and the answer would be lost."""
        self._end_head()
        self._end_answer()
        self.flow.resume_reading()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", b"%d" % len(msg)),
            (b"connection", b"close"),
        ]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n%b\r\n%b" % (head, msg.encode()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._lingering = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_answer()
        if self._lingering is not None:
            self._lingering.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # which uvicorn forgets if it was reset: the timer would hold all of it

    def _end_answer(self) -> None:
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _begin_head(self) -> None:
        if self._timer is None:
            self._head = 0  # a read in which it begins may also bring the end of a body
        self._end_head()
        self._timer = self.loop.call_later(HEAD_TIMEOUT, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._answering is None or self._answering.response_complete:
            self.timeout_keep_alive_handler()
        else:  # nothing may be read until the requests before it are answered
            self._timer = self.loop.call_later(HEAD_TIMEOUT, self._head_is_late)

    def _end_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stay_idle(self) -> None:
        """After data that began no request, as empty lines or a body that nobody wants, for which uvicorn has stopped
        the time of an idle connection."""
        if self.cycle is not None and self.cycle.response_complete and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
