"""A real server: the processes of `python -m lightllm.server.api_server`, started, asked and stopped from outside."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.checkpoints import Greedy, assert_same_tokens
from support.client import Answer, Client, EventsOf

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT = 180.0  # seconds
STOP_TIMEOUT = 60.0


class StartFailed(Exception):
    """The server ended before it was ready; `returncode` and `log` say how."""

    def __init__(self, returncode: int, log: str):
        super().__init__(f"exit code {returncode}:\n{log}")
        self.returncode = returncode
        self.log = log


class RunningServer(Client):
    """One server. It keeps its sockets in a TMPDIR of its own, which must be empty when it has ended."""

    def __init__(
        self,
        model_dir: Path | str | None,
        *flags: str,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        preexec: Callable[[], None] | None = None,
        key: str = "",
    ):
        self._reserved = None if port else reserve_port()
        super().__init__("127.0.0.1", port or self._reserved.getsockname()[1], key=key)
        self.model_dir = model_dir
        self.home = Path(tempfile.mkdtemp(prefix="llm", dir="/tmp"))  # short: a socket's path has 107 bytes
        self.tmp = self.home / "tmp"
        self.tmp.mkdir()
        self._log_path = self.home / "log"
        command = [sys.executable, "-m", "lightllm.server.api_server", "--port", str(self.port)]
        command += ["--model_dir", str(model_dir)] if model_dir else []
        environment = os.environ | {
            "TMPDIR": str(self.tmp),
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
        }

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs, the tests among them, ignore it
            if preexec is not None:
                preexec()

        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *flags], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self.home,
                env=environment | dict(env or {}), preexec_fn=prepare, start_new_session=True,
            )  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def wait_ready(self) -> RunningServer:
        """Raises StartFailed if it ends instead."""

        def ready() -> bool:
            if self.process.poll() is not None:
                log = self.log
                self.kill()
                raise StartFailed(self.process.returncode, log)
            return self.answers("/readiness")

        until(ready, START_TIMEOUT)
        return self

    def answers(self, path: str) -> bool:
        try:
            return self.get(path, timeout=10).status == 200
        except OSError:
            return False

    def generate(self, inputs: str | list[int] | tuple[int, ...], **parameters: Any) -> dict[str, Any]:
        answer = self.post("/generate", {"inputs": inputs, "parameters": parameters})
        assert answer.status == 200, answer.body
        return answer.json()

    def text(self, inputs: str | list[int] | tuple[int, ...], **parameters: Any) -> str:
        (text,) = self.generate(inputs, **parameters)["generated_text"]
        return text

    def ids(self, inputs: str | list[int] | tuple[int, ...], **parameters: Any) -> list[int]:
        return [token["id"] for token in self.generate(inputs, return_details=True, **parameters)["tokens"]]

    def start_stream(self, inputs: str | list[int] | tuple[int, ...], **parameters: Any) -> EventsOf:
        return self.open_stream({"inputs": inputs, "parameters": parameters})

    def stream(self, inputs: str | list[int] | tuple[int, ...], **parameters: Any) -> list[dict[str, Any]]:
        """All events of a stream that ends well, checked to be in order and complete."""
        with self.start_stream(inputs, **parameters) as stream:
            events = list(stream)
        for i, event in enumerate(events):
            last = i + 1 == len(events)
            assert event["finished"] is last, events
            assert (event["finish_reason"] is not None) is last, events
            assert event["token"]["count_output_tokens"] == i + 1, events
        assert events, "a stream without an event"
        return events

    def refusal(self, inputs: Any, status: int = 400, path: str = "/generate", **parameters: Any) -> dict[str, Any]:
        """The error of a request that must be refused, the same by both ways of asking; `message`, `param`..."""
        body = {"inputs": inputs, "parameters": parameters}
        answers = [self.post(path, body) for path in ("/generate", "/generate_stream")]
        for answer in answers:
            assert answer.status == status, (answer.status, answer.body)
        one, other = (answer.error() for answer in answers)
        assert one == other
        return one

    def load(self) -> dict[str, float]:
        answer = self.get("/token_load")
        assert answer.status == 200, answer.body
        return answer.json()

    def wait_idle(self) -> None:
        """Until nothing runs or waits and every KV slot is free."""
        until(lambda: not self.in_use())

    def in_use(self) -> bool:
        load = self.load()
        return bool(load["current_load"] or load["used_tokens"] or load["running"] or load["waiting"])

    def pids(self) -> dict[str, int]:
        """Process id of each descendant by its name in `ps`."""
        parents = processes_by_parent()
        found: dict[str, int] = {}
        todo = [self.process.pid]
        while todo:
            for pid, name in parents[todo.pop()]:
                found[name] = pid
                todo.append(pid)
        return found

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait_gone(self, pids: dict[str, int], timeout: float = STOP_TIMEOUT) -> int:
        """Exit code of the launcher once it and all its processes are gone and nothing of them is left."""
        code = self.process.wait(timeout)
        until(lambda: not any(alive(pid) for pid in pids.values()), timeout)
        left = [path.name for path in self.tmp.iterdir()]
        assert not left, f"left in the temporary directory: {left}"
        return code

    def stop(self) -> None:
        """SIGTERM; then nothing may be left and the exit code is 0."""
        try:
            pids, shared = self.pids(), self._shared_memory()
            self.signal()
            code = self.wait_gone(pids)
            assert code == 0, f"exit code {code}:\n{self.log}"
            assert not [path for path in shared if os.path.exists(path)], shared
        finally:
            self.kill()

    def _shared_memory(self) -> set[str]:
        """Files of /dev/shm that its processes map."""
        found = set()
        for pid in self.pids().values():
            with suppress(OSError):  # it has ended
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                found |= {line.split()[5] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
        return found

    def kill(self) -> None:
        """Removes what may be left after a test that failed."""
        pids = self.pids().values() if self.process.poll() is None else ()
        self.process.kill()
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT)
        if self._reserved is not None:
            self._reserved.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.process.poll() is None:
            self.stop()
        else:
            self.kill()


def start_server(model_dir: Path | str | None, *flags: str, **options: Any) -> RunningServer:
    """A server that is ready; raises StartFailed with its log if it ends instead."""
    server = RunningServer(model_dir, *flags, **options)
    try:
        return server.wait_ready()
    except BaseException:
        server.kill()
        raise


def failed_start(model_dir: Path | str | None, *flags: str, **options: Any) -> str:
    """The last lines of a server that must refuse to start: it says why, without a stack, ends non-zero and leaves
    nothing."""
    try:
        start_server(model_dir, *flags, **options).kill()
    except StartFailed as failed:
        assert failed.returncode > 0 and "Traceback" not in failed.log, failed
        return "\n".join(failed.log.splitlines()[-8:])
    raise AssertionError("the server started")


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["token"]["text"] for event in events)


def ids_of(events: list[dict[str, Any]]) -> list[int]:
    return [event["token"]["id"] for event in events]


def assert_greedy(server: RunningServer, expected: Greedy, stream: bool = False) -> None:
    """Asked for the most likely tokens, it gives those of the reference."""
    asked: Any = dict(do_sample=False, ignore_eos=True, max_new_tokens=len(expected.tokens))
    if stream:
        events = server.stream(expected.prompt, **asked)
        assert {event["token"]["prompt_tokens"] for event in events} == {len(expected.prompt)}
    assert_same_tokens(expected, ids_of(events) if stream else server.ids(expected.prompt, **asked))


def reserve_port() -> socket.socket:
    """Bound to a free port, which refuses connections and which nobody is given until this is closed, but for who asks
    for that port with SO_REUSEADDR, as servers do."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def processes_by_parent() -> defaultdict[int, list[tuple[int, str]]]:
    """Process id and name of the children of each process."""
    children: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            head, _, tail = stat.read_text().rpartition(")")
            pid, name = head.split(" (", 1)
            children[int(tail.split()[1])].append((int(pid), name))
    return children


def listening(pid: int) -> set[str]:
    """`address:port` in hex of the TCP sockets on which a process listens."""
    inodes = socket_inodes(pid)
    tables = (Path("/proc/net") / name for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()]
    return {line[1] for line in lines if line[3] == "0A" and line[9] in inodes}


def socket_inodes(pid: int) -> set[str]:
    """Of all sockets that a process has open."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it has been closed
            kind, _, inode = os.readlink(descriptor).partition(":")
            if kind == "socket":
                inodes.add(inode.strip("[]"))
    return inodes


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], Any], timeout: float = 120.0) -> None:
    """Waits for something that must come true."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def assert_refused(answer: Answer, status: int = 400) -> dict[str, Any]:
    assert answer.status == status, (answer.status, answer.body)
    return answer.error()
