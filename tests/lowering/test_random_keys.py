"""Keys that follow from one are different from each other, from those of another one, and the same each time."""

from __future__ import annotations

import jax

from dynaxla.lowering.random_keys import RandomKeys


def drawn(seed: int, count: int = 20, offset: int = 0) -> list[tuple[int, ...]]:
    keys = RandomKeys(jax.random.key(seed), offset)
    found = [tuple(jax.random.key_data(next(keys)).tolist()) for _ in range(count)]
    assert keys.count == count
    return found


def test_keys() -> None:
    assert drawn(1) == drawn(1)
    own = [tuple(jax.random.key_data(jax.random.key(seed)).tolist()) for seed in (1, 2)]
    assert len({*drawn(1), *drawn(2), *own}) == 42


def test_counting_on() -> None:
    assert drawn(1, 3) + drawn(1, 2, offset=3) == drawn(1, 5)
