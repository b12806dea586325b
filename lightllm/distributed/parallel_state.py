"""ParallelState: which rank of a tensor-parallel group this process is. Passed to whoever needs it, never global."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class ParallelState:
    rank: int = 0
    size: int = 1
    group: Any = None  # ProcessGroupGloo or ProcessGroupNCCL, whose type stubs know no methods
    ep_moe: bool = False  # ranks hold some experts whole instead of a part of each

    @classmethod
    def init(cls, rank: int, size: int, backend: str, init_file: str | Path, ep_moe: bool = False) -> ParallelState:
        """Join `size` ranks of one node that meet through `init_file` (made by the first; a path nobody used before).

        backend is "gloo" or "nccl" (the process's current CUDA device). Blocks until all ranks are there.
        """
        if size == 1:
            return cls(ep_moe=ep_moe)
        store = dist.PrefixStore("tp", dist.FileStore(str(init_file), size))
        return cls(rank, size, _GROUPS[backend](store, rank, size), ep_moe)

    def share(self, total: int) -> int:
        """This rank's part of `total` items that divide evenly."""
        assert total % self.size == 0
        return total // self.size


def _gloo(store: dist.Store, rank: int, size: int) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _COLLECTIVE_TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # listen on loopback only
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int) -> dist.ProcessGroupNCCL:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _COLLECTIVE_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)


_GROUPS = {"gloo": _gloo, "nccl": _nccl}
