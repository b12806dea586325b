"""Channels: everything arrives, in order, whoever starts first; nobody waits in a loop, and garbage does no harm."""

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
import zmq
from support.server import until

from lightllm.server.core.channel import AsyncInbox, Inbox, Outbox, encode, wait
from lightllm.server.core.messages import AbortRequest, LoadRequest, Message, StopRequest, TextBatch
from lightllm.utils.process_utils import Children

PATIENCE = 60.0


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="chan", dir="/tmp"))  # short: a socket's path has 107 bytes
    yield path
    shutil.rmtree(path)


def receive(inbox: Inbox, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        assert wait(inbox, timeout=PATIENCE) == {inbox}, f"only {len(messages)} messages"
        messages += inbox.receive()
    return messages


def test_order_of_thousands(socket_dir: Path) -> None:
    inbox = Inbox(socket_dir, "router", [AbortRequest])
    outboxes = [Outbox(socket_dir, "router") for _ in range(3)]
    for i in range(30_000):
        outboxes[i % 3].send(AbortRequest(i))
    ids = [message.id for message in receive(inbox, 30_000) if isinstance(message, AbortRequest)]
    for sender in range(3):
        assert [i for i in ids if i % 3 == sender] == list(range(sender, 30_000, 3))
    assert inbox.receive() == []


def test_a_sender_never_waits_for_a_receiver(socket_dir: Path) -> None:
    """Who connects first and sends more than any buffer holds loses nothing."""
    outbox = Outbox(socket_dir, "late")
    batch = TextBatch(b"", b"", b"", b"", [], [], [], [], 0.0, ["x" * 100_000])
    for _ in range(500):
        outbox.send(batch)
    inbox = Inbox(socket_dir, "late", [TextBatch])
    assert receive(inbox, 500) == [batch] * 500


def test_one_encoding_for_many_receivers(socket_dir: Path) -> None:
    inboxes = [Inbox(socket_dir, f"worker{rank}", [StopRequest]) for rank in range(4)]
    encoded = encode(StopRequest(8, 3))
    for rank in range(4):
        Outbox(socket_dir, f"worker{rank}").send_bytes(encoded)
    for inbox in inboxes:
        assert receive(inbox, 1) == [StopRequest(8, 3)]


def test_garbage_is_dropped(socket_dir: Path) -> None:
    """As are messages that are not for this inbox."""
    inbox = Inbox(socket_dir, "router", [AbortRequest, StopRequest])
    outbox = Outbox(socket_dir, "router")
    whole = encode(AbortRequest(1))
    no_text = b"\x92\xa1\xe5\x01"
    for garbage in (
        b"",
        b"\x00",
        no_text,
        os.urandom(100),
        whole[:-1],
        whole + whole,
        b"\xc1" * 9,
        b"\x93\xa0\x01\x02",
    ):
        outbox.send_bytes(garbage)
    outbox.send(LoadRequest(0, 1))
    outbox.send(AbortRequest(2))
    assert receive(inbox, 1) == [AbortRequest(2)]
    raw = zmq.Context.instance().socket(zmq.DEALER)  # no peer that a PULL socket talks to
    raw.linger = 0
    raw.connect(f"ipc://{socket_dir}/router")
    raw.send(b"hello")
    outbox.send(AbortRequest(3))
    assert receive(inbox, 1) == [AbortRequest(3)]
    raw.close()


def test_wait_sees_descriptors_too(socket_dir: Path) -> None:
    inbox = Inbox(socket_dir, "router", [AbortRequest])
    outbox = Outbox(socket_dir, "router")
    reading, writing = os.pipe()
    assert wait(inbox, reading, timeout=0.05) == set()
    os.write(writing, b"x")
    assert wait(inbox, reading) == {reading}
    outbox.send(AbortRequest(1))
    until(lambda: wait(inbox, reading) == {inbox, reading})
    assert inbox.receive() == [AbortRequest(1)]
    os.read(reading, 1)
    assert wait(inbox, reading, timeout=0.05) == set()


def test_waiting_takes_no_time_of_the_processor(socket_dir: Path) -> None:
    inbox = Inbox(socket_dir, "router", [AbortRequest])
    outbox = Outbox(socket_dir, "router")
    outbox.send(AbortRequest(0))
    receive(inbox, 1)
    timer = threading.Timer(2, outbox.send, [AbortRequest(1)])
    timer.start()
    before = time.process_time()
    receive(inbox, 1)
    assert time.process_time() - before < 1
    timer.join()


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_async_inbox(socket_dir: Path, run: Callable[..., None]) -> None:
    """Single messages, bursts, and pauses between them; an idle reader does not spin."""

    async def main() -> None:
        inbox = AsyncInbox(socket_dir, "front0", [AbortRequest])
        outbox = Outbox(socket_dir, "front0")
        expected = 0
        for count in (1, 1, 5000, 1, 20_000, 3):
            sender = threading.Thread(target=send, args=(outbox, expected, count))
            sender.start()
            got: list[Message] = []
            while len(got) < count:
                got += await asyncio.wait_for(inbox.receive(), PATIENCE)
            assert got == [AbortRequest(i) for i in range(expected, expected + count)]
            expected += count
            sender.join()
        before = time.process_time()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.receive(), 2)
        assert time.process_time() - before < 1
        outbox.send(AbortRequest(expected))
        assert await asyncio.wait_for(inbox.receive(), PATIENCE) == [AbortRequest(expected)]

    run(main())


def send(outbox: Outbox, first: int, count: int) -> None:
    for i in range(first, first + count):
        outbox.send(AbortRequest(i))


def test_last_messages_of_a_process_arrive(socket_dir: Path, children: Children) -> None:
    inbox = Inbox(socket_dir, "inbox", [AbortRequest])
    children.spawn("t-goodbye", "children:says_goodbye", {"socket_dir": str(socket_dir), "count": 20_000})
    assert receive(inbox, 20_000) == [AbortRequest(i) for i in range(20_000)]


def test_a_process_ends_though_nobody_takes_its_messages(socket_dir: Path, children: Children) -> None:
    children.spawn("t-goodbye", "children:says_goodbye", {"socket_dir": str(socket_dir), "count": 100})
    exited = [event for event in children.events(PATIENCE) if getattr(event, "kind", "") == "exited"]
    until(lambda: exited or any(getattr(event, "kind", "") == "exited" for event in children.events(1)))
