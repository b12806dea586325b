"""Tables of tuned kernel configurations, one file per kernel and GPU model: shipped ones in common/all_kernel_configs,
those that were found here in the cache folder, whatever state that is in."""

import functools
import json
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightllm.utils.cache_dir import cache_dir
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)

_SHIPPED = Path(__file__).parents[1] / "all_kernel_configs"

_unkept: defaultdict[tuple[str, str], dict[str, Any]] = defaultdict(dict)  # by kernel and GPU: found, not written


def _cached(kernel: str, file_name: str) -> Path:
    return cache_dir() / "kernels" / kernel / file_name


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _found(kernel: str, file_name: str) -> dict[str, Any]:
    """Of earlier starts; a file that cannot be read counts as none."""
    try:
        return _read(_cached(kernel, file_name))
    except (OSError, ValueError) as error:
        logger.warning("what was found for %s on this GPU cannot be read: %s", kernel, error)
        return {}


def _file_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device).replace(" ", "_") + ".json"


@functools.cache
def kernel_table(kernel: str, device: torch.device) -> dict[str, Any]:
    """What is known for the kernel on this model of GPU; empty if it was never tuned there."""
    file_name = _file_name(device)
    return _found(kernel, file_name) | _unkept[kernel, file_name] | _read(_SHIPPED / kernel / file_name)


def add_to_kernel_table(kernel: str, device: torch.device, entries: dict[str, Any]) -> None:
    """Keeps entries for this and later processes, for this one alone where the cache folder cannot be written; what
    another process added meanwhile stays."""
    file_name = _file_name(device)
    try:
        _write(_cached(kernel, file_name), _found(kernel, file_name) | entries)
    except OSError as error:
        logger.warning("what was found for %s on this GPU is not kept: %s", kernel, error)
        _unkept[kernel, file_name] |= entries
    kernel_table.cache_clear()


def _write(path: Path, table: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        making.write_text(json.dumps(table, indent=1))
        making.replace(path)
    except OSError:
        with suppress(OSError):
            making.unlink()
        raise
