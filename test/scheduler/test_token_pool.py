"""TokenPool: every slot is free or taken once, neighbours where there are, anything where there are not."""

import numpy as np
import pytest

from lightllm.common.kv_cache_mem_manager import token_pool
from lightllm.common.kv_cache_mem_manager.token_pool import TokenPool


def is_run(slots: np.ndarray) -> bool:
    return bool((np.diff(slots) == 1).all())


@pytest.mark.parametrize("window", [1, 3, 64, 1 << 15])
def test_random_use_against_a_set(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(token_pool, "WINDOW", window)
    for seed in range(15):
        rng = np.random.default_rng(seed)
        size = int(rng.choice([1, 2, 7, 60, 200]))
        pool, free, taken = TokenPool(size), set(range(size)), []
        for _ in range(200):
            if rng.random() < 0.6:
                count = int(rng.integers(0, size // 2 + 2))
                slots = pool.alloc(count)
                assert (slots is None) == (count > len(free))
                if slots is not None:
                    assert slots.dtype == np.int32 and len(slots) == count
                    assert len(set(slots.tolist())) == count and set(slots.tolist()) <= free
                    free -= set(slots.tolist())
                    taken += np.array_split(slots, int(rng.integers(1, 4)))
            elif taken:
                slots = taken.pop(int(rng.integers(len(taken))))
                pool.free(slots)
                free |= set(slots.tolist())
            assert pool.free_count == len(free) and pool.size == size
        for slots in taken:
            pool.free(slots)
        whole = pool.alloc(size)
        assert whole is not None and is_run(whole) and pool.free_count == 0


def test_neighbours_first() -> None:
    pool = TokenPool(100)
    parts = [pool.alloc(10) for _ in range(10)]
    assert all(part is not None and is_run(part) for part in parts)
    pool.free(parts[2])
    pool.free(parts[3][:5])
    pool.free(parts[7])
    run = pool.alloc(15)
    assert run is not None and run.tolist() == list(range(20, 35)), "the only run of 15"


def test_single_slots_where_there_is_no_run() -> None:
    pool = TokenPool(100)
    pool.alloc(100)
    pool.free(np.arange(0, 100, 2))
    slots = pool.alloc(50)
    assert slots is not None and sorted(slots.tolist()) == list(range(0, 100, 2))
    assert pool.free_count == 0 and pool.alloc(1) is None and pool.alloc(0) is not None


def test_search_goes_on_behind_the_end() -> None:
    pool = TokenPool(10)
    first = pool.alloc(8)
    assert first is not None
    pool.free(first[:3])
    assert sorted(pool.alloc(5).tolist()) == [0, 1, 2, 8, 9]  # type: ignore[union-attr]


def test_a_run_in_a_pool_of_many_windows() -> None:
    pool = TokenPool(5 * token_pool.WINDOW)
    everything = pool.alloc(pool.size)
    assert everything is not None
    pool.free(everything[1::2])  # holes of one slot all over
    last = everything[-1000:]
    pool.free(last[::2])  # and one run at the end
    scattered = pool.alloc(pool.free_count - 400)
    assert scattered is not None and len(np.unique(scattered)) == len(scattered)
    rest = pool.alloc(400)
    assert rest is not None and is_run(rest) and pool.free_count == 0


def test_a_run_in_front_of_the_cursor() -> None:
    pool = TokenPool(20)
    pool.alloc(20)
    pool.free(np.array([1, 3, 5, 8, 9, 10, 11]))
    assert pool.alloc(4).tolist() == [8, 9, 10, 11]  # type: ignore[union-attr]


def test_a_slot_is_freed_once() -> None:
    pool = TokenPool(10)
    slots = pool.alloc(4)
    assert slots is not None
    pool.free(slots[:2])
    for again in (slots[:1], slots, np.array([9])):
        with pytest.raises(ValueError, match="twice"):
            pool.free(again)
    assert pool.free_count == 8, "a refused free changes nothing"
    pool.free(slots[2:])
    assert pool.free_count == 10
