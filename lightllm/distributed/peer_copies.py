"""PeerCopies: tensors that two GPUs send each other by their copy engines, which take nothing from running kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TILE = 128 * 256  # numbers that a product of many lines computes on one processor at a time
MOST_WAVES = 4  # of such products whose outcome is sent at a time
UNDER_WAY = 3  # tensors that may be sent before the first of them is received
PLACES = 2 * UNDER_WAY


class PeerCopies:
    """Two ranks send each other tensors of the same shapes in the same order, each as soon as it is computed.

    What a rank sends lies in one of `PLACES` places at the other, used in turn, and a place is free again in time: a
    rank that sends its n-th tensor has received number n - UNDER_WAY, which the other sent when it had received number
    n - 2 * UNDER_WAY. A CUDA graph always uses the places it was captured with, so something else must make the ranks
    wait for each other between two graphs: the sum of the embeddings does.
    """

    def __init__(self, handle: Any, rank: int, first: int, dtype: torch.dtype, device: torch.device) -> None:
        """handle: torch's of the memory that the two ranks share; the places begin at its element `first`."""
        self.wave = wave(device)
        self._handle, self._other = handle, 1 - rank
        shape = PLACES, places_size(device) // PLACES
        self._inbox, self._outbox = (handle.get_buffer(r, shape, dtype, first) for r in (rank, self._other))
        self._stream = torch.cuda.Stream(priority=-1)
        self._next = 0

    def send(self, x: Tensor) -> int:
        """Begins to send x, contiguous, when the current stream has computed it; gives its place. x must stay until
        `finish`."""
        place, self._next = self._next, (self._next + 1) % PLACES
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._outbox[place, : x.numel()].copy_(x.view(-1))
            self._handle.put_signal(self._other, place)
        return place

    def receive(self, place: int, x: Tensor) -> Tensor:
        """What the other rank sent when this one sent x; the current stream waits until it is there."""
        self._handle.wait_signal(self._other, place)
        return self._inbox[place, : x.numel()].view(x.shape)

    def finish(self) -> None:
        """The current stream waits until everything has been sent."""
        torch.cuda.current_stream().wait_stream(self._stream)


def wave(device: torch.device) -> int:
    """Numbers that a product of many lines computes at a time, on all processors of the GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count * TILE


def places_size(device: torch.device) -> int:
    """Elements of the places, each of which has room for the most waves."""
    return PLACES * MOST_WAVES * wave(device)
