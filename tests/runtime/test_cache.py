"""Tests of the bounded cache, which drops the least recently used entries and counts them."""

from __future__ import annotations

from dynaxla.observe import metrics
from dynaxla.runtime.cache import LeastRecentlyUsed


def test_least_recently_used_entry_is_dropped() -> None:
    metrics.reset()
    cache: LeastRecentlyUsed[int] = LeastRecentlyUsed(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    assert metrics.snapshot()["evictions"] == 1


def test_values_are_in_order_of_use() -> None:
    cache: LeastRecentlyUsed[int] = LeastRecentlyUsed(3)
    for key in (1, 2, 3):
        cache.put(key, key * 10)
    cache.get(1)
    cache.put(2, 21)
    assert cache.values() == [30, 10, 21]
    assert len(cache) == 3


def test_smaller_capacity_applies_from_the_next_entry() -> None:
    metrics.reset()
    cache: LeastRecentlyUsed[int] = LeastRecentlyUsed(3)
    for key in range(3):
        cache.put(key, key)
    cache.capacity = 1
    cache.put(3, 3)
    assert cache.values() == [3]
    assert metrics.snapshot()["evictions"] == 3
