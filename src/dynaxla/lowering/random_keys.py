"""PRNG keys for a program's random numbers."""

from __future__ import annotations

import jax
from jax import Array


class RandomKeys:
    """An iterator over distinct JAX PRNG keys that are derived from one key.

    Args:
        key: The key from which the iterator derives its keys.
        offset: The number of keys that the caller has already derived from `key`.

    Attributes:
        count: The number of keys taken from this iterator.
    """

    def __init__(self, key: Array, offset: Array | int = 0) -> None:
        self._key, self._offset = key, offset
        self.count = 0

    def __next__(self) -> Array:
        self.count += 1
        return jax.random.fold_in(self._key, self._offset + self.count)
