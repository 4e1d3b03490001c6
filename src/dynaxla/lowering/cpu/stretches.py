"""Products of a few vectors with many, each over the many's own length: attention's scores, and linear layers that see one row.

XLA:CPU's dot reads long float32 operands at a third of the speed of memory if there are several of the few, and half types it first
converts as a whole. Here each vector is cut into stretches. These are added to each other, which is vectorized and reads the many once,
whatever the number of the few; then the numbers of what they give are.
"""

from __future__ import annotations

import numpy as np
from jax import Array, lax

from .. import dtypes
from ..dtypes import DType
from ..promotion import convert
from .in_memory import in_memory

# A vector has so many stretches, or fewer that are so long.
_STRETCHES = 16
_SHORTEST = 8
# The sums of stretches are written to memory and read again: they have to be fewer numbers than the many by this.
_SHARE = 2
# Shorter half types are read faster in other ways.
_LONG = 256


def suits(rows: int, count: int, dtype: DType) -> bool:
    """Whether this is the fastest way for so many of the few, which have `count` numbers each. A single one of float32 XLA multiplies as
    fast."""
    length = _length(count)
    if count % length:
        return False
    if dtype == np.float32:
        return rows > 1 and rows * length * _SHARE <= count
    return dtypes.is_float(dtype) and dtype.itemsize == 2 and rows == 1 and count >= _LONG


def product(x: Array, y: Array) -> Array:
    """x times y for each batch. Half types are added in float32.

    Shape:  x (batch, rows, n) and y (batch, columns, n), of which `suits` is true, give (batch, rows, columns).
    Dtype:  the accumulator's.
    """
    (batch, rows, count), columns, wide = x.shape, y.shape[1], dtypes.accumulator(y.dtype)
    stretches = count // _length(count), _length(count)
    shape = batch, columns, rows, *stretches
    few = lax.broadcast_in_dim(lax.reshape(in_memory(convert(x, wide)), (batch, rows, *stretches)), shape, (0, 2, 3, 4))
    many = lax.broadcast_in_dim(convert(lax.reshape(y, (batch, columns, *stretches)), wide), shape, (0, 1, 3, 4))
    total = in_memory(lax.reduce_sum(lax.mul(few, many), [3]))
    return lax.transpose(in_memory(lax.reduce_sum(total, [3])), (0, 2, 1))


def _length(count: int) -> int:
    return max(count // _STRETCHES, _SHORTEST)
