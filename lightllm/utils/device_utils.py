"""The device a worker runs on, behind one face: where it is, how much memory it has left, when it is done."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Platform:
    """One rank's device. `name` is for people; `dist_backend` joins its ranks."""

    device: torch.device
    name: str
    dist_backend: str

    @staticmethod
    def detect(device: str, local_rank: int = 0) -> Platform:
        """`device` is auto, cuda or cpu; rank r takes GPU r. Raises ValueError if that GPU does not exist."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            return Platform(torch.device("cpu"), "CPU", "gloo")
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise ValueError(f"rank {local_rank} needs GPU {local_rank}, but {count} GPUs are visible")
        torch.cuda.set_device(local_rank)
        return Platform(torch.device("cuda", local_rank), torch.cuda.get_device_name(local_rank), "nccl")

    def free_memory(self) -> int:
        """Bytes that can still be allocated; on a CPU what the host and this process's control group leave."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return min(_host_available_memory(), _cgroup_available_memory())

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _host_available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available_memory() -> int:
    root = Path("/sys/fs/cgroup")
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return int((root / limit).read_text()) - int((root / usage).read_text())
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return 1 << 62
