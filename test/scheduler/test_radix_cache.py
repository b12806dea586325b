"""RadixCache against a model that keeps every token by its whole prefix, and its rules one by one."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.invariants import check_cache, size_of

from lightllm.common.kv_cache_mem_manager.radix_cache import Node, RadixCache
from lightllm.common.kv_cache_mem_manager.token_pool import TokenPool

Prefix = tuple[int, ...]


@dataclass
class Token:
    """What is known of the last token of a prefix."""

    slot: int
    step: int  # that computes it; 0: it is computed
    last_use: int
    holders: set[int] = field(default_factory=set)


class PrefixModel:
    """Every known prefix in one dictionary; each operation looks at as many of them as it likes."""

    def __init__(self) -> None:
        self.tokens: dict[Prefix, Token] = {}
        self.lost: list[Token] = []  # that a failed step was to fill, until nobody holds them
        self.clock = 0

    def known(self, ids: Prefix) -> int:
        length = 0
        while length < len(ids) and ids[: length + 1] in self.tokens:
            length += 1
        return length

    def slots(self, ids: Prefix) -> list[int]:
        return [self.tokens[ids[: end + 1]].slot for end in range(len(ids))]

    def hold(self, ids: Prefix, row: int) -> None:
        for end in range(len(ids)):
            self.tokens[ids[: end + 1]].holders.add(row)

    def add(self, ids: Prefix, start: int, slots: Sequence[int], step: int, holders: set[int]) -> None:
        self.clock += 1
        for end, slot in zip(range(start + 1, len(ids) + 1), slots, strict=True):
            self.tokens[ids[:end]] = Token(slot, step, self.clock, set(holders))

    def let_go(self, row: int) -> None:
        self.clock += 1
        for token in (*self.tokens.values(), *self.lost):
            if row in token.holders:
                token.holders.remove(row)
                token.last_use = self.clock
        self.lost = [token for token in self.lost if token.holders]

    def evict(self, count: int) -> None:
        """Token by token: the longest unused one that nobody holds and that nothing follows."""
        for _ in range(count):
            inner = {ids[:-1] for ids in self.tokens}
            ends = [ids for ids, token in self.tokens.items() if not token.holders and ids not in inner]
            if not ends:
                return
            del self.tokens[min(ends, key=lambda ids: self.tokens[ids].last_use)]

    def finish(self, step: int, failed: set[int]) -> set[int]:
        roots = [ids for ids, token in self.tokens.items() if token.step == step and token.holders & failed]
        users: set[int] = set()
        for ids in [ids for ids in self.tokens if any(ids[: len(root)] == root for root in roots)]:
            lost = self.tokens.pop(ids)
            users |= lost.holders
            self.lost.append(lost)
        for token in self.tokens.values():
            token.step = 0 if token.step == step else token.step
        return users

    @property
    def evictable(self) -> int:
        return sum(not token.holders for token in self.tokens.values())

    @property
    def taken(self) -> list[int]:
        return [token.slot for token in (*self.tokens.values(), *self.lost)]


@dataclass
class Row:
    """One that uses the cache as the router does: a known prefix, chunks in steps, its own tokens at the end."""

    ids: Prefix
    node: Node
    in_tree: int
    own: list[int]  # slots behind the prefix
    steps: set[int] = field(default_factory=set)  # in flight that name it
    extends: bool = True
    lost: bool = False  # a step failed for it

    @property
    def planned(self) -> int:
        return self.in_tree + len(self.own)


class Driver:
    """The same operations on both, compared after each."""

    def __init__(self, pool_size: int, rng: np.random.Generator):
        self.pool = TokenPool(pool_size)
        self.cache = RadixCache(self.pool)
        self.model = PrefixModel()
        self.rng = rng
        self.rows: dict[int, Row] = {}
        self.step = 0
        self.flying: list[int] = []
        self.looks: deque[tuple[Prefix, Node, int]] = deque(maxlen=5)  # what was looked up, and what was found
        self.hits = self.losses = self.evictions = self.twins = 0

    def random_ids(self) -> Prefix:
        """A continuation of something that may be known, of few ids."""
        known = list(self.model.tokens)
        start: Prefix = known[self.rng.integers(len(known))] if known and self.rng.random() < 0.7 else ()
        start = start[: self.rng.integers(len(start) + 1)]
        return (*start, *self.rng.integers(0, 3, self.rng.integers(1, 8)).tolist())

    def look_up(self) -> None:
        ids = self.random_ids()
        self.looks.append((ids, *self._match(ids)))

    def look_again(self) -> None:
        for _ in range(len(self.looks)):
            ids, *found = self.looks.popleft()
            self.looks.append((ids, *self._match(ids, *found)))

    def _match(self, ids: Prefix, *found) -> tuple[Node, int]:
        array = np.array(ids, np.int32)
        node, length = self.cache.match_again(array, *found) if found else self.cache.match(array)
        assert length == self.model.known(ids)
        path = [on_path.slots for on_path in node.path()][::-1]
        assert np.concatenate([*path, np.empty(0, np.int32)]).tolist() == self.model.slots(ids[:length])
        return node, length

    def start(self) -> None:
        ids = self.random_ids()
        node, cached = self._match(ids[:-1])
        number = next(number for number in range(100) if number not in self.rows)
        self.cache.hold(node, number)
        self.model.hold(ids[:cached], number)
        self.rows[number] = Row(ids, node, cached, [])
        self.hits += cached

    def plan(self) -> None:
        """The next chunk of some rows."""
        self.step += 1
        self.flying.append(self.step)
        for number, row in self.rows.items():
            missing = len(row.ids) - row.planned
            if row.lost or not missing or self.rng.random() < 0.4:
                continue
            count = int(self.rng.integers(1, missing + 1))
            if (slots := self.take(count)) is None:
                continue
            row.steps.add(self.step)
            self.compute(number, row, slots)

    def compute(self, number: int, row: Row, slots: list[int]) -> None:
        row.own += slots
        if not row.extends:
            return
        ids = row.ids[: row.planned]
        chunk = np.array(ids[row.in_tree :], np.int32), np.array(row.own, np.int32)
        twin = ids[: row.in_tree + 1] in self.model.tokens
        node = self.cache.extend(row.node, number, *chunk, self.step)
        chunk[0][:] = chunk[1][:] = -1  # the cache must have copies
        assert (node is None) == twin
        if node is None:
            row.extends = False
            self.twins += 1
            return
        self.model.add(ids, row.in_tree, row.own, self.step, {number})
        row.node, row.in_tree, row.own = node, len(ids), []

    def take(self, count: int) -> list[int] | None:
        if count > self.pool.free_count + self.cache.evictable:
            return None
        self.evict(count - self.pool.free_count)
        slots = self.pool.alloc(count)
        assert slots is not None
        return slots.tolist()

    def evict(self, count: int) -> None:
        self.evictions += max(0, min(count, self.model.evictable))
        self.cache.evict(count)
        self.model.evict(count)

    def result(self) -> None:
        if not self.flying:
            return
        step = self.flying.pop(0)
        failed = {number for number, row in self.rows.items() if step in row.steps and self.rng.random() < 0.08}
        users = self.cache.finish(step, failed)
        assert users == self.model.finish(step, failed)
        self.losses += len(users)
        for number, row in self.rows.items():
            row.steps.discard(step)
            row.lost |= number in failed | users

    def end(self) -> None:
        """A row that no step names, finished or given up, lets go."""
        idle = [number for number, row in self.rows.items() if not row.steps]
        if not idle:
            return
        number = idle[self.rng.integers(len(idle))]
        row = self.rows.pop(number)
        spare = row.own
        if not row.lost:
            ids, start = row.ids[: row.planned], row.in_tree
            known = max(start, self.model.known(ids))
            got = self.cache.insert(row.node, np.array(ids[start:], np.int32), np.array(row.own, np.int32))
            assert got.tolist() == row.own[: known - start]
            if known < len(ids):
                self.model.add(ids, known, row.own[known - start :], 0, set())
            spare = got.tolist()
        self.pool.free(np.array(spare, np.int32))
        self.cache.let_go(row.node, number)
        self.model.let_go(number)

    def check(self) -> None:
        check_cache(self.cache)
        assert size_of(self.cache) == len(self.model.tokens)
        assert self.cache.evictable == self.model.evictable
        shared = sum(len(token.holders) > 1 for token in (*self.model.tokens.values(), *self.model.lost))
        assert sum(map(len, self.cache.shared)) == shared
        taken = self.model.taken + [slot for row in self.rows.values() for slot in row.own]
        assert len(set(taken)) == len(taken), "a slot has two owners"
        assert self.pool.free_count == self.pool.size - len(taken)
        for row in self.rows.values():
            if not row.lost:
                path = [on_path.slots for on_path in row.node.path()][::-1]
                in_tree = np.concatenate([*path, np.empty(0, np.int32)]).tolist()
                assert in_tree == self.model.slots(row.ids[: row.in_tree])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pool_size", [12, 60, 300])
def test_random_operations(pool_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    driver = Driver(pool_size, rng)
    operations = [
        driver.look_up,
        driver.look_again,
        driver.start,
        driver.start,
        driver.plan,
        driver.plan,
        driver.result,
        driver.end,
    ]
    for _ in range(500):
        operation = operations[rng.integers(len(operations))]
        if len(driver.flying) >= 3:
            operation = driver.result
        elif operation == driver.start and len(driver.rows) >= 8:
            operation = driver.end
        elif rng.random() < 0.02:
            driver.evict(int(rng.integers(1, 6)))
        operation()
        driver.check()
    assert driver.hits and driver.losses and driver.evictions and driver.twins, "the trace shows too little"
    while driver.flying:
        driver.result()
    while driver.rows:
        driver.end()
        driver.check()
    assert driver.cache.evictable == size_of(driver.cache) == pool_size - driver.pool.free_count
    driver.evict(pool_size)
    driver.check()
    assert driver.pool.free_count == pool_size


# ---- one by one


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def filled(*texts: str, pool: TokenPool | None = None) -> RadixCache:
    """A cache that knows the texts, the first of them unused for longest."""
    pool = pool or TokenPool(100)
    cache = RadixCache(pool)
    for text in texts:
        node, length = cache.match(tokens(text))
        cache.hold(node, 0)
        slots = pool.alloc(len(text) - length)
        assert slots is not None
        assert len(cache.insert(node, tokens(text)[length:], slots)) == 0
        cache.let_go(node, 0)
    return cache


def known(cache: RadixCache, text: str) -> int:
    return cache.match(tokens(text))[1]


def test_nothing_is_known_at_first() -> None:
    cache = filled()
    assert cache.match(tokens("abc")) == (cache.root, 0)
    assert cache.match(tokens("")) == (cache.root, 0)
    assert size_of(cache) == cache.evictable == 0
    cache.evict(10)
    check_cache(cache)


@pytest.mark.parametrize("length", range(8))
def test_a_match_is_exact_to_the_token(length: int) -> None:
    cache = filled("abcdefg")
    assert known(cache, "abcdefg"[:length]) == length
    assert known(cache, "abcdefg"[:length] + "x") == length
    assert known(cache, "abcdefgh") == 7
    check_cache(cache)


def test_looking_takes_nothing() -> None:
    cache = filled("abcdefg")
    for length in (3, 5, 1, 7):
        known(cache, "abcdefg"[:length] + "x")
    assert (size_of(cache), cache.evictable) == (7, 7)
    assert not cache.shared


def test_the_longest_unused_goes_first_and_from_its_end() -> None:
    cache = filled("abcd", "abxy", "pqr")
    cache.evict(1)
    assert (known(cache, "abcd"), known(cache, "abxy"), known(cache, "pqr")) == (3, 4, 3)
    cache.evict(2)
    assert (known(cache, "abcd"), known(cache, "abxy"), known(cache, "pqr")) == (2, 3, 3)
    cache.evict(3)
    assert (known(cache, "abxy"), known(cache, "pqr")) == (0, 3)
    cache.evict(100)
    assert size_of(cache) == 0
    check_cache(cache)


def test_use_makes_young() -> None:
    cache = filled("abcd", "pqrs")
    node, _ = cache.match(tokens("abcd"))
    cache.hold(node, 1)
    cache.let_go(node, 1)
    cache.evict(4)
    assert (known(cache, "abcd"), known(cache, "pqrs")) == (4, 0)


def test_a_look_does_not_make_young() -> None:
    cache = filled("abcd", "pqrs")
    known(cache, "abcd")
    cache.evict(4)
    assert (known(cache, "abcd"), known(cache, "pqrs")) == (0, 4)


def test_what_is_held_stays_and_what_follows_it_goes() -> None:
    cache = filled("abcdefg")
    node, _ = cache.match(tokens("abc"))
    cache.hold(node, 1)
    assert cache.evictable == 4
    cache.evict(100)
    assert known(cache, "abcdefg") == 3 and cache.evictable == 0
    cache.let_go(node, 1)
    assert cache.evictable == 3
    check_cache(cache)


def test_only_what_two_rows_hold_is_shared() -> None:
    cache = filled("abcdefg")
    for row, text in enumerate(("abcde", "abx", "q"), start=1):
        cache.hold(cache.match(tokens(text))[0], row)
    assert sum(map(len, cache.shared)) == 2
    cache.let_go(cache.match(tokens("ab"))[0], 2)
    assert not cache.shared
    check_cache(cache)


def test_a_chunk_is_known_as_soon_as_it_is_planned() -> None:
    cache = RadixCache(TokenPool(100))
    cache.hold(cache.root, 1)
    first = cache.extend(cache.root, 1, tokens("abc"), np.arange(3, dtype=np.int32), step=1)
    assert first is not None and known(cache, "abcd") == 3
    assert cache.extend(cache.root, 2, tokens("a"), np.array([9], np.int32), step=1) is None, "a twin"
    assert cache.finish(1, set()) == set()
    assert known(cache, "abcd") == 3
    check_cache(cache)


def test_a_failed_chunk_is_forgotten_with_all_that_follows() -> None:
    """Row 1 computes, row 2 reads half of it and row 3 reads what row 1 reads itself."""
    pool = TokenPool(20)
    cache = filled("ab", pool=pool)
    above, _ = cache.match(tokens("ab"))
    cache.hold(above, 1)
    slots = pool.alloc(4)
    assert slots is not None
    chunk = cache.extend(above, 1, tokens("cdef"), slots, step=5)
    assert chunk is not None
    half, length = cache.match(tokens("abcdx"))
    assert length == 4
    cache.hold(half, 2)
    cache.hold(above, 3)
    assert cache.finish(5, failed={1}) == {1, 2}
    assert known(cache, "abcdef") == 2
    assert pool.free_count == 14, "those that read it may be in flight"
    cache.let_go(chunk, 1)
    assert pool.free_count == 16
    cache.let_go(half, 2)
    assert pool.free_count == 18
    cache.let_go(above, 3)
    assert cache.evictable == size_of(cache) == 2
    check_cache(cache)


def test_many_uses_of_few_nodes_leave_no_trace() -> None:
    """The heap of leaves stays as small as the tree."""
    cache = filled("abcd", "pqrs")
    for _ in range(1000):
        for text in ("abcd", "pqrs"):
            node, _ = cache.match(tokens(text))
            cache.hold(node, 1)
            cache.let_go(node, 1)
    assert len(cache._leaves) < 100
    check_cache(cache)
