"""Products of a few vectors with many, all of float32, each over the many's own length, as attention's scores are.

XLA:CPU's dot reads long operands at a third of the speed of memory then. Here each vector is cut into stretches of eight numbers. Stretches
are added to each other, which is vectorized and reads the many once, whatever the number of the few; then the eight numbers are.
"""

from __future__ import annotations

import numpy as np
from jax import Array, lax

from ..dtypes import DType
from .in_memory import in_memory

_STRETCH = 8
# The sums of stretches are written to memory and read again: they have to be fewer numbers than the many by this.
_SHARE = 2


def suits(rows: int, count: int, dtype: DType) -> bool:
    """Whether this is the fastest way for so many of the few, which have `count` numbers each. A single one XLA multiplies faster."""
    return dtype == np.float32 and rows > 1 and count % _STRETCH == 0 and rows * _STRETCH * _SHARE <= count


def product(x: Array, y: Array) -> Array:
    """x times y for each batch.

    Shape:  x (batch, rows, n) and y (batch, columns, n), n a multiple of eight, give (batch, rows, columns).
    Dtype:  float32, as theirs.
    """
    (batch, rows, count), columns = x.shape, y.shape[1]
    shape = batch, columns, rows, count // _STRETCH, _STRETCH
    few = lax.broadcast_in_dim(lax.reshape(in_memory(x), (batch, rows, *shape[3:])), shape, (0, 2, 3, 4))
    many = lax.broadcast_in_dim(lax.reshape(y, (batch, columns, *shape[3:])), shape, (0, 1, 3, 4))
    total = in_memory(lax.reduce_sum(lax.mul(few, many), [3]))
    return lax.transpose(in_memory(lax.reduce_sum(total, [3])), (0, 2, 1))
