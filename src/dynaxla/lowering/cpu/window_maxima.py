"""The maxima of windows as elementwise work on slices: XLA:CPU vectorizes that, but not a reduction over windows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jax import Array, lax

from ..pool_windows import MOST_TAPS, PoolWindows, lowest, pad


def suits(dims: Sequence[PoolWindows], platform: str) -> bool:
    """Whether it is faster than a reduction over these windows."""
    return platform == "cpu" and sum(dim.kernel for dim in dims) <= MOST_TAPS


def by_taps(dims: Sequence[PoolWindows], x: Array, order: Sequence[int]) -> Array:
    """Each window's maximum, NaN if there is one: one dimension after the other, all taps of all windows at once.

    order: how x lies in the program's memory, dimensions from the slowest to the fastest.
    """
    if not any(any(dim.margins) for dim in dims):
        return _taps(dims, x)
    # Without the barrier, XLA would compute the padding again for each tap, with a branch for each number. What the barrier holds
    # lies in memory in the order of its dimensions, so they are brought into that of x.
    moved = [dataclasses.replace(dim, dim=order.index(dim.dim)) for dim in dims]
    padded = pad(lax.transpose(x, order), lowest(x.dtype), {dim.dim: dim.margins for dim in moved})
    return lax.transpose(_taps(moved, lax.optimization_barrier(padded)), np.argsort(order))


def _taps(dims: Sequence[PoolWindows], x: Array) -> Array:
    """The maxima of the windows of a padded array."""
    for dim in dims:
        x = functools.reduce(lax.max, [dim.tap(x, number) for number in range(dim.kernel)])
    return x
