"""Keys that follow from one are different from each other, from those of another one, and the same each time."""

from __future__ import annotations

import itertools

import jax

from dynaxla.lowering.random_keys import random_keys


def drawn(seed: int, count: int = 20) -> list[tuple[int, ...]]:
    return [tuple(jax.random.key_data(key).tolist()) for key in itertools.islice(random_keys(jax.random.key(seed)), count)]


def test_keys() -> None:
    assert drawn(1) == drawn(1)
    own = [tuple(jax.random.key_data(jax.random.key(seed)).tolist()) for seed in (1, 2)]
    assert len({*drawn(1), *drawn(2), *own}) == 42
