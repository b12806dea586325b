"""A real front and, on the real sockets, a scripted engine that sends what router and detokenizer would."""

import json
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import uvloop

from lightllm.server import api_http
from lightllm.server.core.channel import Inbox, Outbox, wait
from lightllm.server.core.messages import (
    AbortRequest,
    Ended,
    Finish,
    GenerateRequest,
    Load,
    LoadReport,
    LoadRequest,
    PromptLogprobs,
    Started,
    TextBatch,
    TopLogprobs,
    pack,
    unpack,
)
from lightllm.server.core.server_args import ServerArgs
from lightllm.server.tokenizer import Tokenizer

ENGINE = dict(
    model_type="llama",
    dtype="float32",
    device="cpu",
    vocab_size=320,
    eos_token_ids=[256],
    max_total_token_num=5000,
    max_req_total_len=2000,
    running_max_req_size=512,
)


LONG = {"inputs": "A", "parameters": {"max_new_tokens": 1500}}


class ScriptedEngine:
    """Answers every request with the letters a, b, c... up to max_new_tokens, a token of every request per step.

    pace: seconds of a step. hold: requests get nothing. refusal: (status, reason) for every request. failing_after:
    tokens after which a request fails. burst: steps taken at once. requests, aborted: what came. says: instead of the
    letters, a token for each of its characters or items, and the end of sequence behind it. stops: this end of `says`
    is a stop string, held back as the detokenizer does. steps_of_others: that the router has seen. likeliest: the
    sample whose tokens are likelier than those of the others.
    """

    def __init__(self, socket_dir: str):
        self._lock = threading.Lock()  # a test begins between two steps
        self.reset()
        self._inbox = Inbox(socket_dir, "router", (GenerateRequest, AbortRequest, LoadRequest))
        self._front = Outbox(socket_dir, "front0")
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def reset(self) -> None:
        """As new, for the next test, which hears nothing more of the requests of the last."""
        with self._lock:
            self._reset()

    def _reset(self) -> None:
        self.pace = 0.0
        self.hold = False
        self.refusal: tuple[int, str] | None = None
        self.failing_after: int | None = None
        self.burst = 1
        self.says: str | list[str] | None = None
        self.stops: str | None = None
        self.steps_of_others = 0
        self.likeliest: int | None = None
        self.requests: list[GenerateRequest] = []
        self.aborted: list[int] = []
        self._running: dict[int, tuple[GenerateRequest, int]] = {}

    def close(self) -> None:
        os.write(self._stopped, b"x")
        self._thread.join()

    @property
    def running(self) -> int:
        return len(self._running)

    def _loop(self) -> None:
        while True:
            busy = self._running and not self.hold
            ready = wait(self._inbox, self._stop, timeout=self.pace if busy else None)
            if self._stop in ready:
                return
            with self._lock:
                for message in self._inbox.receive():
                    self._take(message)
                if not self.hold:
                    for _ in range(len(self._running) and self.burst):
                        self._step()

    def _take(self, message: Any) -> None:
        match message:
            case GenerateRequest():
                self.requests.append(message)
                if self.refusal:
                    self._send(ended=[Ended(message.id, Finish.ERROR, *self.refusal)])
                else:
                    self._running[message.id] = (message, 0)
            case AbortRequest() if any(request.id == message.id for request in self.requests):
                self._running.pop(message.id, None)
                self.aborted.append(message.id)
            case LoadRequest():
                load = Load(
                    used_tokens=500,
                    predicted_peak=2500,
                    running=self.running,
                    steps_total=self.steps_of_others,
                    waiting=3,
                )
                self._front.send(LoadReport(message.ticket, load))

    def _step(self) -> None:
        rows, top, prompt, started, ended = [], [], [], [], []
        for request, count in list(self._running.values()):
            sampling = request.sampling
            if count == self.failing_after:
                ended.append(Ended(request.id, Finish.ERROR, 500, "the row failed"))
                del self._running[request.id]
                continue
            said = self.says is not None and count == len(self.says)
            if self.stops is not None:
                self._stop_at(request, count)
                continue
            last = said or count + 1 == sampling.max_new_tokens
            finish = Finish.STOP if said else Finish.LENGTH if last else Finish.NONE
            text = "" if said else chr(count % 26 + 97) if self.says is None else self.says[count]
            if count == 0:
                # a second sample finds more in the cache, which no usage shows
                now = time.monotonic()
                started += [Started(request.id, 2, now), Started(request.id | 1, 9, now)]
            for sample in range(sampling.n):
                if sampling.prompt_logprobs is not None and count == 0:
                    prompt.append(self._prompt_logprobs(request, sample))
                if sampling.logprobs:
                    ids = pack([64, 65, 66][: sampling.logprobs], "int32")
                    top.append(TopLogprobs(len(rows), ids, pack([-0.5, -1.5, -np.inf][: sampling.logprobs], "float32")))
                # byte-level ids: 64 is "a", 256 the end of sequence
                token = 256 if said else ord(text) - 33 if len(text) == 1 and "!" < text < "\x7f" else 0
                rows.append((request.id | sample, token, -0.1 if sample == self.likeliest else -0.5, finish, text))
            self._running[request.id] = (request, count + 1)
            if last:
                del self._running[request.id]
        self._send(rows, top, prompt, started, ended)

    def _stop_at(self, request: GenerateRequest, count: int) -> None:
        """A token of a text that ends with the stop string."""
        assert isinstance(self.says, str) and self.stops is not None and self.says.endswith(self.stops)
        held = count >= len(self.says) - len(self.stops)
        last = count + 1 == len(self.says)
        text = self.stops if last else "" if held else self.says[count]
        if last and not request.sampling.include_stop_str_in_output:
            text = ""
        self._running[request.id] = (request, count + 1)
        if last:
            del self._running[request.id]
        self._send([(request.id, 64, -0.5, Finish.STOP if last else Finish.NONE, text)])

    def _prompt_logprobs(self, request: GenerateRequest, sample: int) -> PromptLogprobs:
        k, scored = request.sampling.prompt_logprobs, len(request.prompt_ids) // 4 - 1
        return PromptLogprobs(
            request.id | sample,
            1,
            pack([-1.0] * scored, "float32"),
            pack(list(range(k)) * scored, "int32"),
            pack([-2.0] * k * scored, "float32"),
        )

    def _send(self, rows=(), top=(), prompt=(), started=(), ended=()) -> None:
        ids, tokens, logprobs, finishes, texts = zip(*rows) if rows else ((), (), (), (), ())
        self._front.send(
            TextBatch(
                pack(ids, "int64"), pack(tokens, "int32"), pack(logprobs, "float32"), pack(finishes, "uint8"),
                list(top), list(prompt), list(started), list(ended), time.monotonic(), list(texts),
            )
        )  # fmt: skip

    def prompt(self, index: int = -1) -> list[int]:
        return unpack(self.requests[index].prompt_ids, "int32").tolist()


class LauncherEnd:
    """The front's `Child`, with the launcher's commands coming out of a queue."""

    def __init__(self, config: dict[str, Any]):
        self.name = "lightllm-http0"
        self.config = config
        self.control_fd, self._write = os.pipe()
        self._commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self.is_ready = threading.Event()

    def command(self, message: dict[str, Any]) -> None:
        self._commands.put(json.loads(json.dumps(message)))
        os.write(self._write, b"x")

    def receive(self) -> dict[str, Any]:
        os.read(self.control_fd, 1)
        return self._commands.get()

    def ready(self, info: dict[str, Any] | None = None) -> None:
        self.is_ready.set()


class Front:
    """A real front on a real port, in a thread of its own."""

    def __init__(self, socket_dir: str, tokenizer: Tokenizer, **flags: Any):
        self.tokenizer = tokenizer
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.args = ServerArgs(**{"model_dir": "/models/scripted", "model_name": "scripted"} | flags)
        config = dict(args=asdict(self.args), socket_dir=socket_dir, index=0, listen_fd=listener.detach())
        self.launcher = LauncherEnd(config)
        self.thread = threading.Thread(
            target=lambda: uvloop.run(api_http._serve(self.launcher, self.args, tokenizer))  # type: ignore[arg-type]
        )
        self.thread.start()
        self.launcher.command({"engine": ENGINE})
        assert self.launcher.is_ready.wait(30)
        self.launcher.command({"serve": True})

    def close(self) -> None:
        if self.thread.is_alive():
            self.launcher.command({"drain": 0})
            self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def serving(tokenizer: Tokenizer, **flags: Any) -> Iterator[tuple[Front, ScriptedEngine]]:
    with tempfile.TemporaryDirectory(prefix="front") as socket_dir:
        engine = ScriptedEngine(socket_dir)
        try:
            front = Front(socket_dir, tokenizer, max_body_size=20, **flags)
            yield front, engine
            front.close()
        finally:
            engine.close()


def connect(front: Front, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent its request and read nothing."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", front.port))
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection
