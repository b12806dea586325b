"""PeerMemory: memory on each rank's GPU in which the other ranks write directly, over NVLink or PCIe."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightllm.distributed.peer_copies import PLACES, PeerCopies
from lightllm.utils.log_utils import init_logger

logger = init_logger(__name__)

EXCHANGED_LINES = 16  # that a pair of boxes has room for: no fewer than skinny_linear takes
Boxes = tuple[Tensor, Tensor]
"""(outbox, which lies in the other rank's memory, inbox), int16 [lines, width]; an empty element is -0.0."""
GROUP_NAME = dist.GroupName("lightllm-tp")  # under which torch knows the ranks that share memory


@dataclass(frozen=True)
class PeerMemory:
    """Room for one addend of `lines` x `width` elements of `dtype` of every rank, twice. -0.0 is an empty element.

    The kernel that uses it is triton_kernel/all_reduce.py.
    """

    pointers: Tensor  # int64 [ranks]: where each rank's memory lies in this process
    turns: Tensor  # int32 [lines]: which of a line's two places is next, 0 or 1
    lines: int
    width: int
    dtype: torch.dtype
    most_lines: int  # larger sums are faster without it
    memory: Tensor  # this rank's own, kept alive
    boxes: Iterator[Boxes] | None = None  # of two ranks, for few lines in 16 bits: two pairs by turns
    copies: PeerCopies | None = None  # of two ranks: for sums of many lines

    def takes(self, x: Tensor) -> bool:
        """Whether x [T, D] is to be summed here."""
        lines, width = x.shape
        return lines <= self.most_lines and width <= self.width and x.dtype == self.dtype and x.stride(1) == 1


def share_memory(
    rank: int, size: int, group: Any, store: dist.Store, lines: int, width: int, dtype: torch.dtype, copied: int
) -> PeerMemory | None:
    """Memory that all ranks of `group` (ProcessGroupNCCL) see, on the current device; width is rounded up to 128 bytes.
    None, on all of them, where one rank's GPU cannot reach another's, and on ROCm, where nobody has tried it."""
    device = torch.device("cuda", torch.cuda.current_device())
    others = [peer for peer in range(size) if peer != device.index]
    reachable = all(torch.cuda.can_device_access_peer(device, peer) for peer in others) and torch.version.hip is None
    if not _everywhere(reachable, group, device):
        logger.info("the GPUs cannot reach each other's memory; all sums over ranks go through NCCL")
        return None
    width = -(-width * dtype.itemsize // 128) * 128 // dtype.itemsize
    room, boxes, places = 2 * size * lines * width, 0, 0
    if size == 2:
        boxes, places = 2 * EXCHANGED_LINES * width, len(PLACES) * copied
    handle: Any = None
    try:
        memory, handle = _rendezvous(rank, size, group, store, room + boxes + places, dtype, device)
    except RuntimeError as error:
        logger.warning("no memory shared between the GPUs, all sums over ranks go through NCCL: %s", error)
    if not _everywhere(handle is not None, group, device):
        return None
    memory[: room + boxes].fill_(-0.0)
    torch.cuda.synchronize()
    _everywhere(True, group, device)  # nobody writes before all is empty
    return PeerMemory(
        pointers=torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device),
        turns=torch.zeros(lines, dtype=torch.int32, device=device),
        lines=lines,
        width=width,
        dtype=dtype,
        most_lines=lines,
        memory=memory[:room],
        boxes=_boxes(handle, rank, room, width) if boxes and dtype.itemsize == 2 else None,
        copies=PeerCopies(handle, rank, room + boxes, copied, dtype) if places else None,
    )


def _boxes(handle: Any, rank: int, first: int, width: int) -> Iterator[Boxes]:
    """Pairs without end, in memory from element `first` on."""
    shape = 2, EXCHANGED_LINES, width
    outboxes, inboxes = (handle.get_buffer(r, shape, torch.int16, first) for r in (1 - rank, rank))
    return cycle([*zip(outboxes, inboxes)])


def _everywhere(holds: bool, group: Any, device: torch.device) -> bool:
    """Whether it holds on every rank."""
    missing = torch.tensor([0 if holds else 1], dtype=torch.int32, device=device)
    group.allreduce([missing]).wait()
    return not missing.item()


def _rendezvous(
    rank: int, size: int, group: Any, store: dist.Store, elements: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Any]:
    """This rank's memory and torch's handle of that of all ranks."""
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

    named = dist.ProcessGroup(dist.PrefixStore("named", store), rank, size)
    named._set_group_name(GROUP_NAME)
    named._register_backend(device, dist.ProcessGroup.BackendType.NCCL, group)
    _register_process_group(GROUP_NAME, named)
    _SymmetricMemory.set_group_info(GROUP_NAME, rank, size, dist.PrefixStore("memory", store))
    memory = _SymmetricMemory.empty_strided_p2p((elements,), (1,), dtype, device, GROUP_NAME)
    return memory, _SymmetricMemory.rendezvous(memory, GROUP_NAME)
