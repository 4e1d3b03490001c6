"""Keys for a program's random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax


def random_keys(key: jax.Array) -> Iterator[jax.Array]:
    """JAX's PRNG keys, each different from the others, that follow from one."""
    return (jax.random.fold_in(key, number) for number in itertools.count(1))
