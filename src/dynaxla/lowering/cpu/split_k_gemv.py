"""Matrix products of few rows with many vectors, contracted over the contiguous dimension: attention scores, linear layers with one row.

As in gemv.py, "the few" are the rows of x and "the many" the vectors of y. XLA:CPU's dot reads long float32 operands at a third of
memory bandwidth for several of the few, and at five sixths for one; it converts whole operands of half types first. Here each vector is cut
into chunks, called stretches. Products of stretches are added to each other, which is vectorized and reads y once, in memory order, for any
number of rows of x. Then the elements of these sums are added.

With several of the few, y is processed in blocks of a few thousand vectors, so that the intermediate sums of a block stay in the
processor's inner caches: writing all of them to memory and reading them would take as long as reading y.
"""

from __future__ import annotations

import numpy as np
import torch
from jax import Array, lax

from .. import dtypes
from ..dtypes import DType
from ..promotion import convert
from .materialize import in_memory

# For several rows, a vector is cut into _STRETCHES stretches, or into fewer of length _SHORTEST.
_STRETCHES = 16
_SHORTEST = 8
# The sums of stretches are written and read again: they must have fewer elements than y by this factor.
_SHARE = 2
# For a single row, a vector is cut into parts of _FEWEST to _MOST stretches of length _WIDTH, that of the widest registers: with more
# stretches XLA's loop takes three times as long. A vector that cannot be cut so is cut as for several rows. For vectors shorter than _LONG
# other ways are faster.
_WIDTH = 16
_FEWEST, _MOST = 8, 24
_LONG = 256
# Vectors of y per block and thread.
_BLOCK = 1024


def is_preferred(rows: int, count: int, dtype: DType) -> bool:
    """True if `product` is the fastest way for `rows` rows of `count` elements each."""
    if not dtypes.is_float(dtype) or count % _length(count):
        return False
    if rows > 1:
        return dtype == np.float32 and rows * _length(count) * _SHARE <= count
    return count >= _LONG and (dtype.itemsize == 2 or (dtype == np.float32 and _in_parts(count) is not None))


def product(x: Array, y: Array) -> Array:
    """Returns x times y for each batch. Half types are added in float32.

    Shape:  x (batch, rows, n) and y (batch, columns, n), for which `is_preferred` is true, give (batch, rows, columns).
    Dtype:  the accumulator's.
    """
    x = in_memory(convert(x, dtypes.accumulator(y.dtype)))
    if x.shape[1] == 1:
        return _of_one(x, y)
    (batch, rows, _), columns = x.shape, y.shape[1]
    block = _BLOCK * torch.get_num_threads()
    together = max((size for size in range(1, batch + 1) if batch % size == 0 and size * columns <= block), default=1)
    parts = -(-columns // block)
    length = -(-columns // parts)
    if together == batch and parts == 1:
        return _of_several(x, y)

    def add(index: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        """Computes one block. If the last block of a batch is shorter, it starts earlier and overlaps the one before."""
        out, x = found
        index = lax.convert_element_type(index, np.int32)
        first, start = (function(index, np.int32(parts)) for function in (lax.div, lax.rem))
        first, start, zero = lax.mul(first, np.int32(together)), lax.mul(start, np.int32(length)), np.int32(0)
        many = lax.dynamic_slice(y, (first, start, zero), (together, length, y.shape[2]))
        few = lax.dynamic_slice(x, (first, zero, zero), (together, *x.shape[1:]))
        # Returning x as loop state keeps XLA from treating it as invariant: it would broadcast x to all vectors of y in memory.
        return lax.dynamic_update_slice(out, _of_several(few, many), (first, zero, start)), in_memory(x)

    return lax.fori_loop(0, batch // together * parts, add, (lax.full((batch, rows, columns), 0, x.dtype), x))[0]


def _of_several(x: Array, y: Array) -> Array:
    (batch, rows, count), columns = x.shape, y.shape[1]
    split = count // _length(count), _length(count)
    shape = batch, rows, columns, *split
    few = lax.broadcast_in_dim(lax.reshape(x, (batch, rows, *split)), shape, (0, 1, 3, 4))
    many = lax.broadcast_in_dim(convert(lax.reshape(y, (batch, columns, *split)), x.dtype), shape, (0, 2, 3, 4))
    return in_memory(lax.reduce_sum(in_memory(lax.reduce_sum(lax.mul(few, many), [3])), [3]))


def _of_one(x: Array, y: Array) -> Array:
    (batch, _, count), columns = x.shape, y.shape[1]
    split = _in_parts(count) or (1, count // _length(count), _length(count))
    shape = batch, columns, *split
    few = lax.broadcast_in_dim(lax.reshape(x, (batch, *split)), shape, (0, 2, 3, 4))
    many = convert(lax.reshape(y, shape), x.dtype)
    total = in_memory(lax.reduce_sum(lax.mul(few, many), [3]))
    return lax.expand_dims(in_memory(lax.reduce_sum(total, [2, 3])), [1])


def _in_parts(count: int) -> tuple[int, int, int] | None:
    """Returns the number of parts of a single vector, of stretches per part, and their length; None if `count` cannot be cut so."""
    stretches, rest = divmod(count, _WIDTH)
    numbers = [number for number in range(_FEWEST, _MOST + 1) if stretches % number == 0]
    return (stretches // numbers[-1], numbers[-1], _WIDTH) if numbers and not rest else None


def _length(count: int) -> int:
    return max(count // _STRETCHES, _SHORTEST)
