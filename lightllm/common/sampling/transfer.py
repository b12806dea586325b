"""Host arrays to the device and back without waiting."""

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`; on a GPU copied through pinned memory behind the work queued before it.

    torch's pinned-memory cache hands a block out again only after the copies from it are done, so that the caller may
    forget it at once. On a CPU the tensor shares the array's memory.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host if device.type == "cpu" else _pinned(host).to(device, non_blocking=True)


def copy_to(tensor: Tensor, array: np.ndarray) -> None:
    """Fills a tensor of the same shape and dtype, likewise."""
    host = torch.from_numpy(array)
    tensor.copy_(host if tensor.is_cpu else _pinned(host), non_blocking=True)


def _pinned(host: Tensor) -> Tensor:
    return torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
