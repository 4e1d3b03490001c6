"""Keys for a program's random numbers."""

from __future__ import annotations

import jax
from jax import Array


class RandomKeys:
    """JAX's PRNG keys, each different from the others, that follow from one. An iterator.

    before: how many a caller has taken from the same key already. Attributes: count (of those taken here).
    """

    def __init__(self, key: Array, before: Array | int = 0) -> None:
        self._key, self._before = key, before
        self.count = 0

    def __next__(self) -> Array:
        self.count += 1
        return jax.random.fold_in(self._key, self._before + self.count)
