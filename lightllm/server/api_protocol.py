"""One connection of a front: uvicorn's protocol, which knows no bounds for the head of a request."""

import asyncio

from uvicorn.protocols.http.httptools_impl import ASGI3Application, HttpToolsProtocol, RequestResponseCycle

MAX_HEAD = 64 << 10  # bytes of a request before its body; what one read brings is looked at afterwards
HEAD_TIMEOUT = 60.0  # seconds for them, and for a new connection to begin


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections whose next request has no end or does not come.

    A connection that is lost ends the request that is being answered, also if others were sent behind it.
    """

    _answering: RequestResponseCycle | None = None
    _head = 0  # bytes of the one that is being read
    _timer: asyncio.TimerHandle | None = None  # while there is one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        super().data_received(data)
        if self._timer is None:
            self._stay_idle()
        elif self._head > MAX_HEAD:
            self._end_head()
            self.send_400_response(f"The head of a request has at most {MAX_HEAD} bytes.")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

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
