"""Which GPUs run kernels that are written for Hopper: for its copy engine and wgmma."""

import functools

import torch


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) == (9, 0)
