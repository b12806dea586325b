"""The detokenizer as its own process, between a router and two fronts over real sockets."""

import select
import tempfile
import time

import msgspec
import numpy as np
import pytest

from lightllm.server.core.channel import Inbox, Outbox, wait
from lightllm.server.core.messages import (
    FRONT_SHIFT,
    Finish,
    NewSequence,
    StopRequest,
    TextBatch,
    TokenBatch,
    pack,
    unpack,
)
from lightllm.server.core.server_args import ServerArgs
from lightllm.utils.process_utils import ChildProcess

TIMEOUT = 120.0


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="detok-") as folder:  # short: a socket's path has at most 107 characters
        yield folder


def start(model_dir: str, folder: str) -> ChildProcess:
    args = msgspec.to_builtins(ServerArgs(model_dir=model_dir, httpserver_workers=2))
    target = "lightllm.server.detokenization.manager:main"
    return ChildProcess("lightllm-detok", target, {"args": args, "socket_dir": folder})


def status_of(child: ChildProcess):
    events: list = []
    while not events:
        assert select.select([child.status_fd], [], [], TIMEOUT)[0]
        events = list(child.read_status())
    return events[0].kind, events[0].value


def receive(inbox: Inbox, count: int) -> list:
    messages: list = []
    deadline = time.monotonic() + TIMEOUT
    while len(messages) < count:
        assert time.monotonic() < deadline
        wait(inbox, timeout=1)
        messages += inbox.receive()
    return messages


def test_tokens_become_texts_until_the_launcher_says_stop(byte_level, params, folder):
    byte_level.hf.save_pretrained(folder)
    fronts = [Inbox(folder, f"front{index}", [TextBatch]) for index in range(2)]
    router = Inbox(folder, "router", [StopRequest])
    child = start(folder, folder)
    try:
        child.send({"engine": {}})
        assert status_of(child) == ("ready", {})
        with open(f"/proc/{child._process.pid}/comm") as comm:
            assert comm.read() == "lightllm-detok\n"
        detokenizer = Outbox(folder, "detok")
        sequences = [8, (1 << FRONT_SHIFT) | 8]
        prompt_tail = pack(byte_level.encode("A"), np.int32)
        new = [
            NewSequence(sequences[0], prompt_tail, params()),
            NewSequence(sequences[1], prompt_tail, params(stop_sequences=[" xy"])),
        ]
        ids = byte_level.encode("🫠 xyz龜W")
        for count, id in enumerate(ids, 1):
            finish = Finish.LENGTH if count == len(ids) else Finish.NONE
            detokenizer.send(
                TokenBatch(
                    sequence_ids=pack(sequences, np.int64),
                    tokens=pack([id, id], np.int32),
                    logprobs=pack([-0.5, -0.5], np.float32),
                    finishes=pack([finish, finish], np.uint8),
                    top=[],
                    prompt=[],
                    new=new if count == 1 else [],
                    started=[],
                    ended=[],
                    at=0.0,
                )
            )
        whole, stopped = receive(fronts[0], len(ids)), receive(fronts[1], 7)
        assert "".join(text for batch in whole for text in batch.texts) == "🫠 xyz龜W"
        assert [list(batch.finishes) for batch in whole] == [[Finish.NONE]] * (len(ids) - 1) + [[Finish.LENGTH]]
        assert {unpack(batch.sequence_ids, np.int64).item() for batch in stopped} == {sequences[1]}
        assert "".join(text for batch in stopped for text in batch.texts) == "🫠"
        assert stopped[-1].finishes == bytes([Finish.STOP])
        assert receive(router, 1) == [StopRequest(sequences[1], 7)]
        child.send({"stop": True})
        assert child.exit_status() == 0
        assert fronts[1].receive() == []
    finally:
        child.kill()


def test_a_missing_tokenizer_is_told_to_the_launcher(folder):
    child = start(folder, folder)
    try:
        kind, reason = status_of(child)
        assert kind == "failed" and reason.startswith(f"no usable tokenizer in {folder}: ")
        assert child.exit_status() == 1
    finally:
        child.kill()


def test_stop_before_the_engine_is_ready(byte_level, folder):
    byte_level.hf.save_pretrained(folder)
    child = start(folder, folder)
    try:
        child.send({"stop": True})
        assert child.exit_status() == 0
    finally:
        child.kill()
