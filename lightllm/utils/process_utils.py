"""How the launcher starts, commands and watches its child processes.

A child is `python -m lightllm.utils.process_utils NAME MODULE:FUNCTION STATUS_FD`. Its standard input is the control
pipe: JSON lines from the launcher, the first of them the configuration, and end-of-file when the launcher has died. The
status pipe carries JSON lines back: progress, ready, failed. Nothing polls: both ends sleep on descriptors.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import queue
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from lightllm.utils.start_refused import StartRefused

MAX_NAME = 15  # characters that the kernel keeps of a process name


class Child:
    """The launcher as its child sees it: configuration and commands in, progress and readiness out."""

    def __init__(self, name: str, control: int, status: int):
        self.name = name
        os.set_inheritable(status, False)
        self._status = os.fdopen(status, "w", buffering=1)
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.control_fd, self._arrived = os.pipe()
        self.config: dict[str, Any] = {}
        configured = threading.Event()
        reader = threading.Thread(target=self._read_control, args=(control, configured), name="control", daemon=True)
        reader.start()
        configured.wait()

    def _read_control(self, control: int, configured: threading.Event) -> None:
        # A thread of its own, so that the process also ends while the main thread computes.
        with os.fdopen(control) as lines:
            self.config = json.loads(lines.readline() or "{}")
            configured.set()
            for line in lines:
                self._messages.put(json.loads(line))
                os.write(self._arrived, b"\0")
        if socket_dir := self.config.get("socket_dir"):
            shutil.rmtree(socket_dir, ignore_errors=True)
        os._exit(1)

    def receive(self) -> dict[str, Any]:
        """The next command; waits for it. `control_fd` is readable while commands wait."""
        os.read(self.control_fd, 1)
        return self._messages.get()

    def progress(self, done: float, total: float, what: str) -> None:
        self._tell(progress=[done, total, what])

    def ready(self, info: dict[str, Any] | None = None) -> None:
        self._tell(ready=info or {})

    def fail(self, reason: str) -> NoReturn:
        """Tells the launcher why this process ends, and ends it; from any thread."""
        self._tell(failed=reason)
        sys.stderr.flush()
        os._exit(1)

    def _tell(self, **message: Any) -> None:
        with suppress(BrokenPipeError):  # a dead launcher is noticed by the control thread
            self._status.write(json.dumps(message) + "\n")


def set_process_name(name: str) -> None:
    """The name that `ps -e` and `top` show."""
    with suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name[:MAX_NAME])


def run_child(name: str, target: str, status_fd: int) -> None:
    """Runs `module:function` with a Child and ends the process; an exception that it lets through is its failure."""
    set_process_name(name)
    # When a service manager sends them to every process, the launcher alone acts on them: it drains, then says stop.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = Child(name, _take_stdin(), status_fd)
    module, _, function = target.partition(":")
    try:
        getattr(importlib.import_module(module), function)(child)
    except StartRefused as error:
        child.fail(str(error))
    except BaseException as error:
        traceback.print_exc()
        child.fail(f"{type(error).__name__}: {error}")
    atexit._run_exitfuncs()  # last messages and log lines get out
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's clean-up, which takes seconds with a model loaded and in which libraries complain.
    os._exit(0)


def _take_stdin() -> int:
    """The descriptor of standard input, of which neither libraries nor their subprocesses can read any more."""
    control = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control


@dataclass(frozen=True)
class Event:
    """Something a child told or did. `kind` is progress, ready, failed or exited; `value` what came with it."""

    child: ChildProcess
    kind: str
    value: Any


class ChildProcess:
    """A child as its launcher sees it."""

    def __init__(
        self,
        name: str,
        target: str,
        config: dict[str, Any],
        pass_fds: Iterable[int] = (),
        env: dict[str, str] | None = None,
    ):
        self.name = name
        self.status_fd, status = os.pipe()
        self._partial = b""
        command = [sys.executable, "-m", "lightllm.utils.process_utils", name, target, str(status)]
        # A session of its own: Ctrl-C in the terminal reaches the launcher alone, which then drains.
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            pass_fds=(status, *pass_fds),
            start_new_session=True,
            env=os.environ | (env or {}),
        )
        os.close(status)
        self.pid_fd = os.pidfd_open(self._process.pid)
        self.send(config)

    def send(self, message: dict[str, Any]) -> None:
        """A command; lost if the child is dead, which is told by its exit."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def read_status(self) -> Iterator[Event]:
        """What the child has told; `closed` once it can tell no more."""
        data = os.read(self.status_fd, 1 << 16)
        if not data:
            yield Event(self, "closed", None)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            for kind, value in json.loads(line).items():
                yield Event(self, kind, value)

    def exit_status(self) -> int:
        """Waits for the end of a child that has exited; negative for a signal."""
        return self._process.wait()

    def kill(self) -> None:
        """It and what it has started; nothing happens if all of that has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Children:
    """All children of a launcher, and the signals that it was sent, as one stream of events."""

    def __init__(self) -> None:
        self.running: set[ChildProcess] = set()
        self._selector = selectors.DefaultSelector()
        self._signal_fd, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self._selector.register(self._signal_fd, selectors.EVENT_READ)

    def spawn(self, name: str, target: str, config: dict[str, Any], **more: Any) -> ChildProcess:
        """Starts a ChildProcess, of whose arguments these are, and watches it."""
        child = ChildProcess(name, target, config, **more)
        self.running.add(child)
        os.set_blocking(child.status_fd, False)
        self._selector.register(child.status_fd, selectors.EVENT_READ, child)
        self._selector.register(child.pid_fd, selectors.EVENT_READ, child)
        return child

    def events(self, timeout: float | None = None) -> list[Event | signal.Signals]:
        """Sleeps until something happens, which may be no event, or for `timeout` seconds.

        The last words of a child come before its exit.
        """
        events: list[Event | signal.Signals] = []
        for key, _ in self._selector.select(timeout):
            child = key.data
            if child is None:
                events.extend(signal.Signals(number) for number in os.read(self._signal_fd, 64))
            elif key.fd == child.status_fd and child in self.running:
                events.extend(self._status_of(child))
            elif key.fd == child.pid_fd:
                events.extend(self._status_of(child))
                events.append(self._reap(child))
        return events

    def _status_of(self, child: ChildProcess) -> Iterator[Event]:
        with suppress(BlockingIOError):
            for event in child.read_status():
                if event.kind == "closed":
                    self._forget(child.status_fd)
                else:
                    yield event

    def _reap(self, child: ChildProcess) -> Event:
        for fd in (child.status_fd, child.pid_fd):
            self._forget(fd)
            os.close(fd)
        self.running.remove(child)
        return Event(child, "exited", child.exit_status())

    def _forget(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def kill_all(self, timeout: float = 5) -> None:
        """Kills them and waits until they have gone, at most `timeout` seconds."""
        for child in self.running:
            child.kill()
        deadline = time.monotonic() + timeout
        while self.running and (left := deadline - time.monotonic()) > 0:
            self.events(left)


if __name__ == "__main__":
    run_child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
