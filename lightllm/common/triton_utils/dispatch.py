"""One name for an operation that exists twice: a torch twin (specification and CPU path) and a Triton kernel."""

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """A callable that runs its Triton launcher on CUDA/ROCm tensors and its torch twin everywhere else.

    It has the twin's signature. `twin` and `launcher` are public so that tests can compare one with the other. The
    first argument of every op is a tensor; its device decides.
    """

    def __init__(self, twin: Callable[P, R]) -> None:
        functools.update_wrapper(self, twin)
        self.twin = twin
        self.launcher: Callable[..., R] | None = None

    def kernel(self, launcher: Callable[..., R]) -> Callable[..., R]:
        """Decorator: register `launcher`, which takes the same arguments as the twin, for GPU tensors."""
        self.launcher = launcher
        return launcher

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if first.is_cuda:
            assert self.launcher is not None, f"{self.twin.__name__} has no kernel"
            return self.launcher(*args, **kwargs)
        return self.twin(*args, **kwargs)


op = Op
