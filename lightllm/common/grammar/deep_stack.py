"""A stack that no form can fill, for libraries that recurse once for each level of it: an overflow ends the process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK = 512 << 20  # bytes, of which only those touched take memory; the deepest forms touch some 200 MiB

T = TypeVar("T")
_starting = threading.Lock()


def on_deep_stack(work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread of its own; raises what it raises, a panic of Rust as RuntimeError."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)
        except BaseException as panic:
            result.set_exception(RuntimeError(f"{type(panic).__name__}: {panic}"))

    with _starting:
        usual = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="deep stack", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return result.result()
