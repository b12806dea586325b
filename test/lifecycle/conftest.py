import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightllm.utils.process_utils import Children

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def import_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes find `children` and lightllm, whatever their working directory."""
    path = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.fixture
def children() -> Iterator[Children]:
    """This process as a launcher; its signal handlers come back after the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    wakeup = signal.set_wakeup_fd(-1)
    launcher = Children()
    yield launcher
    launcher.kill_all(timeout=30)
    assert not launcher.running
    signal.set_wakeup_fd(wakeup)
    for number, handler in handlers.items():
        signal.signal(number, handler)
