"""What must hold of the router's tables between any two calls. Each check raises AssertionError."""

import numpy as np

from lightllm.common.kv_cache_mem_manager.radix_cache import DEAD, RadixCache
from lightllm.server.router.row_table import RowTable
from lightllm.server.router.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Every slot and row is free or has one owner, and every sequence has one place."""
    check_rows(scheduler._rows)
    places = [*scheduler._rows.at.values(), *scheduler._queue]
    assert len(scheduler._requests) == len(places), "a sequence is neither waiting nor running"
    assert set(scheduler._requests.values()) == set(places)


def check_rows(rows: RowTable) -> None:
    """Every slot is free or has one owner, and every row is free or used."""
    check_cache(rows.cache)
    used = (*rows.at, *rows._leaving)
    own = [rows._slots[row, rows.in_tree[row] : rows.planned[row]] for row in used]
    dead = {node for row in used for node in rows._node[row].path() if node.step == DEAD}
    in_tree = [node.slots for node in (*rows.cache.root.subtree(), *dead)]
    taken = np.concatenate((*own, *in_tree))
    assert len(np.unique(taken)) == len(taken), "a slot has two owners"
    assert rows.pool.free_count + len(taken) == rows.pool.size, "slots were lost"
    assert sorted((*rows._free, *used)) == list(range(len(rows))), "rows were lost"
    for row in used:
        assert rows.in_tree[row] == sum(map(len, rows._node[row].path())), "a row misjudges its prefix"
        assert all(row in node.holders for node in rows._node[row].path()), "a row does not hold its prefix"


def check_cache(cache: RadixCache) -> None:
    """The tree is one."""
    nodes = cache.root.subtree()[1:]
    assert len(nodes) == cache._num_nodes
    assert cache.evictable == sum(len(node) for node in nodes if not node.holders), "evictable tokens are miscounted"
    assert {node for node in cache.shared if node.step != DEAD} == {n for n in nodes if len(n.holders) > 1}
    offered = {id(leaf) for last_use, _, leaf in cache._leaves if leaf.last_use == last_use}
    for node in nodes:
        assert node.parent is not None and node.parent.children[int(node.ids[0])] is node
        assert len(node) == len(node.slots) > 0 and node.end == node.parent.end + len(node)
        assert node.parent is cache.root or node.holders <= node.parent.holders, "a held node hangs below a free one"
        assert not cache._is_free_leaf(node) or id(node) in offered, "a leaf would never be evicted"


def size_of(cache: RadixCache) -> int:
    """Tokens in the tree."""
    return sum(len(node) for node in cache.root.subtree())
