"""A few numbers to and from the host, by kernels: what comes behind the copy engine waits 5 us for it."""

import ctypes

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightllm.common.triton_utils.dispatch import op

ADDRESS = 2  # int32 that an address takes


@op
def fetch(numbers: Tensor, host: Tensor) -> None:
    """Fills numbers int32 [n] with host int32 [n]; from a GPU that lies in pinned memory, until the kernel has run."""
    numbers.copy_(host)


@op
def deliver(numbers: Tensor, address: Tensor) -> None:
    """Writes numbers int32, contiguous, to the host's memory at address int32 [ADDRESS], an int64, in pinned memory if
    numbers are on a GPU; nothing where that is 0."""
    if at := int(address.clone().view(torch.int64)):
        ctypes.memmove(at, numbers.data_ptr(), 4 * numbers.numel())


@triton.jit(do_not_specialize=["Numbers", "Host", "count"])
def _fetch_kernel(Numbers, Host, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Numbers + at, tl.load(Host + at, mask=at < count), mask=at < count)


@fetch.kernel
def _fetch(numbers: Tensor, host: Tensor) -> None:
    count = len(numbers)
    _fetch_kernel[(triton.cdiv(count, 1024),)](numbers, host, count, BLOCK=1024, num_warps=8)


@triton.jit(do_not_specialize=["Numbers", "Address", "count"])
def _deliver_kernel(Numbers, Address, count, BLOCK: tl.constexpr):
    low = tl.load(Address).to(tl.uint32).to(tl.int64)
    address = (tl.load(Address + 1).to(tl.int64) << 32) | low
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(Numbers + at, mask=at < count)
    tl.store(address.to(tl.pointer_type(tl.int32)) + at, numbers, mask=(at < count) & (address != 0))


@deliver.kernel
def _deliver(numbers: Tensor, address: Tensor) -> None:
    count = numbers.numel()
    _deliver_kernel[(triton.cdiv(count, 1024),)](numbers, address, count, BLOCK=1024, num_warps=8)
