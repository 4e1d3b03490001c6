"""The keys derived from a key are distinct, differ from those of another key, and are reproducible."""

from __future__ import annotations

import jax

from dynaxla.lowering.random_keys import RandomKeys


def derived_keys(seed: int, count: int = 20, offset: int = 0) -> list[tuple[int, ...]]:
    keys = RandomKeys(jax.random.key(seed), offset)
    found = [tuple(jax.random.key_data(next(keys)).tolist()) for _ in range(count)]
    assert keys.count == count
    return found


def test_derived_keys_are_distinct_and_reproducible() -> None:
    assert derived_keys(1) == derived_keys(1)
    own = [tuple(jax.random.key_data(jax.random.key(seed)).tolist()) for seed in (1, 2)]
    assert len({*derived_keys(1), *derived_keys(2), *own}) == 42


def test_offset_continues_the_sequence() -> None:
    assert derived_keys(1, 3) + derived_keys(1, 2, offset=3) == derived_keys(1, 5)
