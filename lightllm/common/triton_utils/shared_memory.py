"""How much shared memory a program may have: what bounds the tiles and the stages of a kernel."""

import functools

import torch

SMALLEST = 64 << 10  # of the GPUs that we know


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes; of a device that is not here, those of the smallest GPU."""
    if device.type != "cuda":
        return SMALLEST
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SMALLEST)
