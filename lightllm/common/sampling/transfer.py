"""Host arrays to the device and back without waiting."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`; on a GPU copied through pinned memory behind the work queued before it.

    torch's pinned-memory cache hands a block out again only after the copies from it are done, so that the caller may
    forget it at once. On a CPU the tensor shares the array's memory.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return host
    pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
    pinned.copy_(host)
    return pinned.to(device, non_blocking=True)
