"""Entries of stores (see store.py) collected in memory, so that they can be embedded in a file such as a compiled artifact."""

from __future__ import annotations

from .store import StoreProtocol


class Bundle:
    """Byte strings by a store's folder and an entry's key.

    Args:
        entries: The initial entries, by (folder, key). The bundle adds its new entries to this dict.
    """

    def __init__(self, entries: dict[tuple[str, str], bytes] | None = None) -> None:
        self.entries = entries if entries is not None else {}

    def in_front_of(self, folder: str, store: StoreProtocol | None) -> StoreProtocol:
        """Returns a store that reads from the bundle first, and then from `store`.

        It writes new entries to both. Entries that it reads from `store` are copied to the bundle.

        Args:
            folder: The name of the store's folder.
            store: The store of that folder; None if there is none. Only the bundle is then used.
        """
        return _LayeredStore(self.entries, folder, store)


class _LayeredStore:
    """See `Bundle.in_front_of`."""

    def __init__(self, entries: dict[tuple[str, str], bytes], folder: str, store: StoreProtocol | None) -> None:
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
