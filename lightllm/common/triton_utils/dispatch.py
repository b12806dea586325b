"""One name for an operation that exists twice: a torch twin (specification and CPU path) and a Triton kernel."""

import functools
from collections.abc import Callable
from typing import Any


class Op:
    """A callable that runs its Triton launcher on CUDA/ROCm tensors and its torch twin everywhere else.

    `twin` and `launcher` are public so that tests can compare one with the other. The first argument of every op is
    a tensor; its device decides.
    """

    def __init__(self, twin: Callable[..., Any]) -> None:
        functools.update_wrapper(self, twin)
        self.twin = twin
        self.launcher: Callable[..., Any] | None = None

    def kernel(self, launcher: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: register `launcher`, which takes the same arguments as the twin, for GPU tensors."""
        self.launcher = launcher
        return launcher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args[0].is_cuda:
            assert self.launcher is not None, f"{self.twin.__name__} has no kernel"
            return self.launcher(*args, **kwargs)
        return self.twin(*args, **kwargs)


op = Op
