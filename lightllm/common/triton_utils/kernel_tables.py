"""Tables of tuned kernel configurations, one file per kernel and GPU model: shipped ones in common/all_kernel_configs,
those that were found here in the cache folder."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch

from lightllm.utils.cache_dir import cache_dir

_SHIPPED = Path(__file__).parents[1] / "all_kernel_configs"


def _found(kernel: str) -> Path:
    return cache_dir() / "kernels" / kernel


def _read(folder: Path, device: torch.device) -> dict[str, Any]:
    path = folder / _file_name(device)
    return json.loads(path.read_text()) if path.exists() else {}


def _file_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device).replace(" ", "_") + ".json"


@functools.cache
def kernel_table(kernel: str, device: torch.device) -> dict[str, Any]:
    """What is known for the kernel on this model of GPU; empty if it was never tuned there."""
    return _read(_found(kernel), device) | _read(_SHIPPED / kernel, device)


def add_to_kernel_table(kernel: str, device: torch.device, entries: dict[str, Any]) -> None:
    """Keeps entries for this and later processes; what another process added meanwhile stays."""
    path = _found(kernel) / _file_name(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_name(f".{path.name}.{os.getpid()}")
    making.write_text(json.dumps(_read(path.parent, device) | entries, indent=1))
    making.replace(path)
    kernel_table.cache_clear()
