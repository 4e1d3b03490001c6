"""Maxima of pooling windows by slices: equal to a reduction over the windows, also with NaNs and in every memory order."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from dynaxla.lowering.cpu.window_maxima import by_taps, is_preferred
from dynaxla.lowering.pool_windows import MAX_UNROLLED_WINDOW, PoolWindows, reduce_window, windows_along

SETTINGS = {
    "tiles": windows_along((6, 8), (3, 4), 4, [2], [], [0]),
    "overlapping": windows_along((6, 8), (3, 4), 4, [3], [2], [1]),
    "with gaps": windows_along((6, 8), (2, 3), 4, [2, 3], [4, 2], [0, 1], [2, 1]),
    "unread remainder": windows_along((6, 8), (1, 1), 4, [3], [3], [0]),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_equals_reduction(name: str, dtype: type) -> None:
    x = (np.random.default_rng(0).standard_normal((2, 3, 6, 8)) * 20).astype(dtype)
    lowest = -math.inf if dtype is np.float32 else int(np.iinfo(dtype).min)
    if dtype is np.float32:
        x[0, 0, 2, 3], x[0, 1], x[1, 2, 0, 0] = np.nan, -np.inf, np.inf
    expected = jax.jit(lambda x: reduce_window(x, lowest, "max", SETTINGS[name]))(x)
    for order in [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)]:
        result = jax.jit(lambda x, order=order: by_taps(SETTINGS[name], x, order))(x)
        np.testing.assert_array_equal(result, expected)


def test_preferred_for_small_windows_on_the_cpu() -> None:
    def window(kernel: int) -> PoolWindows:
        return PoolWindows(2, 99, 9, kernel, 1, 0, 1)

    half = MAX_UNROLLED_WINDOW // 2
    small, large = [window(half), window(half)], [window(half), window(half + 1)]
    assert [is_preferred(small, "cpu"), is_preferred(large, "cpu"), is_preferred(small, "cuda")] == [True, False, False]
