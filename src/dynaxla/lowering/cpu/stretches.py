"""Products of a few vectors with many, each over the many's own length: attention's scores, and linear layers that see one row.

XLA:CPU's dot reads long float32 operands at a third of the speed of memory if there are several of the few, and at five sixths if there is
one; half types it first converts as a whole. Here each vector is cut into stretches. These are added to each other, which is vectorized and
reads the many once, in the order in which they lie, whatever the number of the few; then the numbers of what they give are.

For several of the few, the sums of stretches of a few thousand of the many are made and added up before those of the next, while they are
still in the processor's nearer caches: to memory and back they would take as long as the many themselves.
"""

from __future__ import annotations

import numpy as np
import torch
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
# Of the many, whose sums of stretches are in memory at once for each thread.
_BLOCK = 1024


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
        """With the products of one block. The last one of a batch begins sooner, if the rest is shorter."""
        out, x = found
        index = lax.convert_element_type(index, np.int32)
        first, start = (function(index, np.int32(parts)) for function in (lax.div, lax.rem))
        first, start, zero = lax.mul(first, np.int32(together)), lax.mul(start, np.int32(length)), np.int32(0)
        many = lax.dynamic_slice(y, (first, start, zero), (together, length, y.shape[2]))
        few = lax.dynamic_slice(x, (first, zero, zero), (together, *x.shape[1:]))
        # What the loop does not change XLA would repeat for each of the many, outside and in memory.
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
    """The parts that a single vector has, the stretches of each, and their length; None if so many numbers have no such parts."""
    stretches, rest = divmod(count, _WIDTH)
    numbers = [number for number in range(_FEWEST, _MOST + 1) if stretches % number == 0]
    return (stretches // numbers[-1], numbers[-1], _WIDTH) if numbers and not rest else None


def _length(count: int) -> int:
    return max(count // _STRETCHES, _SHORTEST)
