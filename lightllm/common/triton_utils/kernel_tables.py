"""Tables of tuned kernel configurations, one file per kernel and GPU model, in common/all_kernel_configs."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(__file__).parents[1] / "all_kernel_configs"


@functools.cache
def kernel_table(kernel: str, device: torch.device) -> dict[str, Any]:
    """What was found for the kernel on this model of GPU; empty if it was never tuned there."""
    name = torch.cuda.get_device_name(device).replace(" ", "_")
    path = _FOLDER / kernel / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}
