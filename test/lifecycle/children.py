"""What the processes of these tests run: children of every behaviour, and a launcher that can be killed."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

from lightllm.server.core.channel import Outbox
from lightllm.server.core.messages import AbortRequest
from lightllm.utils.process_utils import Child, Children


def echo(child: Child) -> None:
    """Says what it was told until it is told to stop."""
    child.ready({"config": child.config, "name": child.name})
    while "stop" not in (message := child.receive()):
        child.progress(message["number"], 0, "echo")


def steps(child: Child) -> None:
    for done in range(1, 101):
        child.progress(done, 100, "loading")
    child.ready()
    child.receive()


def fails(child: Child) -> None:
    child.fail("no such weights")


def fails_in_a_thread(child: Child) -> None:
    threading.Thread(target=child.fail, args=["the device is gone"]).start()
    while True:
        time.sleep(3600)


def raises(child: Child) -> None:
    raise ValueError("a bad\nshape")


def leaves(child: Child) -> None:
    child.ready()


def reads_stdin(child: Child) -> None:
    """A subprocess that reads standard input must find nothing and take nothing."""
    taken = subprocess.run(["cat"], capture_output=True, check=True).stdout
    child.ready({"taken": taken.decode(), "own": sys.stdin.read()})
    child.progress(child.receive()["number"], 0, "still heard")
    child.receive()


def has_a_grandchild(child: Child) -> None:
    grandchild = subprocess.Popen(["sleep", "3600"])
    child.ready({"grandchild": grandchild.pid})
    child.receive()


def sleeps(child: Child) -> None:
    child.ready()
    time.sleep(3600)


def listens(child: Child) -> None:
    child.ready()
    child.receive()


def computes(child: Child) -> None:
    child.ready()
    while True:
        sum(range(1000))


def computes_elsewhere(child: Child) -> None:
    """In C code that keeps the interpreter's lock for seconds at a time."""
    child.ready()
    while True:
        re.match(r"(a+)+$", "a" * 24 + "b")


def says_goodbye(child: Child) -> None:
    """Sends many messages and ends at once."""
    outbox = Outbox(child.config["socket_dir"], "inbox")
    for i in range(child.config["count"]):
        outbox.send(AbortRequest(i))


def launcher(socket_dir: str, *targets: str) -> None:
    """Starts a child for each target, prints their process ids when all are ready, and waits."""
    children = Children()
    for target in targets:
        children.spawn(f"t-{target}", f"children:{target}", {"socket_dir": socket_dir})
    ready = 0
    while ready < len(targets):
        ready += sum(not isinstance(event, signal.Signals) and event.kind == "ready" for event in children.events())
    own = str(os.getpid())
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[1] == own:
                    print(pid)
        except OSError:
            continue
    print("ready", flush=True)
    while True:
        children.events()


if __name__ == "__main__":
    launcher(*sys.argv[1:])
