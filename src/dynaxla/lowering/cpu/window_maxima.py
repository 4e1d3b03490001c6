"""Max pooling as elementwise maxima of slices, which XLA:CPU vectorizes, unlike a reduction over windows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jax import Array, lax

from ..pool_windows import MAX_UNROLLED_WINDOW, PoolWindows, lowest, pad


def is_preferred(dims: Sequence[PoolWindows], platform: str) -> bool:
    """True if `by_taps` is faster than a reduction over these windows."""
    return platform == "cpu" and sum(windows.kernel for windows in dims) <= MAX_UNROLLED_WINDOW


def by_taps(dims: Sequence[PoolWindows], x: Array, order: Sequence[int]) -> Array:
    """Returns the maximum of each window, NaN if any element is NaN. Reduces one dimension after the other, with one slice per tap.

    Args:
        dims: The windows along each pooled dimension.
        order: The memory order of x in the program: the dimensions from the slowest-varying to the fastest.
    """
    if not any(any(windows.edge_padding) for windows in dims):
        return _maxima_of_slices(dims, x)
    # Without the barrier, XLA would recompute the padding for each tap, with a branch for each element. The operand of the barrier is
    # row-major in memory, so its dimensions must be in the memory order of x.
    dims_in_order = [dataclasses.replace(windows, dim=order.index(windows.dim)) for windows in dims]
    padded = pad(lax.transpose(x, order), lowest(x.dtype), {windows.dim: windows.edge_padding for windows in dims_in_order})
    return lax.transpose(_maxima_of_slices(dims_in_order, lax.optimization_barrier(padded)), np.argsort(order))


def _maxima_of_slices(dims: Sequence[PoolWindows], x: Array) -> Array:
    """Returns the maxima of the windows of a padded array."""
    for windows in dims:
        x = functools.reduce(lax.max, [windows.tap(x, number) for number in range(windows.kernel)])
    return x
