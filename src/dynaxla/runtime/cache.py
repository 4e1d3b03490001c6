"""A bounded mapping that drops what has not been used for the longest time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from .. import forks
from ..observe import metrics

V = TypeVar("V")


class LeastRecentlyUsed(Generic[V]):
    """Thread-safe. Dropping an entry costs a compilation when it is wanted again, nothing else."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, V] = OrderedDict()
        self._lock = forks.lock()

    def get(self, key: Hashable) -> V | None:
        """The value, which counts as used now; None if there is none."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Keep a value. Those not used for the longest time are dropped beyond the capacity."""
        dropped = []  # freed without the lock
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self.capacity:
                dropped.append(self._entries.popitem(last=False))
        if dropped:
            metrics.add("evictions", len(dropped))

    def values(self) -> list[V]:
        """The entry not used for the longest time first."""
        with self._lock:
            return list(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
