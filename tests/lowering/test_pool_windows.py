"""The geometry of pooling windows, and reductions over them."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from dynaxla.lowering.pool_windows import PoolWindows, lowest, pad, reduce_window, windows_along

CASES = [(7, 3, 3, 2, 0, 1), (7, 4, 3, 2, 1, 1), (8, 2, 2, 3, 0, 3), (9, 2, 3, 3, 0, 1), (6, 4, 3, 2, 1, 1)]


@pytest.mark.parametrize(("size", "out", "kernel", "stride", "padding", "dilation"), CASES)
def test_elements_of_a_window(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> None:
    """Each window has the elements of its definition; elements beyond the ends are padding."""
    dim = PoolWindows(1, size, out, kernel, stride, padding, dilation)
    x = np.arange(1, 1 + 2 * size).reshape(2, size)
    expected = np.zeros((2, out, kernel), int)
    for window, tap in np.ndindex(out, kernel):
        position = window * stride - padding + tap * dilation
        if 0 <= position < size:
            expected[:, window, tap] = x[:, position]
        if tap == 0:
            assert dim.starts[window] == position
    padded = pad(jnp.asarray(x), 0, {1: dim.edge_padding})
    np.testing.assert_array_equal(np.stack([dim.tap(padded, number) for number in range(kernel)], -1), expected)
    np.testing.assert_array_equal(reduce_window(jnp.asarray(x), 0, "sum", [dim]), expected.sum(-1))
    np.testing.assert_array_equal(reduce_window(jnp.asarray(x), 0, "max", [dim]), expected.max(-1))


def test_one_setting_for_all_dimensions() -> None:
    assert windows_along((6, 8), (3, 4), 4, [2], [], [0, 1]) == [PoolWindows(2, 6, 3, 2, 2, 0, 1), PoolWindows(3, 8, 4, 2, 2, 1, 1)]
    assert windows_along((9,), (2,), 3, [3], [4], [0], [2]) == [PoolWindows(2, 9, 2, 3, 4, 0, 2)]


def test_padding() -> None:
    x = jnp.asarray([[1, 2, 3]])
    assert pad(x, 7, {1: (1, -1)}).tolist() == [[7, 1, 2]]
    assert pad(x, 0, {1: (0, 1)}, interior=1).tolist() == [[1, 0, 2, 0, 3, 0]]


def test_lowest() -> None:
    assert [lowest(np.dtype(name)) for name in ("float32", "int8", "uint8")] == [-math.inf, -128, 0]
    assert lowest(jnp.dtype(jnp.bfloat16)) == -math.inf
