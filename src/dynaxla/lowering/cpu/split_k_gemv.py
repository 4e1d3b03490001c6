"""Matrix products of few rows (x) with many vectors (y) that are contiguous in memory.

Examples are attention scores, and linear layers with one row.

XLA:CPU's dot has these limits:

- If x has several rows, the dot reads long float32 operands at a third of memory bandwidth.
- If x has one row, the dot reads them at five sixths of memory bandwidth on AMD processors. On Intel processors the dot is faster: it takes
  0.75 to 0.8 of the time of the products of this module (Xeon with AVX-512, 2026-11-30, jaxlib 0.10.2).
- The dot first converts whole operands of half types to float32.

This module splits each vector into chunks (split-K), and adds the elementwise products of all chunks to one chunk of sums. This step is
vectorized, and reads y once, in memory order, for any number of rows of x. Then the elements of the chunk of sums are added.

If x has several rows, y is processed in blocks of a few thousand vectors, so that the intermediate sums of a block stay in the processor's
inner caches. To write all of them to memory and to read them would take as long as to read y.
"""

from __future__ import annotations

import numpy as np
import torch
from jax import Array, lax

from ...runtime import machine
from .. import dtypes
from ..dtypes import DType
from ..promotion import convert
from .materialize import in_memory

# For several rows, a vector is split into _CHUNKS chunks, or into fewer chunks of length _SHORTEST_CHUNK.
_CHUNKS = 16
_SHORTEST_CHUNK = 8
# For several rows, the chunks of sums are written to memory and read again, so they must be small: at least this many elements of a vector
# for each element of the vector's chunks of sums.
_MIN_ELEMENTS_PER_SUM = 2
# For a single row, a vector is split into parts of _FEWEST_CHUNKS to _MOST_CHUNKS chunks of length _SINGLE_ROW_CHUNK_LENGTH, the length of
# the widest registers. With more chunks, XLA's loop takes three times as long. A vector that cannot be split so is split as for several
# rows. For vectors shorter than _MIN_SINGLE_ROW_LENGTH, XLA's dot and the products of gemv.py are faster.
_SINGLE_ROW_CHUNK_LENGTH = 16
_FEWEST_CHUNKS, _MOST_CHUNKS = 8, 24
_MIN_SINGLE_ROW_LENGTH = 256
# The number of vectors of y per block and thread.
_BLOCK = 1024


def is_preferred(rows: int, count: int, dtype: DType) -> bool:
    """True if `product` is expected to be the fastest for `rows` rows of `count` elements each."""
    if not dtypes.is_float(dtype) or count % _chunk_length(count):
        return False
    if rows > 1:
        return dtype == np.float32 and rows * _chunk_length(count) * _MIN_ELEMENTS_PER_SUM <= count
    if not is_preferred_for_computed_y(count):
        return False
    return dtype.itemsize == 2 or (dtype == np.float32 and _in_parts(count) is not None and not machine.is_intel())


def is_preferred_for_computed_y(count: int) -> bool:
    """True if, for y that XLA computes in the same loop, `product` is the fastest for a single row of `count` elements."""
    return count >= _MIN_SINGLE_ROW_LENGTH and count % _chunk_length(count) == 0


def product(x: Array, y: Array) -> Array:
    """Returns x times y for each batch. Half types are added in float32.

    Shape:  x (batch, rows, n) and y (batch, columns, n) give (batch, rows, columns); `is_preferred` must be true for rows and n.
    Dtype:  the accumulator's.
    """
    x = in_memory(convert(x, dtypes.accumulator(y.dtype)))
    if x.shape[1] == 1:
        return _single_row(x, y)
    (batch, rows, _), columns = x.shape, y.shape[1]
    block = _BLOCK * torch.get_num_threads()
    batches_per_block = max((size for size in range(1, batch + 1) if batch % size == 0 and size * columns <= block), default=1)
    blocks_per_batch = -(-columns // block)
    columns_per_block = -(-columns // blocks_per_batch)
    if batches_per_block == batch and blocks_per_batch == 1:
        return _several_rows(x, y)

    def compute_block(block_index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        """Computes one block.

        If the last block of a batch would be shorter, dynamic_slice makes it start earlier, so that it overlaps the previous block.
        """
        out, x = state
        block_index = lax.convert_element_type(block_index, np.int32)
        batch_index, column_index = (function(block_index, np.int32(blocks_per_batch)) for function in (lax.div, lax.rem))
        batch_start = lax.mul(batch_index, np.int32(batches_per_block))
        column_start, zero = lax.mul(column_index, np.int32(columns_per_block)), np.int32(0)
        y_part = lax.dynamic_slice(y, (batch_start, column_start, zero), (batches_per_block, columns_per_block, y.shape[2]))
        x_part = lax.dynamic_slice(x, (batch_start, zero, zero), (batches_per_block, *x.shape[1:]))
        # x is part of the loop state so that XLA does not treat it as invariant, and broadcast it to all vectors of y in memory.
        return lax.dynamic_update_slice(out, _several_rows(x_part, y_part), (batch_start, zero, column_start)), in_memory(x)

    block_count = batch // batches_per_block * blocks_per_batch
    return lax.fori_loop(0, block_count, compute_block, (lax.full((batch, rows, columns), 0, x.dtype), x))[0]


def _several_rows(x: Array, y: Array) -> Array:
    (batch, rows, count), columns = x.shape, y.shape[1]
    split = count // _chunk_length(count), _chunk_length(count)
    shape = batch, rows, columns, *split
    x_part = lax.broadcast_in_dim(lax.reshape(x, (batch, rows, *split)), shape, (0, 1, 3, 4))
    y_part = lax.broadcast_in_dim(convert(lax.reshape(y, (batch, columns, *split)), x.dtype), shape, (0, 2, 3, 4))
    return in_memory(lax.reduce_sum(in_memory(lax.reduce_sum(lax.mul(x_part, y_part), [3])), [3]))


def _single_row(x: Array, y: Array) -> Array:
    (batch, _, count), columns = x.shape, y.shape[1]
    split = _in_parts(count) or (1, count // _chunk_length(count), _chunk_length(count))
    shape = batch, columns, *split
    x_part = lax.broadcast_in_dim(lax.reshape(x, (batch, *split)), shape, (0, 2, 3, 4))
    y_part = convert(lax.reshape(y, shape), x.dtype)
    total = in_memory(lax.reduce_sum(lax.mul(x_part, y_part), [3]))
    # XLA's dot adds the few remaining numbers of each vector faster than XLA's reduction.
    total = lax.reshape(total, (batch * columns, total.size // (batch * columns)))
    return lax.reshape(lax.dot(total, lax.full((total.shape[1], 1), 1, total.dtype), precision=lax.Precision.HIGHEST), (batch, 1, columns))


def _in_parts(count: int) -> tuple[int, int, int] | None:
    """Returns the number of parts of a vector, the chunks per part, and the length of a chunk; None if `count` cannot be split so."""
    chunks, rest = divmod(count, _SINGLE_ROW_CHUNK_LENGTH)
    numbers = [number for number in range(_FEWEST_CHUNKS, _MOST_CHUNKS + 1) if chunks % number == 0]
    return (chunks // numbers[-1], numbers[-1], _SINGLE_ROW_CHUNK_LENGTH) if numbers and not rest else None


def _chunk_length(count: int) -> int:
    """Returns the length of a chunk of a vector of `count` elements that is split as for several rows."""
    return max(count // _CHUNKS, _SHORTEST_CHUNK)
