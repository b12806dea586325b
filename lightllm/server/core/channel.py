"""Channels between the processes of one server: ZeroMQ PUSH into one PULL inbox per process, over unix sockets.

The sockets lie in a folder of mode 0700 (`socket_dir`). High-water marks are 0: a sender never blocks and nothing is
dropped; what bounds memory is the number of requests. A sender may connect before the receiver has bound.
"""

import asyncio
import atexit
import functools
import math
import operator
from collections.abc import Iterable
from pathlib import Path

import msgspec
import zmq

from lightllm.server.core.messages import Message
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)

LINGER_MS = 1000  # how long an exiting process waits for its last messages to be taken
atexit.register(lambda: zmq.Context.instance().destroy())

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The message as it travels; for `Outbox.send_bytes` when several receivers get the same."""
    return _encoder.encode(message)


def _socket(kind: int) -> zmq.Socket:
    socket: zmq.Socket = zmq.Context.instance().socket(kind)
    socket.set_hwm(0)
    socket.linger = LINGER_MS
    return socket


def _address(socket_dir: str | Path, name: str) -> str:
    return f"ipc://{socket_dir}/{name}"


class Inbox:
    """Where a process receives; `types` are the messages it understands, anything else is logged and dropped."""

    def __init__(self, socket_dir: str | Path, name: str, types: Iterable[type[Message]]):
        self.socket = _socket(zmq.PULL)
        self.socket.bind(_address(socket_dir, name))
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(functools.reduce(operator.or_, types))
        self._name = name

    def receive(self) -> list[Message]:
        """All messages that have arrived, without waiting."""
        messages = []
        while True:
            try:
                messages.append(self._decoder.decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                logger.error("%s dropped a message that it does not understand: %s", self._name, error)


def wait(inbox: Inbox, *fds: int, timeout: float | None = None) -> set[Inbox | int]:
    """Sleeps until the inbox or a file descriptor is readable, at most `timeout` seconds; gives those that are."""
    poller = _poller(inbox, fds)
    ready = poller.poll(None if timeout is None else math.ceil(timeout * 1000))
    return {inbox if source is inbox.socket else source for source, _ in ready}


@functools.lru_cache(maxsize=8)
def _poller(inbox: Inbox, fds: tuple[int, ...]) -> zmq.Poller:
    poller = zmq.Poller()
    for source in (inbox.socket, *fds):
        poller.register(source, zmq.POLLIN)
    return poller


class Outbox:
    """Sends to one inbox; never blocks."""

    def __init__(self, socket_dir: str | Path, name: str):
        self._socket = _socket(zmq.PUSH)
        self._socket.connect(_address(socket_dir, name))

    def send(self, message: Message) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, encoded: bytes) -> None:
        self._socket.send(encoded, zmq.NOBLOCK)


class AsyncInbox:
    """An inbox for one reader on the running event loop."""

    def __init__(self, socket_dir: str | Path, name: str, types: Iterable[type[Message]]):
        self._inbox = Inbox(socket_dir, name, types)
        self._readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._inbox.socket.fileno(), self._readable.set)

    async def receive(self) -> list[Message]:
        """At least one message, all that have arrived."""
        # ZeroMQ's descriptor signals changes only; it is quiet again once the socket has been read until it is empty.
        while True:
            self._readable.clear()
            if messages := self._inbox.receive():
                return messages
            await self._readable.wait()
