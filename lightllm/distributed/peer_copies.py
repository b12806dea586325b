"""PeerCopies: tensors that two GPUs send each other by their copy engines, which take nothing from running kernels."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

PLACES = ADDENDS, NORMED = 0, 1


class PeerCopies:
    """Two ranks send each other tensors, by turns to the place ADDENDS and to the place NORMED at the other.

    A place is free in time: who sends to one has received what the other rank sent to the other place, and that was
    sent behind the last kernel that read the one.
    """

    def __init__(self, handle: Any, rank: int, first: int, room: int, dtype: torch.dtype) -> None:
        """handle: torch's of the memory that the two ranks share; the places, of `room` elements each, begin at its
        element `first`."""
        self.rank, self.room = rank, room
        self._handle, self._other = handle, 1 - rank
        shape = len(PLACES), room
        self._inbox, self._outbox = (handle.get_buffer(r, shape, dtype, first) for r in (rank, self._other))
        self._copying, self._beside = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
        self._awaited = dict.fromkeys(PLACES, False)

    def send(self, place: int, x: Tensor) -> None:
        """Begins to send x, contiguous, when the current stream has computed it. x must stay until `finish`."""
        if self._awaited[place]:  # of a step that failed, on both ranks alike
            self._handle.wait_signal(self._other, place)
        self._copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copying):
            self._outbox[place, : x.numel()].copy_(x.view(-1))
            self._handle.put_signal(self._other, place)
        self._awaited[place] = True

    def receive(self, place: int, lines: int, width: int) -> Tensor:
        """[lines, width] that the other rank sent to this place; the current stream waits until it is there."""
        self._handle.wait_signal(self._other, place)
        self._awaited[place] = False
        return self._inbox[place, : lines * width].view(lines, width)

    @contextmanager
    def beside(self) -> Iterator[AbstractContextManager]:
        """A context for what need not wait for what the current stream does meanwhile; at the end it waits for both."""
        current = torch.cuda.current_stream()
        self._beside.wait_stream(current)
        try:
            yield torch.cuda.stream(self._beside)
        finally:
            current.wait_stream(self._beside)

    def finish(self) -> None:
        """The current stream waits until everything has been sent."""
        torch.cuda.current_stream().wait_stream(self._copying)
