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


def dependent_launch(x: torch.Tensor, small: bool = False) -> dict[str, int]:
    """Launch options of a kernel that works on the lines of x.

    With one line it is set up early, and so is the kernel behind it. With more lines, kernels that were set up early
    gather where the running one has left room, which makes them 10 % slower (16 lines, H200): only a `small` kernel,
    which leaves room everywhere, lets the next one be set up, and only one that asks with `early_launch` is.

    Such a kernel has a constexpr PDL, and each of its programs calls `wait_for_inputs(PDL)` before it reads anything
    but weights and before it writes.
    """
    if not x.is_cuda or not _supported(x.device):
        return {"PDL": 0}
    if len(x) == 1:
        return {"PDL": 2, "launch_pdl": True}
    return {"PDL": 1 if small else 0}


def early_launch(x: torch.Tensor) -> dict[str, int]:
    """Launch options of a kernel that is set up early, with any number of lines, but not the one behind it. It has a
    constexpr PDL and calls `wait_only(PDL)`."""
    if not x.is_cuda or not _supported(x.device):
        return {"PDL": 0}
    return {"PDL": 2, "launch_pdl": True}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL > 0:
        gdc_launch_dependents()
    wait_only(PDL)


@triton.jit
def wait_only(PDL: tl.constexpr):
    if PDL > 1:
        gdc_wait()
