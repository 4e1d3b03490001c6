"""What stores would keep, gathered so that it can travel in a file of somebody else's."""

from __future__ import annotations

from .store import Keeper


class Bundle:
    """Byte strings by folder and key. entries: those that it has from the start."""

    def __init__(self, entries: dict[tuple[str, str], bytes] | None = None) -> None:
        self.entries = entries if entries is not None else {}

    def before(self, folder: str, store: Keeper | None) -> Keeper:
        """What looks here first and then in a store, and keeps in both what it is given or finds there. store: of that folder, if any."""
        return _InFront(self.entries, folder, store)


class _InFront:
    def __init__(self, entries: dict[tuple[str, str], bytes], folder: str, store: Keeper | None) -> None:
        self._entries, self._folder, self._store = entries, folder, store

    def get(self, key: str) -> bytes | None:
        data = self._entries.get((self._folder, key))
        if data is None and self._store is not None and (data := self._store.get(key)) is not None:
            self._entries[self._folder, key] = data
        return data

    def put(self, key: str, data: bytes) -> None:
        self._entries[self._folder, key] = data
        if self._store is not None:
            self._store.put(key, data)
