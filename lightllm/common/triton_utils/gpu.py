"""What a GPU has, as far as kernels are chosen and cut by it."""

import functools

import torch

SMALLEST_SHARED_MEMORY = 64 << 10  # of the GPUs that we know


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether it runs kernels that are written for Hopper: for its copy engine and wgmma."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; of a device that is not here, those of the smallest GPU."""
    if device.type != "cuda":
        return SMALLEST_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", SMALLEST_SHARED_MEMORY)
