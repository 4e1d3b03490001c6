"""Maxima of windows by slices are those of a reduction over the windows, NaNs included, whatever the order in memory."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from dynaxla.lowering.cpu.window_maxima import by_taps, is_preferred
from dynaxla.lowering.pool_windows import MOST_TAPS, PoolWindows, reduce_window, windows_along

SETTINGS = {
    "tiles": windows_along((6, 8), (3, 4), 4, [2], [], [0]),
    "overlapping": windows_along((6, 8), (3, 4), 4, [3], [2], [1]),
    "apart": windows_along((6, 8), (2, 3), 4, [2, 3], [4, 2], [0, 1], [2, 1]),
    "a rest unread": windows_along((6, 8), (1, 1), 4, [3], [3], [0]),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_as_a_reduction(name: str, dtype: type) -> None:
    x = (np.random.default_rng(0).standard_normal((2, 3, 6, 8)) * 20).astype(dtype)
    lowest = -math.inf if dtype is np.float32 else int(np.iinfo(dtype).min)
    if dtype is np.float32:
        x[0, 0, 2, 3], x[0, 1], x[1, 2, 0, 0] = np.nan, -np.inf, np.inf
    expected = jax.jit(lambda x: reduce_window(x, lowest, "max", SETTINGS[name]))(x)
    for order in [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)]:
        found = jax.jit(lambda x, order=order: by_taps(SETTINGS[name], x, order))(x)
        np.testing.assert_array_equal(found, expected)


def test_where_it_is_faster() -> None:
    def window(kernel: int) -> PoolWindows:
        return PoolWindows(2, 99, 9, kernel, 1, 0, 1)

    half = MOST_TAPS // 2
    at_most, more = [window(half), window(half)], [window(half), window(half + 1)]
    assert [is_preferred(at_most, "cpu"), is_preferred(more, "cpu"), is_preferred(at_most, "cuda")] == [True, False, False]
