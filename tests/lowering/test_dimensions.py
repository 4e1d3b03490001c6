"""Dimensions, sizes and slices, by the rules of ATen and Python for negative and missing numbers."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import export

from dynaxla.lowering.dimensions import clamp_slice, definitely, infer_size, is_static, move, reduction_dims, slice_dim, wrap


def test_wrapped_dimensions_are_not_negative() -> None:
    assert [wrap(dim, 3) for dim in (0, 2, -1, -3)] == [0, 2, 2, 0]
    assert [wrap(dim, 0) for dim in (0, -1)] == [0, 0]


def test_reduced_dimensions() -> None:
    assert reduction_dims(None, 3) == reduction_dims([], 3) == (0, 1, 2)
    assert reduction_dims(-1, 3) == (2,)
    assert reduction_dims([0, -1], 3) == (0, 2)
    assert reduction_dims(None, 0) == reduction_dims(0, 0) == reduction_dims([-1], 0) == ()


@pytest.mark.parametrize("sizes", [(2, -1), (-1,), (3, -1, 2), (6, 4), (-1, 24)], ids=str)
def test_inferred_sizes_match_torch(sizes: tuple[int, ...]) -> None:
    assert infer_size(sizes, 24) == tuple(torch.empty(24).view(sizes).shape)


def test_inferred_sizes_of_an_empty_tensor() -> None:
    assert infer_size((2, -1), 0) == tuple(torch.empty(0).view(2, -1).shape)
    assert infer_size((0, -1), 0) == (0, 0), "torch refuses these sizes; infer_size must not divide by zero"


def test_slices_match_python() -> None:
    bounds = [None, -9, -3, -1, 0, 1, 4, 5, 9]
    for size, start, end, step in itertools.product((0, 1, 5), bounds, bounds, (1, 2, 7)):
        first, last, count = clamp_slice(size, start, end, step)
        assert list(range(first, last, step)) == list(range(size))[start:end:step]
        assert count == len(range(first, last, step))


def test_slicing_and_moving_one_dimension() -> None:
    x = np.arange(24).reshape(2, 3, 4)
    array = jnp.asarray(x)
    assert slice_dim(array, 1, 0, 3) is array
    for start, end, step in ((1, 4, 2), (0, 4, 2), (0, 2, 1), (1, 4, 1)):
        np.testing.assert_array_equal(slice_dim(array, 2, start, end, step), x[:, :, start:end:step])
    assert move(array, 1, 1) is array
    for source, destination in itertools.permutations(range(3), 2):
        np.testing.assert_array_equal(move(array, source, destination), np.moveaxis(x, source, destination))


@pytest.fixture
def sizes() -> tuple[int, int]:
    """Two symbolic sizes, as in a program for export."""
    return export.symbolic_shape("batch, length")


def test_undecidable_comparisons_are_not_definite(sizes: tuple[int, int]) -> None:
    batch, length = sizes
    assert definitely(lambda: 2 < 3)
    assert not definitely(lambda: 3 < 2)
    assert definitely(lambda: batch >= 1)
    assert not definitely(lambda: batch > 1)
    assert not definitely(lambda: batch <= length)
    assert is_static((2, 0))
    assert not is_static((2, batch))


@pytest.mark.parametrize("bounds", [(0, None), (None, 9223372036854775807), (1, -1), (-2, None), (3, 2), (0, 4), (-5, 7)], ids=str)
def test_slices_of_symbolic_sizes_match_python(bounds: tuple[int | None, int | None], sizes: tuple[int, int]) -> None:
    def evaluated(value: int, size: int) -> int:
        return value if isinstance(value, int) else value._evaluate({"length": size})

    bounds_and_count = clamp_slice(sizes[1], *bounds)
    for size in (1, 2, 6, 9):
        first, last, count = (evaluated(value, size) for value in bounds_and_count)
        assert list(range(size))[first:last] == list(range(size))[slice(*bounds)]
        assert count == len(range(size)[slice(*bounds)])
        assert first <= last


def test_a_whole_symbolic_dimension_needs_no_slice(sizes: tuple[int, int]) -> None:
    assert clamp_slice(sizes[0], 0, 9223372036854775807)[:2] == (0, sizes[0])
    assert clamp_slice(8, 0, sizes[0])[0] == 0
