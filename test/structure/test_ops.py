"""Every operation's Triton launcher takes what its torch twin takes, by the same names and with the same defaults.

It may take more, which is then for those who tune it.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

from lightllm.common.basemodel import triton_kernel
from lightllm.common.triton_utils.dispatch import Op


def ops() -> Iterator[Op]:
    found = set()
    for module in pkgutil.iter_modules(triton_kernel.__path__, triton_kernel.__name__ + "."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Op) and value not in found:
                found.add(value)
                yield value


@pytest.mark.parametrize("op", list(ops()), ids=lambda op: op.twin.__name__)
def test_twin_and_launcher_take_the_same(op: Op) -> None:
    assert op.launcher is not None
    twin, launcher = (list(inspect.signature(f).parameters.values()) for f in (op.twin, op.launcher))
    for one, other in zip(twin, launcher):
        assert (one.name, one.kind) == (other.name, other.kind)
        assert other.default in (one.default, inspect.Parameter.empty)
    assert len(launcher) >= len(twin)
    assert all(more.default is not inspect.Parameter.empty for more in launcher[len(twin) :])
