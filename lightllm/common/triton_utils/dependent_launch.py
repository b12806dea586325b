"""Programmatic dependent launch: a kernel is set up, and may fetch weights, while the kernel before it still runs."""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LETS_NEXT, WAITS, BESIDE = 1, 2, 4  # bits of PDL
EARLY_LINES = 512  # up to so many kernels are set up early; with more, they are so long that it does not show


@functools.cache
def _supported(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(x: torch.Tensor, most_lines: int = 1, beside: bool = False) -> dict[str, int]:
    """Launch options of a kernel that works on the lines of x.

    With up to most_lines it is set up while the kernel before it still runs, and lets the next one be set up. That is
    not for kernels of which a multiprocessor holds several programs, all of them long: set up so early, these gather
    where the running one has left room (10 % slower at 16 lines on an H200).

    Such a kernel has a constexpr PDL, and each of its programs calls `wait_for_inputs(PDL)` before it reads anything
    but weights and before it writes.

    beside: the kernel before it was launched with `neighbour_launch` and computes something else, so that the two run
    at once. One program calls `wait_for_neighbour(PDL)` at its end, for the kernel behind to find both done.
    """
    early = len(x) <= most_lines
    if not x.is_cuda or not (beside or early) or not _supported(x.device):
        return {"PDL": 0}
    return {"PDL": (BESIDE if beside else WAITS) | (LETS_NEXT if early else 0), "launch_pdl": True}


def neighbour_launch(x: torch.Tensor) -> dict[str, int]:
    """Launch options of a kernel beside which the next may run. It is set up early, and each of its programs calls
    `wait_for_writes(PDL)` and only then `let_next_begin(PDL)`: when the next begins, all that was launched before the
    two has ended."""
    return {"PDL": LETS_NEXT | WAITS, "launch_pdl": True} if x.is_cuda and _supported(x.device) else {"PDL": 0}


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """The next kernel may be set up once every program is here. Programs that read older things before they wait call
    this first; those of `neighbour_launch` behind `wait_for_writes`."""
    if PDL & 1:
        gdc_launch_dependents()


@triton.jit
def wait_for_writes(PDL: tl.constexpr):
    """Until all that was launched before has ended, but for kernels beside this one."""
    if PDL & 2:
        gdc_wait()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    let_next_begin(PDL)
    wait_for_writes(PDL)


@triton.jit
def wait_for_neighbour(PDL: tl.constexpr):
    if PDL & 4:
        gdc_wait()
