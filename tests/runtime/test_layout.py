"""Tests of strides as a permutation of a packed array, or with gaps that a copy removes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from dynaxla.runtime.layout import Layout, row_major, storage_extent

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("shape", "stride", "dense", "packed"),
    [
        ((3, 4), (4, 1), True, (3, 4)),
        ((3, 4), (1, 3), True, (4, 3)),
        ((2, 3, 4, 5), (60, 1, 15, 3), True, (2, 4, 5, 3)),
        ((3, 5), (1, 0), True, (3, 1)),
        ((3, 4), (8, 2), False, (3, 4)),
        ((4, 3), (2, 1), False, (4, 3)),
        ((3, 1, 5), (5, 77, 1), True, (3, 1, 5)),
        ((), (), True, ()),
        ((1, 1), (9, 9), True, (1, 1)),
    ],
)
def test_layout(shape: tuple[int, ...], stride: tuple[int, ...], dense: bool, packed: tuple[int, ...]) -> None:
    layout = Layout.of(shape, stride)
    assert layout.dense == dense
    assert layout.packed_shape == packed
    tensor = torch.arange(float(max(storage_extent(shape, stride), 1))).as_strided(shape, stride)
    packed_tensor = layout.pack_tensor(tensor)
    assert packed_tensor.is_contiguous()
    assert (packed_tensor.data_ptr() == tensor.data_ptr()) == dense
    logical = layout.unpack(jax.numpy.asarray(packed_tensor.numpy()))
    assert np.array_equal(np.asarray(logical), tensor.numpy())
    assert np.array_equal(np.asarray(layout.pack(logical)), packed_tensor.numpy())


def test_row_major_of_empty_dimensions() -> None:
    assert row_major((2, 0, 3)) == torch.empty(2, 0, 3).stride()
