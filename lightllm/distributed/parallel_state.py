"""ParallelState: which rank of a tensor-parallel group this process is. Passed to whoever needs it, never global."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightllm.distributed.peer_memory import Boxes, PeerMemory, share_memory

_START_TIMEOUT = timedelta(minutes=30)  # ranks may load at different speeds


@dataclass
class Progress:
    """How far a rank has come, for `ParallelState.alike`."""

    collectives: int = 0  # launched one by one, not in CUDA graphs
    questions: int = 0


@dataclass(frozen=True)
class ParallelState:
    rank: int = 0
    size: int = 1
    group: Any = None  # ProcessGroupGloo or ProcessGroupNCCL, whose type stubs know no methods
    ep_moe: bool = False  # ranks hold some experts whole instead of a part of each
    store: dist.Store | None = None  # where the ranks meet
    peers: PeerMemory | None = None  # for sums on GPUs that reach each other's memory
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def init(cls, rank: int, size: int, backend: str, init_file: str | Path, ep_moe: bool = False) -> ParallelState:
        """Join `size` ranks of one node that meet through `init_file` (made by the first; a path nobody used before).
        backend is "gloo" or "nccl" (the process's current CUDA device). Blocks until all ranks are there."""
        if size == 1:
            return cls(ep_moe=ep_moe)
        store = dist.PrefixStore("tp", dist.FileStore(str(init_file), size))
        return cls(rank, size, _join(backend, store, rank, size), ep_moe, store)

    def share(self, total: int) -> int:
        """This rank's part of `total` items that divide evenly."""
        assert total % self.size == 0
        return total // self.size

    def with_peers(self, lines: int, width: int, dtype: torch.dtype, copied: int) -> ParallelState:
        """With memory for sums of `lines` x `width` elements and for copies of `copied` elements, if this is a group of
        GPUs that reach each other's."""
        if self.store is None or self.group.name() != "nccl":
            return self
        peers = share_memory(self.rank, self.size, self.group, self.store, lines, width, dtype, copied)
        return replace(self, peers=peers)

    @property
    def exchanges(self) -> bool:
        """Whether a product of few lines can add over these ranks itself, through `next_boxes`."""
        return self.size == 1 or (self.peers is not None and self.peers.boxes is not None)

    def next_boxes(self) -> Boxes | None:
        """Through which the next kernel exchanges a few lines with the other rank's; None if there is no other rank.
        All ranks ask for them in the same order."""
        if self.peers is None or self.peers.boxes is None:
            return None
        self.progress.collectives += 1
        return next(self.peers.boxes)

    def limit_waiting(self, seconds: float) -> None:
        """From now on a rank that keeps the others waiting for so long ends their collectives with an error."""
        if self.group is not None:
            self.group._set_default_timeout(timedelta(seconds=seconds))

    def alike(self, what: str, patience: float) -> bool:
        """Whether every rank asks this of the same `what`, behind as many collectives, within `patience` seconds.

        Ranks that agree wait for nothing of each other and can go on together.
        """
        if self.store is None:
            return True
        key, mine = f"alike/{self.progress.questions}", f"{self.progress.collectives} {what}"
        self.progress.questions += 1
        self.store.set(f"{key}/{self.rank}", mine)
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        try:
            self.store.wait(keys, timedelta(seconds=patience))
        except RuntimeError:  # in time not all came
            return False
        return all(self.store.get(key).decode() == mine for key in keys)


def _join(backend: str, store: dist.Store, rank: int, size: int) -> Any:
    if backend == "gloo":
        kind: Any = dist.ProcessGroupGloo  # torch's stubs lack its options
        options = kind._Options()
        options._devices = [kind.create_device(hostname="127.0.0.1")]  # listen on loopback only
    else:
        kind = dist.ProcessGroupNCCL
        options = kind.Options()
    options._timeout = _START_TIMEOUT
    return kind(store, rank, size, options)
