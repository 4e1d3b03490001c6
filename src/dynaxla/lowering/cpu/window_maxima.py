"""Max pooling as elementwise maxima of slices, which XLA:CPU vectorizes, unlike a reduction over windows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jax import Array, lax

from ..pool_windows import MOST_TAPS, PoolWindows, lowest, pad


def is_preferred(dims: Sequence[PoolWindows], platform: str) -> bool:
    """True if `by_taps` is faster than a reduction over these windows."""
    return platform == "cpu" and sum(dim.kernel for dim in dims) <= MOST_TAPS


def by_taps(dims: Sequence[PoolWindows], x: Array, order: Sequence[int]) -> Array:
    """Returns the maximum of each window, NaN if any element is NaN. Reduces one dimension after the other, with one slice per tap.

    Args:
        dims: The windows along each pooled dimension.
        order: The memory order of x in the program: the dimensions from the slowest-varying to the fastest.
    """
    if not any(any(dim.edge_padding) for dim in dims):
        return _taps(dims, x)
    # Without the barrier, XLA would recompute the padding for each tap, with a branch for each element. The operand of the barrier is
    # row-major in memory, so its dimensions must be in the memory order of x.
    moved = [dataclasses.replace(dim, dim=order.index(dim.dim)) for dim in dims]
    padded = pad(lax.transpose(x, order), lowest(x.dtype), {dim.dim: dim.edge_padding for dim in moved})
    return lax.transpose(_taps(moved, lax.optimization_barrier(padded)), np.argsort(order))


def _taps(dims: Sequence[PoolWindows], x: Array) -> Array:
    """Returns the maxima of the windows of a padded array."""
    for dim in dims:
        x = functools.reduce(lax.max, [dim.tap(x, number) for number in range(dim.kernel)])
    return x
