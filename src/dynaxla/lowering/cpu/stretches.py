"""Products of a few vectors with many, each over the many's own length: attention's scores, and linear layers that see one row.

XLA:CPU's dot reads long float32 operands at a third of the speed of memory if there are several of the few, and at five sixths if there is
one; half types it first converts as a whole. Here each vector is cut into stretches. These are added to each other, which is vectorized and
reads the many once, in the order in which they lie, whatever the number of the few; then the numbers of what they give are.
"""

from __future__ import annotations

import numpy as np
from jax import Array, lax

from .. import dtypes
from ..dtypes import DType
from ..promotion import convert
from .in_memory import in_memory

# One of several vectors has so many stretches, or fewer that are so long.
_STRETCHES = 16
_SHORTEST = 8
# The sums of stretches are written to memory and read again: they have to be fewer numbers than the many by this.
_SHARE = 2
# A single vector has parts of stretches as long as the widest registers, at least and at most so many: of more XLA makes a loop that takes
# three times as long. A vector without such parts is cut as one of several. Shorter ones are read faster in other ways.
_WIDTH = 16
_FEWEST, _MOST = 8, 24
_LONG = 256


def suits(rows: int, count: int, dtype: DType) -> bool:
    """Whether this is the fastest way for so many of the few, which have `count` numbers each."""
    if not dtypes.is_float(dtype) or count % _length(count):
        return False
    if rows > 1:
        return dtype == np.float32 and rows * _length(count) * _SHARE <= count
    return count >= _LONG and (dtype.itemsize == 2 or (dtype == np.float32 and _in_parts(count) is not None))


def product(x: Array, y: Array) -> Array:
    """x times y for each batch. Half types are added in float32.

    Shape:  x (batch, rows, n) and y (batch, columns, n), of which `suits` is true, give (batch, rows, columns).
    Dtype:  the accumulator's.
    """
    (batch, rows, count), columns, wide = x.shape, y.shape[1], dtypes.accumulator(y.dtype)
    split = (_in_parts(count) if rows == 1 else None) or (1, count // _length(count), _length(count))
    shape = batch, columns, rows, *split
    few = lax.broadcast_in_dim(lax.reshape(in_memory(convert(x, wide)), (batch, rows, *split)), shape, (0, 2, 3, 4, 5))
    many = lax.broadcast_in_dim(convert(lax.reshape(y, (batch, columns, *split)), wide), shape, (0, 1, 3, 4, 5))
    total = in_memory(lax.reduce_sum(lax.mul(few, many), [4]))
    return lax.transpose(in_memory(lax.reduce_sum(total, [3, 4])), (0, 2, 1))


def _in_parts(count: int) -> tuple[int, int, int] | None:
    """The parts that a single vector has, the stretches of each, and their length; None if so many numbers have no such parts."""
    stretches, rest = divmod(count, _WIDTH)
    numbers = [number for number in range(_FEWEST, _MOST + 1) if stretches % number == 0]
    return (stretches // numbers[-1], numbers[-1], _WIDTH) if numbers and not rest else None


def _length(count: int) -> int:
    return max(count // _STRETCHES, _SHORTEST)
