"""The launcher: starts the processes of one server, watches them, and ends them. One page.

    front ×N   lightllm-http0 …   HTTP
    router     lightllm-router    scheduling
    worker ×tp lightllm-tp0 …     the model
    detok      lightllm-detok     text

It returns the exit code: 0 after SIGTERM or SIGINT, 1 if a process failed.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from dataclasses import asdict, replace
from typing import Any

from tqdm import tqdm

from lightllm.models.model_dir import resolve_model_dir
from lightllm.server.core.server_args import ServerArgs
from lightllm.utils.log_utils import init_logger, set_log_level
from lightllm.utils.net_utils import PortTaken, bind
from lightllm.utils.process_utils import ChildProcess, Children, Event

logger = init_logger(__name__)

TELL_CLIENTS = 4.0  # seconds that fronts have to tell their clients that the engine failed
STOP_TIMEOUT = 5.0  # seconds that an idle process has to end


class Stopped(Exception):
    """A signal asks the server to end."""


class ChildFailed(Exception):
    """A child ended that should run; the message says which and why."""


def serve(args: ServerArgs) -> int:
    """Runs a server until it is told to stop or a process of it fails; gives the exit code."""
    set_log_level(args.log_level)
    try:
        listener = bind(args.host, args.port)
        model_dir = resolve_model_dir(args.model_dir)
    except (PortTaken, OSError, ValueError) as error:
        return _give_up(error)
    model_name = args.model_name or model_dir.name
    args = replace(args, port=listener.getsockname()[1], model_dir=str(model_dir), model_name=model_name)
    # Short, since the path of a unix socket has at most 107 bytes; mkdtemp makes it with mode 0700.
    socket_dir = tempfile.mkdtemp(prefix="lightllm-")
    launcher = Launcher(args, socket_dir, listener.fileno())
    listener.close()  # the fronts hold it now; once they close it the port refuses
    try:
        return launcher.run()
    except ChildFailed as failure:
        return _give_up(failure)
    finally:
        launcher.children.kill_all()
        shutil.rmtree(socket_dir, ignore_errors=True)


def _give_up(cause: Exception) -> int:
    print(f"lightllm: {cause}", file=sys.stderr, flush=True)
    return 1


class Launcher:
    def __init__(self, args: ServerArgs, socket_dir: str, listen_fd: int):
        self.children = Children()
        self._args = args
        self._failures: dict[ChildProcess, str] = {}
        self._bar: tqdm | None = None
        config = {"args": asdict(args), "socket_dir": socket_dir}
        self._workers = [self._spawn_worker(rank, config) for rank in range(args.tp)]
        self._router = self.children.spawn("lightllm-router", "lightllm.server.router.manager:main", config)
        self._detokenizer = self.children.spawn("lightllm-detok", "lightllm.server.detokenization.manager:main", config)
        self._fronts = [
            self.children.spawn(
                f"lightllm-http{index}",
                "lightllm.server.api_http:main",
                config | {"index": index, "listen_fd": listen_fd},
                pass_fds=(listen_fd,),
            )
            for index in range(args.httpserver_workers)
        ]

    def _spawn_worker(self, rank: int, config: dict[str, Any]) -> ChildProcess:
        # The ranks of one node meet over loopback and nowhere else.
        env = {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
        worker = "lightllm.server.router.model_infer.worker:main"
        return self.children.spawn(f"lightllm-tp{rank}", worker, config | {"rank": rank}, env=env)

    def run(self) -> int:
        """Raises ChildFailed if a child fails before the server is ready."""
        try:
            self._start()
            self._watch()
        except Stopped:
            self._drain()
            return 0
        except ChildFailed as failure:
            self._tell_clients(str(failure))
            raise
        raise AssertionError("a watch ends by an exception")

    def _start(self) -> None:
        engine = self._until_ready(self._workers)[self._workers[0]]
        if self._bar is not None:
            self._bar.close()
        others = [self._router, self._detokenizer, *self._fronts]
        for child in others:
            child.send({"engine": engine})
        self._until_ready(others)
        for front in self._fronts:
            front.send({"serve": True})
        self._until_ready(self._fronts)
        url = f"http://{self._args.host}:{self._args.port}"
        logger.info(
            "%s is ready on %s; try: curl -s %s/generate -H 'Content-Type: application/json' "
            """-d '{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 32}}'""",
            *(self._args.model_name, url, url),
        )

    def _watch(self) -> None:
        while True:
            self._next_events()

    def _until_ready(self, children: list[ChildProcess]) -> dict[ChildProcess, Any]:
        """Waits until each of the children has said ready; gives what they said with it."""
        ready: dict[ChildProcess, Any] = {}
        while len(ready) < len(children):
            for event in self._next_events():
                if event.kind == "ready" and event.child in children:
                    ready[event.child] = event.value
                elif event.kind == "progress" and event.child is self._workers[0]:
                    self._show(*event.value)
        return ready

    def _next_events(self) -> list[Event]:
        """Sleeps until something happens. Raises Stopped for a signal, ChildFailed if a child has ended."""
        events = []
        for event in self.children.events():
            if isinstance(event, signal.Signals):
                raise Stopped
            if event.kind == "failed":
                self._failures[event.child] = event.value
            elif event.kind == "exited":
                status = f"exit status {event.value}" if event.value >= 0 else signal.Signals(-event.value).name
                raise ChildFailed(f"{event.child.name} ended: {self._failures.get(event.child, status)}")
            events.append(event)
        return events

    def _show(self, done: float, total: float, what: str) -> None:
        if self._bar is None:
            quiet = not sys.stderr.isatty()
            self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, mininterval=10 if quiet else 0.1)
        self._bar.set_description(what, refresh=False)
        self._bar.update(done - self._bar.n)

    def _drain(self) -> None:
        """No more connections; running requests have `drain_timeout` to end. A second signal ends it at once."""
        logger.info("shutting down; running requests have %g s to end", self._args.drain_timeout)
        for front in self._fronts:
            front.send({"drain": self._args.drain_timeout})
        self._wait_for(self._fronts, self._args.drain_timeout + STOP_TIMEOUT)
        for child in self.children.running:
            child.send({"stop": True})
        self.children.wait_all(STOP_TIMEOUT, until=lambda event: isinstance(event, signal.Signals))

    def _tell_clients(self, reason: str) -> None:
        for front in self._fronts:
            front.send({"failed": reason})
        self._wait_for(self._fronts, TELL_CLIENTS)

    def _wait_for(self, children: list[ChildProcess], timeout: float) -> None:
        """Until these children have ended, a signal comes, or the time is over."""

        def over(event: Event | signal.Signals) -> bool:
            return isinstance(event, signal.Signals) or not any(child in self.children.running for child in children)

        if any(child in self.children.running for child in children):
            self.children.wait_all(timeout, until=over)
