"""Programmatic dependent launch: a kernel is set up, and may fetch weights, while the kernel before it still runs."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def _supported(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(x: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel that works on the lines of x: used for one line; with more lines kernels are so long
    that setting the next one up early takes room from the running one (10 % slower at 16 lines on an H200).

    Such a kernel has a constexpr PDL, and each of its programs calls `wait_for_inputs(PDL)` before it reads anything
    but weights and before it writes.
    """
    if x.is_cuda and len(x) == 1 and _supported(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
