"""A bounded mapping that drops its least recently used entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from .. import forks
from ..observe import metrics

V = TypeVar("V")


class LeastRecentlyUsed(Generic[V]):
    """A bounded, thread-safe mapping that drops its least recently used entries.

    Args:
        capacity: The maximum number of entries.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, V] = OrderedDict()
        self._latest: tuple[Hashable, V] | None = None  # the most recently used entry
        self._lock = forks.lock()

    def get(self, key: Hashable) -> V | None:
        """Returns the value of a key, and marks the entry as the most recently used one; None if there is no such entry."""
        latest = self._latest
        if latest is not None and latest[0] == key:
            return latest[1]
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            value = self._entries[key]
            self._latest = key, value
        return value

    def put(self, key: Hashable, value: V) -> None:
        """Stores a value, and drops the least recently used entries beyond the capacity."""
        dropped = []  # freed after the lock is released
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            self._latest = key, value
            while len(self._entries) > self.capacity:
                dropped.append(self._entries.popitem(last=False))
        if dropped:
            metrics.add("evictions", len(dropped))

    def items(self) -> list[tuple[Hashable, V]]:
        """Returns the keys and values, least recently used first."""
        with self._lock:
            return list(self._entries.items())

    def values(self) -> list[V]:
        """Returns the values, least recently used first."""
        with self._lock:
            return list(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
