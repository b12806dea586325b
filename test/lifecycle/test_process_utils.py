"""Child processes: what launcher and child tell each other, and that no child outlives its launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.server import alive, until

from lightllm.utils.process_utils import ChildProcess, Children, Event

HERE = Path(__file__).parent
PATIENCE = 60.0


def spawn(children: Children, target: str, **config: Any) -> ChildProcess:
    return children.spawn(f"t-{target}", f"children:{target}", config)


def next_events(children: Children, kind: str, count: int = 1) -> list[Event]:
    """Until `count` events of this kind; gives all that came."""
    events: list[Event] = []
    deadline = time.monotonic() + PATIENCE
    while sum(event.kind == kind for event in events) < count:
        new = children.events(max(0, deadline - time.monotonic()))
        assert new or time.monotonic() < deadline, f"no {kind} within {PATIENCE} s, only {events}"
        assert not any(isinstance(event, signal.Signals) for event in new), new
        events += [event for event in new if isinstance(event, Event)]
    return events


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def pid_of(child: ChildProcess) -> int:
    return int(Path(f"/proc/self/fdinfo/{child.pid_fd}").read_text().partition("Pid:")[2].split()[0])


def test_config_ready_and_commands_in_order(children: Children) -> None:
    config = {"args": {"port": 8000, "eos_id": [1, 2]}, "text": 'ü \n "quoted"'}
    child = spawn(children, "echo", **config)
    (ready,) = next_events(children, "ready")
    assert ready.child is child and ready.value == {"config": config, "name": "t-echo"}
    assert comm(pid_of(child)) == "t-echo"
    for number in range(2000):
        child.send({"number": number, "padding": "x" * 100})
    told = next_events(children, "progress", 2000)
    assert [event.value[0] for event in told] == list(range(2000))
    child.send({"stop": True})
    assert next_events(children, "exited")[-1].value == 0
    assert not children.running


def test_a_name_is_cut_to_what_the_kernel_keeps(children: Children) -> None:
    child = children.spawn("a-name-of-20-letters", "children:listens", {})
    next_events(children, "ready")
    assert comm(pid_of(child)) == "a-name-of-20-le"


def test_progress_comes_before_ready(children: Children) -> None:
    spawn(children, "steps")
    events = next_events(children, "ready")
    assert [event.kind for event in events] == ["progress"] * 100 + ["ready"]
    assert [event.value for event in events[:-1]] == [[done, 100, "loading"] for done in range(1, 101)]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("children:fails", "no such weights"),
        ("children:fails_in_a_thread", "the device is gone"),
        ("children:raises", "ValueError: a bad\nshape"),
        ("children:no_such_function", "AttributeError"),
        ("no_such_module:main", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_failure_is_told_before_the_exit(children: Children, target: str, reason: str) -> None:
    child = children.spawn("t-fails", target, {})
    failed, exited = next_events(children, "exited")
    assert (failed.child, failed.kind, exited.kind, exited.value) == (child, "failed", "exited", 1)
    assert reason in failed.value


def test_exit_status(children: Children) -> None:
    spawn(children, "leaves")
    assert [(event.kind, event.value) for event in next_events(children, "exited")] == [("ready", {}), ("exited", 0)]
    killed = spawn(children, "sleeps")
    next_events(children, "ready")
    killed.kill()
    assert next_events(children, "exited")[-1].value == -signal.SIGKILL


def test_a_command_to_a_dead_child_is_lost(children: Children) -> None:
    child = spawn(children, "sleeps")
    next_events(children, "ready")
    child.kill()
    until(lambda: not alive(pid_of(child)))
    for _ in range(3):
        child.send({"stop": True})
    next_events(children, "exited")


def test_many_children_at_once(children: Children) -> None:
    every = {spawn(children, "echo", number=number) for number in range(4)}
    ready = next_events(children, "ready", 4)
    assert {event.child for event in ready} == every
    for child in every:
        child.send({"stop": True})
    assert [event.value for event in next_events(children, "exited", 4)] == [0] * 4


def test_signals_are_the_launchers(children: Children) -> None:
    """A child ignores them, also when a service manager sends them to every process."""
    child = spawn(children, "echo")
    next_events(children, "ready")
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid_of(child), number)
        os.kill(os.getpid(), number)
        assert children.events(PATIENCE) == [number]
    child.send({"number": 7})
    assert next_events(children, "progress")[-1].value[0] == 7


def test_libraries_cannot_read_the_commands(children: Children) -> None:
    child = spawn(children, "reads_stdin")
    child.send({"number": 3})
    ready, heard = next_events(children, "progress")
    assert ready.value == {"taken": "", "own": ""} and heard.value[0] == 3


def test_kill_all_takes_what_a_child_has_started(children: Children) -> None:
    spawn(children, "has_a_grandchild")
    (ready,) = next_events(children, "ready")
    assert alive(ready.value["grandchild"])
    children.kill_all()
    until(lambda: not alive(ready.value["grandchild"]))


def test_waiting_ends_at_the_timeout(children: Children) -> None:
    spawn(children, "sleeps")
    next_events(children, "ready")
    start = time.monotonic()
    assert children.events(0.2) == []
    assert time.monotonic() - start >= 0.19


def test_no_child_outlives_its_launcher(tmp_path: Path) -> None:
    """Whatever it is doing; and the socket directory goes with them."""
    socket_dir = tmp_path / "sockets"
    socket_dir.mkdir()
    (socket_dir / "router").touch()
    targets = ["sleeps", "listens", "computes", "computes_elsewhere", "echo"]
    launcher = subprocess.Popen(
        [sys.executable, HERE / "children.py", socket_dir, *targets], stdout=subprocess.PIPE, text=True
    )
    try:
        assert launcher.stdout is not None
        pids = [int(line) for line in iter(launcher.stdout.readline, "ready\n")]
        assert len(pids) == len(targets)
        names = {comm(pid) for pid in pids}
        assert names == {f"t-{target}"[:15] for target in targets}
        assert all(alive(pid) for pid in pids)
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: not any(alive(pid) for pid in pids))
    assert not socket_dir.exists()
