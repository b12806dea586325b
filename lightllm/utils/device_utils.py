"""The device a worker runs on, behind one face: where it is and how much memory it has left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

UNLIMITED = 1 << 62  # bytes


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

    @property
    def has_float8(self) -> bool:
        """Whether kernels may use float8_e4m3fn; on a CPU torch has it."""
        if self.device.type == "cpu":
            return True
        return torch.version.hip is None and torch.cuda.get_device_capability(self.device) >= (8, 9)

    def free_memory(self) -> int:
        """Bytes that can still be allocated; on a CPU what the host and this process's control group leave."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return min(_host_available_memory(), _cgroup_available_memory())

    @property
    def gpu_memory(self) -> int:
        """Bytes that the GPU has; 0 for a CPU."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.device.type == "cuda" else 0


def _host_available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _cgroup_available_memory() -> int:
    """What the limits of this process's control group and of those above it leave.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files, and cgroup-v1/memory.html
    """
    left = UNLIMITED
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = Path("/sys/fs/cgroup/memory")
        else:
            continue
        group = root / path.strip("/")
        for level in (group, *group.parents):
            if level.is_relative_to(root):
                left = min(left, _left_in(level, *files))
    return left


def _left_in(group: Path, limit: str, usage: str, file_cache: str) -> int:
    """Bytes; file cache that is not in use is given back when memory is short."""
    try:
        unused = int((group / limit).read_text()) - int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or the word "max"
        return UNLIMITED
    return max(0, unused + int(stat.get(file_cache, 0)))
