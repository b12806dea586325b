"""The launcher: starts the processes of one server, watches them, and ends them. One page.

    front ×N   lightllm-http0 …   HTTP
    router     lightllm-router    scheduling
    worker ×tp lightllm-tp0 …     the model
    detok      lightllm-detok     text

It returns the exit code: 0 after SIGTERM or SIGINT, 1 if a process failed.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from tqdm import tqdm

from lightllm.models.model_dir import resolve_model_dir, usual_model_name
from lightllm.server.core.server_args import ServerArgs
from lightllm.utils.cache_dir import can_be_written, temporary_caches
from lightllm.utils.log_utils import init_logger, set_log_level
from lightllm.utils.net_utils import PortTaken, bind
from lightllm.utils.process_utils import ChildProcess, Children, Event

logger = init_logger(__name__)

TELL_CLIENTS = 4.0  # seconds that fronts have to tell their clients that the engine failed
STOP_TIMEOUT = 5.0  # seconds that an idle process has to end
WORKER_ENV = {
    "GLOO_SOCKET_IFNAME": "lo",  # the ranks of one node meet over loopback and nowhere else
    "TOKENIZERS_PARALLELISM": "false",
    # OpenMP's threads wait for each other awake for milliseconds, which beside other processes costs tenfold time.
    "GOMP_SPINCOUNT": "10000",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # PeerMemory has no use for it
}


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
        if args.chat_template is not None and not os.path.exists(args.chat_template):
            raise ValueError(f"--chat_template {args.chat_template} does not exist")
        if args.profile_dir is not None and not can_be_written(os.path.abspath(args.profile_dir)):
            raise ValueError(f"--profile_dir {args.profile_dir} cannot be written")
    except (PortTaken, OSError, ValueError) as error:
        return _give_up(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    model_name = args.model_name or usual_model_name(args.model_dir)
    args = replace(args, port=listener.getsockname()[1], model_dir=str(model_dir), model_name=model_name)
    children = Children()
    socket_dir = _make_socket_dir()
    try:
        with listener:  # the fronts hold it then; once they close it the port refuses
            launcher = Launcher(args, socket_dir, listener.fileno(), children)
        launcher.run()
    except (ChildFailed, OSError) as failure:
        return _give_up(failure)
    finally:
        children.kill_all()
        shutil.rmtree(socket_dir, ignore_errors=True)
    return 0


def _make_socket_dir() -> str:
    """A new folder of mode 0700, not too deep: the path of a unix socket has at most 107 bytes."""
    home = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="lightllm-", dir=home if len(os.fsencode(home)) <= 75 else "/tmp")


def _give_up(cause: Exception) -> int:
    print(f"lightllm: {cause}", file=sys.stderr, flush=True)
    return 1


class Launcher:
    def __init__(self, args: ServerArgs, socket_dir: str, listen_fd: int, children: Children):
        self._args = args
        self._children = children
        self._failures: dict[ChildProcess, str] = {}
        self._bar: tqdm | None = None
        config = {"args": asdict(args), "socket_dir": socket_dir}
        worker = "lightllm.server.router.model_infer.worker:main"
        caches = temporary_caches(socket_dir)
        if caches:
            logger.info("nothing is kept for the next start, as this user cannot write there: %s", ", ".join(caches))
        self._workers = [
            children.spawn(f"lightllm-tp{rank}", worker, config | {"rank": rank}, env=WORKER_ENV | caches)
            for rank in range(args.tp)
        ]
        self._router = children.spawn("lightllm-router", "lightllm.server.router.manager:main", config)
        self._detokenizer = children.spawn("lightllm-detok", "lightllm.server.detokenization.manager:main", config)
        metrics_dir = os.path.join(socket_dir, "metrics")
        os.mkdir(metrics_dir)
        metrics = {"PROMETHEUS_MULTIPROC_DIR": metrics_dir}  # where prometheus-client keeps what fronts share
        self._fronts = [
            children.spawn(
                f"lightllm-http{index}",
                "lightllm.server.api_http:main",
                config | {"index": index, "listen_fd": listen_fd},
                pass_fds=(listen_fd,),
                env=metrics,
            )
            for index in range(args.httpserver_workers)
        ]
        self._open: list[ChildProcess] = []  # fronts that clients can reach
        self._ending: list[ChildProcess] = []  # children that may exit

    def run(self) -> None:
        """Returns when signals have ended the server; raises ChildFailed if one of its processes did."""
        try:
            self._start()
            self._watch()
            self._drain()
        except Stopped:  # while it started, or for the second time: at once
            return
        except ChildFailed as failure:
            self._tell_clients(str(failure))
            raise

    def _start(self) -> None:
        try:
            engine = self._until_ready(self._workers)[self._workers[0]]
        finally:
            if self._bar is not None:
                with suppress(OSError):
                    self._bar.close()
        others = [self._router, self._detokenizer, *self._fronts]
        for child in others:
            child.send({"engine": engine})
        self._until_ready(others)
        self._open = self._fronts
        for front in self._fronts:
            front.send({"serve": True})
        self._until_ready(self._fronts)
        host = f"[{self._args.host}]" if ":" in self._args.host else self._args.host
        url = f"http://{host}:{self._args.port}"
        logger.info(
            "%s is ready on %s; try: curl -s %s/generate -H 'Content-Type: application/json' "
            """-d '{"inputs": "Once upon a time", "parameters": {"max_new_tokens": 32}}'""",
            *(self._args.model_name, url, url),
        )

    def _watch(self) -> None:
        with suppress(Stopped):
            while True:
                self._next_events()

    def _drain(self) -> None:
        """No more connections; running requests have `drain_timeout` to end, then everything else ends."""
        logger.info("shutting down; running requests have %g s to end", self._args.drain_timeout)
        for front in self._fronts:
            front.send({"drain": self._args.drain_timeout})
        self._until_ended(self._fronts, self._args.drain_timeout + STOP_TIMEOUT)
        others = [*self._workers, self._router, self._detokenizer]
        for child in others:
            child.send({"stop": True})
        self._until_ended(others, STOP_TIMEOUT)

    def _tell_clients(self, reason: str) -> None:
        for front in self._open:
            front.send({"failed": reason})
        self._ending = list(self._children.running)
        with suppress(Stopped):
            self._until_ended(self._open, TELL_CLIENTS)

    def _until_ready(self, children: list[ChildProcess]) -> dict[ChildProcess, Any]:
        """Waits until each of the children has said ready; gives what they said with it."""
        ready: dict[ChildProcess, Any] = {}
        while len(ready) < len(children):
            for event in self._next_events():
                if event.kind == "ready" and event.child in children:
                    ready[event.child] = event.value
                elif event.kind == "progress" and event.child is self._workers[0]:
                    with suppress(OSError):  # a full disk takes no progress bar
                        self._show(*event.value)
        return ready

    def _until_ended(self, children: list[ChildProcess], timeout: float) -> None:
        """Waits until the children, which may exit now, have exited, at most `timeout` seconds."""
        self._ending = self._ending + children
        deadline = time.monotonic() + timeout
        while not self._children.running.isdisjoint(children) and (left := deadline - time.monotonic()) > 0:
            self._next_events(left)

    def _next_events(self, timeout: float | None = None) -> list[Event]:
        """Sleeps until something happens. Raises Stopped for a signal, ChildFailed if a child exits that may not."""
        events = []
        for event in self._children.events(timeout):
            if isinstance(event, signal.Signals):
                raise Stopped
            if event.kind == "failed":
                self._failures[event.child] = event.value
            elif event.kind == "exited" and event.child not in self._ending:
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
        if done == total:  # what follows has a time of its own
            self._bar.close()
            self._bar = None
