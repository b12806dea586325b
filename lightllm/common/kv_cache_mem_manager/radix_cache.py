"""RadixCache: which KV slots hold which known prefixes. Host only, numpy; one writer.

A tree whose edges are runs of token ids, split wherever two prefixes part, so that a match is exact to the token. A row
that uses a prefix *holds* the nodes on the path to it; what nobody holds may be evicted, the longest unused first.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from lightllm.common.kv_cache_mem_manager.token_pool import TokenPool

COMPUTED = -1  # the step of a node whose keys and values are there
DEAD = -2  # the step of a node that a failed step was to fill


@dataclass(slots=True, eq=False)
class Node:
    """`ids` int32 [n] follow the parent's; `slots` int32 [n] hold their keys and values.

    holders: the rows that use it. step: the plan in flight that computes it, else COMPUTED or DEAD. end: length of the
    prefix that ends here.
    """

    parent: Node | None
    ids: np.ndarray
    slots: np.ndarray
    step: int
    last_use: int
    holders: set[int] = field(default_factory=set)
    children: dict[int, Node] = field(default_factory=dict)  # by their first id
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = len(self.ids) + (0 if self.parent is None else self.parent.end)

    def __len__(self) -> int:
        return len(self.ids)

    def path(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def subtree(self) -> list[Node]:
        """This node and those below it."""
        nodes = [self]
        for node in nodes:
            nodes += node.children.values()
        return nodes


class RadixCache:
    """Owns the slots of its nodes until it gives them back to the pool.

    `evictable`: tokens that nobody holds. `shared`: nodes that two rows or more hold.
    """

    def __init__(self, pool: TokenPool):
        nothing = np.empty(0, np.int32)
        self.root = Node(None, nothing, nothing, COMPUTED, 0)
        self.evictable = 0
        self.shared: set[Node] = set()
        self._computing: defaultdict[int, list[Node]] = defaultdict(list)  # by step
        self._pool = pool
        self._num_nodes = 0
        self._clock = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap by last use; entries that no longer hold are skipped
        self._pushed = 0

    def match(self, ids: np.ndarray, node: Node | None = None) -> tuple[Node, int]:
        """The node at which the longest known prefix of `ids` ends, and its length. Nothing is held by it.

        node: behind which the ids stand; None: at the start.
        """
        node, length = self.root if node is None else node, 0
        while length < len(ids):
            child = node.children.get(int(ids[length]))
            if child is None:
                break
            common = _common(child.ids, ids[length:])
            node = child if common == len(child) else self._split(child, common)
            length += common
            if node is not child:
                break
        return node, length

    def match_again(self, ids: np.ndarray, node: Node, length: int) -> tuple[Node, int]:
        """match of ids of which an earlier one found the first `length`, ending at `node`: looks on from there, if that
        still holds."""
        known = node.end == length and (node.parent is not None or node is self.root) and node.step != DEAD
        node, length = (node, length) if known else (self.root, 0)
        node, more = self.match(ids[length:], node)
        return node, length + more

    def hold(self, node: Node, row: int) -> None:
        """The row uses the path to `node` from now on."""
        for on_path in node.path():
            if row in on_path.holders:
                break
            if not on_path.holders:
                self.evictable -= len(on_path)
            on_path.holders.add(row)
            if len(on_path.holders) == 2:
                self.shared.add(on_path)

    def let_go(self, node: Node, row: int) -> None:
        """The row no longer uses the path to `node`."""
        self._clock += 1
        for on_path in node.path():
            on_path.holders.discard(row)
            on_path.last_use = self._clock
            if len(on_path.holders) == 1:
                self.shared.discard(on_path)
            elif on_path.holders:
                continue
            elif on_path.step == DEAD:
                self._pool.free(on_path.slots)
            else:
                self.evictable += len(on_path)
                self._offer(on_path)

    def extend(self, node: Node, row: int, ids: np.ndarray, slots: np.ndarray, step: int) -> Node | None:
        """A chunk behind `node`, which the row holds, is being computed: its new node, held by the row.

        None if another row computes the same place: the caller then keeps its slots.
        """
        if int(ids[0]) in node.children:
            return None
        child = self._add(node, ids, slots, step)
        child.holders.add(row)
        return child

    def insert(self, behind: Node, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """What was computed behind a node stays known; gives the slots that are not needed, being known already.

        ids and slots int32 [n]. Nobody holds the new part; to be called while the caller holds the node.
        """
        node, known = self.match(ids, behind)
        if known < len(ids):
            leaf = self._add(node, ids[known:], slots[known:], COMPUTED)
            self.evictable += len(leaf)
            self._offer(leaf)
        return slots[:known]

    def evict(self, count: int) -> None:
        """Gives `count` tokens back to the pool, or all that nobody holds: the ends of the longest unused leaves."""
        while count > 0 and self._leaves:
            last_use, _, leaf = heapq.heappop(self._leaves)
            if leaf.last_use != last_use or not self._is_free_leaf(leaf):
                continue
            freed = min(count, len(leaf))
            self._pool.free(leaf.slots[len(leaf) - freed :])
            self.evictable -= freed
            count -= freed
            if freed == len(leaf):
                self._detach(leaf)
            else:
                leaf.ids, leaf.slots, leaf.end = leaf.ids[:-freed], leaf.slots[:-freed], leaf.end - freed
                self._offer(leaf)

    def finish(self, step: int, failed: set[int]) -> set[int]:
        """What `step` computed is there, but for the rows that `failed`.

        No match finds what these were to fill, nor what lies behind it. Gives the rows that use it: they must let go,
        and when the last has, its slots are free.
        """
        users: set[int] = set()
        for node in self._computing.pop(step, ()):
            if node.step == DEAD:  # an earlier step failed
                continue
            if node.holders.isdisjoint(failed):
                node.step = COMPUTED
                continue
            for lost in node.subtree():
                lost.step = DEAD
                users |= lost.holders
                self._num_nodes -= 1
            assert node.parent is not None
            del node.parent.children[int(node.ids[0])]
            self._offer(node.parent)
        return users

    def _add(self, parent: Node, ids: np.ndarray, slots: np.ndarray, step: int) -> Node:
        self._clock += 1
        # Copies: the arrays that come in are views of rows that will be written again.
        child = Node(parent, ids.copy(), slots.copy(), step, self._clock)
        parent.children[int(ids[0])] = child
        if step >= 0:
            self._computing[step].append(child)
        self._num_nodes += 1
        return child

    def _split(self, node: Node, length: int) -> Node:
        """A new node for the first `length` ids of `node`, which keeps the rest: whoever holds it holds both."""
        assert node.parent is not None
        upper = Node(node.parent, node.ids[:length], node.slots[:length], node.step, node.last_use)
        upper.holders = set(node.holders)
        upper.children[int(node.ids[length])] = node
        node.parent.children[int(upper.ids[0])] = upper
        node.parent, node.ids, node.slots = upper, node.ids[length:], node.slots[length:]
        if len(upper.holders) > 1:
            self.shared.add(upper)
        if upper.step >= 0:
            self._computing[upper.step].append(upper)
        self._num_nodes += 1
        return upper

    def _detach(self, leaf: Node) -> None:
        assert leaf.parent is not None and not leaf.children
        del leaf.parent.children[int(leaf.ids[0])]
        self._num_nodes -= 1
        self._offer(leaf.parent)
        leaf.parent = None  # entries of the heap that name it no longer hold

    def _is_free_leaf(self, node: Node) -> bool:
        return not node.children and not node.holders and node.parent is not None

    def _offer(self, node: Node) -> None:
        """Puts a node up for eviction if it is a leaf that nobody holds."""
        if not self._is_free_leaf(node):
            return
        self._pushed += 1  # nodes are not ordered
        heapq.heappush(self._leaves, (node.last_use, self._pushed, node))
        if len(self._leaves) > 2 * self._num_nodes + 64:
            self._leaves = [e for e in self._leaves if e[2].last_use == e[0] and self._is_free_leaf(e[2])]
            heapq.heapify(self._leaves)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many ids from the start are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    at = int(differs.argmax()) if n else 0
    return at if n and differs[at] else n
