"""TokenPool: which KV slots are free, one slot per token. Host only, numpy."""

import numpy as np

WINDOW = 1 << 15  # slots looked at together while searching, at most
FIRST_WINDOW = 1 << 9  # where few slots are wanted they are near, as a rule


class TokenPool:
    """Slots 0 .. size-1. Neighbours are preferred, since their bytes are read faster; single slots serve as well."""

    def __init__(self, size: int):
        self.size = size
        self.free_count = size
        self._is_free = np.ones(size, bool)
        self._cursor = 0  # searching goes on where the last search ended

    def alloc(self, count: int, neighbours: bool = True) -> np.ndarray | None:
        """`count` free slots as int32, now taken; None, and nothing taken, if fewer are free.

        neighbours: whether to look for a run of them, as the chunk of one sequence has use for.
        """
        if count > self.free_count:
            return None
        if count == 0:
            return np.empty(0, np.int32)
        slots = self._run(count) if neighbours else None
        if slots is None:
            slots = self._scattered(count)
        self._is_free[slots] = False
        self.free_count -= count
        self._cursor = int(slots[-1]) + 1
        return slots

    def free(self, slots: np.ndarray) -> None:
        """Gives slots back. Each must be taken and named once."""
        if self._is_free[slots].any():
            raise ValueError("a slot was freed twice")
        self._is_free[slots] = True
        self.free_count += len(slots)

    def _run(self, count: int) -> np.ndarray | None:
        """Neighbouring slots right at the cursor, in the window behind it, or the same at the start."""
        for begin in (self._cursor, 0):
            offset = 0 if self._is_free[begin : begin + count].all() else self._first_run(begin, count)
            if offset is not None and begin + offset + count <= self.size:
                return np.arange(begin + offset, begin + offset + count, dtype=np.int32)
        return None

    def _first_run(self, begin: int, count: int) -> int | None:
        """Where in the window from `begin` on the first `count` free neighbours lie."""
        window = self._is_free[begin : begin + WINDOW]
        edges = np.flatnonzero(np.diff(window, prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2]
        long_enough = np.flatnonzero(ends - starts >= count)
        return int(starts[long_enough[0]]) if len(long_enough) else None

    def _scattered(self, count: int) -> np.ndarray:
        """The next free slots from the cursor on, from the start again at the end."""
        found: list[np.ndarray] = []
        missing = count
        for low, end in ((self._cursor, self.size), (0, self._cursor)):
            window = min(WINDOW, max(FIRST_WINDOW, 2 * missing))
            while missing and low < end:
                free = np.flatnonzero(self._is_free[low : min(low + window, end)])[:missing]
                found.append((low + free).astype(np.int32))
                missing -= len(free)
                low, window = low + window, min(WINDOW, 2 * window)
        return np.concatenate(found)
