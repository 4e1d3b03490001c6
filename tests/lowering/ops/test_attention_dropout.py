"""The dropout mask for some rows of an attention's weights equals those rows of the whole mask."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dynaxla.lowering.ops.attention_dropout import dropout_mask, dropout_mask_rows
from support.timing import quick_compilation

SHAPE = (2, 3, 10, 24)


@pytest.fixture(autouse=True)
def enable_x64() -> Iterator[None]:
    """Lowerings are traced with 64-bit types."""
    with jax.enable_x64(True):
        yield


def rows(key: jax.Array, probability: float, shape: tuple[int, ...], whole: int, first: int) -> np.ndarray:
    draw = jax.jit(
        lambda key, first: dropout_mask_rows(key, probability, shape, whole, first), compiler_options=quick_compilation.options()
    )
    return np.asarray(draw(key, jnp.int32(first)))


def all_rows(key: jax.Array, probability: float) -> np.ndarray:
    return np.asarray(jax.jit(lambda key: dropout_mask(key, probability, SHAPE), compiler_options=quick_compilation.options())(key))


@pytest.mark.parametrize("probability", [0.9, 1 / 3, 1.0])
def test_rows_equal_those_of_the_whole_mask(probability: float) -> None:
    key = jax.random.key(3)
    whole = all_rows(key, probability)
    assert abs(whole.mean() - probability) < 0.05
    for first, count in ((0, 4), (4, 4), (7, 3)):
        mask_rows = rows(key, probability, (*SHAPE[:2], count, SHAPE[3]), SHAPE[2], first)
        np.testing.assert_array_equal(mask_rows, whole[:, :, first : first + count])


def test_mask_does_not_depend_on_jaxs_settings() -> None:
    key = jax.random.key(3)
    mask_rows = rows(key, 0.5, SHAPE, SHAPE[2], 0)
    with jax.threefry_partitionable(False):
        np.testing.assert_array_equal(all_rows(key, 0.5), mask_rows)


def test_positions_have_64_bits() -> None:
    """The mask does not repeat after 2**32 elements."""
    key, shape = jax.random.key(0), (1, 1, 2, 64)
    assert (rows(key, 0.5, shape, 2**28, 0) != rows(key, 0.5, shape, 2**28, 2**26)).any()
