"""RowTable: what the router knows of each running sequence, as columns, and the KV slots that it holds."""

import mmap
from collections.abc import Iterable

import numpy as np

from lightllm.common.kv_cache_mem_manager.radix_cache import DEAD, Node, RadixCache
from lightllm.common.kv_cache_mem_manager.token_pool import TokenPool
from lightllm.server.router.request import WAITING, Request

EVICTED_AT_ONCE = 64  # the least share of the pool that is evicted: one of so many
MIN_STOP_IDS = 4  # columns of the table of stop ids; it widens when a request brings more


def _sparse(rows: int, width: int) -> np.ndarray:
    """int32 [rows, width], zeros, in small pages that are taken as they are written: numpy asks for large ones, and to
    clear those of a new row takes a millisecond."""
    memory = mmap.mmap(-1, 4 * rows * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32).reshape(rows, width)


class RowTable:
    """The worker's rows. A row is running, leaving (it was given up, but a step in flight may name it) or free.

    The first `in_tree` slots of a row are those of the prefix cache's `node`, which it holds, the rest its own.
    """

    def __init__(self, num_rows: int, max_len: int, pool: TokenPool, cache: RadixCache, hint_width: int):
        self.pool = pool
        self.cache = cache
        self.at: dict[int, Request] = {}  # running, by row, in the order of admission
        self.prefilling: dict[int, Request] = {}  # of these, whose known ids are still being computed
        self.ended: list[int] = []  # rows to tell the worker of
        self._free = list(range(num_rows - 1, -1, -1))
        self._leaving: list[int] = []
        self._untold: set[int] = set()  # rows that the worker has not heard of

        self.sequence_ids = np.zeros(num_rows, np.int64)
        self.arrival = np.zeros(num_rows, np.int64)
        self.priority = np.zeros(num_rows, np.int64)
        self.kinds = np.zeros(num_rows, np.int64)
        self.hints = np.zeros((num_rows, hint_width))
        self.alive = np.zeros(num_rows, bool)
        self.pausing = np.zeros(num_rows, bool)
        self.prompt_len = np.zeros(num_rows, np.int64)
        self.known = np.zeros(num_rows, np.int64)  # ids at admission: they are computed in chunks
        self.limit = np.zeros(num_rows, np.int64)  # output tokens at most
        self.min_new = np.zeros(num_rows, np.int64)
        self.planned = np.zeros(num_rows, np.int64)  # positions computed or in flight: the slots held
        self.sampled = np.zeros(num_rows, np.int64)  # output tokens sampled or in flight
        self.received = np.zeros(num_rows, np.int64)  # output tokens whose ids are known here
        self.last_step = np.zeros(num_rows, np.int64)  # the last plan that names the row
        self.in_tree = np.zeros(num_rows, np.int64)
        self.extends = np.zeros(num_rows, bool)  # its chunks enter the prefix cache as they are planned
        self.stop_ids = np.full((num_rows, MIN_STOP_IDS), -1, np.int32)
        self._ids = _sparse(num_rows, max_len + 1)  # by position; the last one needs no slot
        self._slots = _sparse(num_rows, max_len)  # by position
        self._node = [cache.root] * num_rows
        self._keeps = np.zeros(num_rows, bool)  # what it holds enters the tree when it leaves

    def __len__(self) -> int:
        return len(self.alive)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Slots that are free, or would be for the asking."""
        return self.pool.free_count + self.cache.evictable

    @property
    def leaving(self) -> np.ndarray:
        return np.array(self._leaving, np.int64)

    def start(self, request: Request, node: Node, cached: int) -> int:
        """Gives the request a row, which holds the `cached` tokens of the prefix that ends at `node`."""
        row = request.row = self._free.pop()
        self.at[row] = self.prefilling[row] = request
        self._untold.add(row)
        self.sequence_ids[row] = request.sequence_id
        self.arrival[row], self.priority[row] = request.arrival, request.priority
        self.kinds[row], self.hints[row] = request.kind, request.hint
        self.alive[row], self.pausing[row] = True, False
        self.prompt_len[row], self.known[row] = request.prompt_len, len(request.ids)
        self.limit[row], self.min_new[row] = request.limit, request.sampling.min_new_tokens
        self.planned[row] = self.in_tree[row] = cached
        self.sampled[row] = self.received[row] = request.generated
        self._set_stop_ids(row, request.sampling.stop_token_ids)
        self._ids[row, : len(request.ids)] = request.ids
        self._node[row] = node
        self.extends[row] = self._keeps[row] = request.uses_cache
        self.cache.hold(node, row)
        end = cached
        for on_path in node.path():
            self._slots[row, end - len(on_path) : end] = on_path.slots
            end -= len(on_path)
        return row

    def cached_slots(self, row: int) -> bytes:
        """Those that a new row starts with."""
        return self._slots[row, : self.in_tree[row]].tobytes()

    def ids(self, row: int, start: int, end: int) -> np.ndarray:
        """A view of the ids at positions start..end-1."""
        return self._ids[row, start:end]

    def take_slots(self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, num_decode: int) -> np.ndarray:
        """Slots for the next positions of rows; as many as that must be `available`."""
        count = int(lengths.sum())
        if count > self.pool.free_count:
            # Some more than needed, so that not every step has to search the whole pool for a few.
            self.cache.evict(max(count - self.pool.free_count, self.pool.size // EVICTED_AT_ONCE))
        single, runs = self.pool.alloc(num_decode, neighbours=False), self.pool.alloc(count - num_decode)
        assert single is not None and runs is not None, "more slots were planned than there are"
        self._slots[rows[:num_decode], starts[:num_decode]] = single
        begin = 0
        for row, start, length in zip(*(column[num_decode:].tolist() for column in (rows, starts, lengths))):
            self._slots[row, start : start + length] = runs[begin : begin + length]
            begin += length
        self.planned[rows] += lengths
        return np.concatenate((single, runs))

    def extend_tree(self, rows: list[int], step: int) -> None:
        """The chunks of `rows` that `step` computes are known from the next plan on."""
        for row in rows:
            if not self.extends[row]:
                continue
            start, end = self.in_tree[row], self.planned[row]
            ids, slots = self._ids[row, start:end], self._slots[row, start:end]
            node = self.cache.extend(self._node[row], row, ids, slots, step)
            if node is None:
                self.extends[row] = False
            else:
                self._node[row], self.in_tree[row] = node, end

    def told(self, rows: Iterable[int]) -> None:
        self._untold.difference_update(rows)

    def receive(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """One more output token of each row, int32 [rows]; gives how many it now has."""
        self._ids[rows, self.prompt_len[rows] + self.received[rows]] = tokens
        self.received[rows] += 1
        return self.received[rows]

    def spoil(self, rows: list[int]) -> None:
        """What these rows hold was not computed: the cache must not get it."""
        self._keeps[rows] = False

    def leave(self, request: Request) -> None:
        """Gives up the row. Once no step in flight names it, what it has computed is the cache's, or free."""
        row = request.row
        del self.at[row]
        self.prefilling.pop(row, None)
        request.row = WAITING
        self.alive[row] = self.pausing[row] = False
        self._leaving.append(row)

    def release(self, completed: int) -> None:
        """Frees the rows that leave and that no step after `completed` names."""
        if not self._leaving:
            return
        leaving = self.leaving
        named = self.last_step[leaving] > completed
        self._leaving = leaving[named].tolist()
        for row in leaving[~named].tolist():
            self._give_back(row)
            self._free.append(row)
            if row in self._untold:
                self._untold.remove(row)
            else:
                self.ended.append(row)

    def _give_back(self, row: int) -> None:
        start, end = int(self.in_tree[row]), int(self.planned[row])
        own = self._slots[row, start:end]
        if self._keeps[row] and self._node[row].step != DEAD:
            # The last token may have been computed already, by a plan that was made before its end was known.
            valid = min(end, int(self.prompt_len[row] + self.received[row]))
            spare = self.cache.insert(self._node[row], self._ids[row, start:valid], own[: valid - start])
            own = np.concatenate((spare, own[valid - start :]))
        self.pool.free(own)
        self.cache.let_go(self._node[row], row)

    def _freeable(self, row: int) -> int:
        """Slots that would be free if the row alone gave up."""
        shared = next((node.end for node in self._node[row].path() if len(node.holders) > 1), 0)
        return int(self.planned[row]) - shared

    @property
    def promised(self) -> int:
        """Slots that rows will free as soon as no step in flight names them."""
        return sum(map(self._freeable, (*self._leaving, *self.pausing.nonzero()[0].tolist())))

    def best_to_pause(self) -> int | None:
        """Of the lowest priority the row whose pause frees most, in slots and for how long it would still use them.

        Of equals the newest. Few requests are paused so, and none that is about to end. None if no row may pause: one
        goes on, and so does who scores its prompt.
        """
        running = (self.alive & ~self.pausing).nonzero()[0].tolist()
        able = [row for row in running if not (row in self.prefilling and self.at[row].scores_prompt)]
        if len(running) < 2 or not able:
            return None
        return max(able, key=lambda row: (-self.priority[row], self._burden(row), self.arrival[row]))

    def _burden(self, row: int) -> int:
        """Slots of the row alone, times the plans for which it may still hold them."""
        return self._freeable(row) * int(self.limit[row] - self.sampled[row])

    def _set_stop_ids(self, row: int, ids: list[int]) -> None:
        missing = len(ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(ids)] = ids
