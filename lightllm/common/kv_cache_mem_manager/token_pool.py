"""TokenPool: which KV slots are free, one slot per token. Host only, numpy."""

from __future__ import annotations

import numpy as np

WINDOW = 1 << 15  # slots looked at together while searching


class TokenPool:
    """Slots 0 .. size-1. A run of neighbours is preferred, since its bytes are read faster; single slots serve as well."""

    def __init__(self, size: int):
        self.size = size
        self.free_count = size
        self._is_free = np.ones(size, bool)
        self._cursor = 0  # searching goes on where the last search ended

    def alloc(self, count: int) -> np.ndarray | None:
        """`count` free slots as int32, now taken; None, and nothing taken, if fewer are free."""
        if count > self.free_count:
            return None
        slots = self._run(count)
        if slots is None:
            slots = self._scattered(count)
        self._is_free[slots] = False
        self.free_count -= count
        self._cursor = int(slots[-1]) + 1 if count else self._cursor
        return slots

    def free(self, slots: np.ndarray) -> None:
        """Gives slots back. Each must be taken and named once."""
        if self._is_free[slots].any():
            raise ValueError("a slot was freed twice")
        self._is_free[slots] = True
        self.free_count += len(slots)

    def _run(self, count: int) -> np.ndarray | None:
        """Neighbouring slots at the cursor, at the start, or in the window after the cursor."""
        for start in (self._cursor, 0):
            if start + count <= self.size and self._is_free[start : start + count].all():
                return np.arange(start, start + count, dtype=np.int32)
        window = self._is_free[self._cursor : self._cursor + WINDOW]
        edges = np.flatnonzero(np.diff(window, prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2]
        long_enough = np.flatnonzero(ends - starts >= count)
        if len(long_enough) == 0:
            return None
        start = self._cursor + int(starts[long_enough[0]])
        return np.arange(start, start + count, dtype=np.int32)

    def _scattered(self, count: int) -> np.ndarray:
        """The next free slots from the cursor on, from the start again at the end."""
        found: list[np.ndarray] = []
        missing = count
        for begin, end in ((self._cursor, self.size), (0, self._cursor)):
            for low in range(begin, end, WINDOW):
                if missing == 0:
                    break
                free = np.flatnonzero(self._is_free[low : min(low + WINDOW, end)])[:missing]
                found.append((low + free).astype(np.int32))
                missing -= len(free)
        return np.concatenate(found)
