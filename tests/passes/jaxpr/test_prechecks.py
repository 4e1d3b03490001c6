"""Tests of passes/jaxpr/prechecks.py: checks of indices become a separate program."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dynaxla.passes.jaxpr.prechecks import split

X, INDEX = jax.ShapeDtypeStruct((4, 4), np.float32), jax.ShapeDtypeStruct((2,), np.int32)


def _split(condition: Callable[[jax.Array, jax.Array], jax.Array]) -> tuple[jax.stages.Traced, jax.stages.Traced] | None:
    def program(x: jax.Array, index: jax.Array) -> list[jax.Array]:
        return [x.at[index].set(1), x @ x, jnp.where(condition(x, index), 1, 0)]

    return split(jax.jit(program, keep_unused=True).trace(X, INDEX), "a_program", (X, INDEX), (0,))


def test_checks_of_indices_become_first_program() -> None:
    parts = _split(lambda x, index: jnp.all(index < 4))
    assert parts is not None
    checks, rest = (part.lower().compile() for part in parts)
    x, index = jnp.zeros((4, 4)), jnp.array([1, 5], np.int32)
    assert checks(x, index)[0] == 0
    assert checks(x, jnp.array([1, 3], np.int32))[0] == 1
    written, product = rest(x, jnp.array([1, 3], np.int32))
    assert written[:, 0].tolist() == [0, 1, 0, 1]
    assert product.shape == (4, 4)
    assert x.is_deleted()


@pytest.mark.parametrize("condition", [lambda x, _: jnp.all(x @ x < 1), lambda x, _: jnp.all(jnp.sort(x)[0] < 1)], ids=["product", "sort"])
def test_checks_of_computed_values_are_not_split_off(condition: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
    assert _split(condition) is None
