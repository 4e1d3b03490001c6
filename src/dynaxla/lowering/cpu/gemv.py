"""Matrix products x @ y with few rows in x (GEMV-like), in the time of one read of y from memory.

XLA:CPU's dot takes the time of one read for float32 operands in its preferred layout. But the dot first converts whole operands of half
types, and copies operands in other layouts. So the product is written as elementwise operations, which XLA:CPU vectorizes without such
copies, or as oneDNN's matmul, which accepts strides and half types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax import Array, lax

from .. import dtypes
from ..dtypes import DType
from ..promotion import convert
from . import onednn, onednn_support, split_k_gemv
from .materialize import in_memory

# The maximum number of rows of x for elementwise operations, which read all of y once for each row of x.
_MAX_ROWS = 4
# The number of partial sums per element of the result in `_by_lanes`.
_LANES = 16
# The number of slices that `_by_slices` adds. With twice as many slices, XLA does not vectorize.
_SLICES = 8
# The number of elements of y from which on oneDNN multiplies half types by several rows. On an Intel Xeon with AMX (2026-11-30, one thread,
# jaxlib 0.10.2), caches of 4 heads x 8192 x 64 took 0.7 (scores) and 0.45 (values) of the time of other implementations with 3 rows. With
# 2048 positions, which is this limit, a decoder took 0.92 of the time. Smaller y were not measured: a program that calls oneDNN cannot be
# stored on disk.
_MIN_ONEDNN_ELEMENTS = 1 << 19


def product(x: Array, y: Array, contracts_last_dim: bool, is_permuted: bool, precision: lax.Precision) -> Array:
    """Returns x times y for each batch. Half types are added in float32.

    Args:
        contracts_last_dim: True if the last dimension of y is contracted.
        is_permuted: True if y is not row-major in memory.
        precision: The precision of XLA's dot.

    Shape:  x (batch, rows, n) and y (batch, columns, n), or (batch, n, columns) if not `contracts_last_dim`, give (batch, rows, columns).
    Dtype:  the accumulator's.
    """
    if x.shape[1] > 1 and y.size >= _MIN_ONEDNN_ELEMENTS and y.dtype.itemsize == 2 and not is_permuted and onednn_support.supports(y.dtype):
        return _by_onednn(x, y, contracts_last_dim)
    replacement = _replacement(x.shape[1], x.shape[2], y.dtype, contracts_last_dim, is_permuted)
    if replacement is not None:
        return replacement(x, y)
    dims = ((2,), (2 if contracts_last_dim else 1,)), ((0,), (0,))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=dtypes.accumulator(y.dtype))


def replaces_dot(rows: int, count: int, dtype: DType, contracts_last_dim: bool) -> bool:
    """True if `product` does not use XLA's dot, for an x with `rows` rows of `count` elements, and a row-major y of this dtype."""
    return _replacement(rows, count, dtype, contracts_last_dim, False) is not None


def _replacement(
    rows: int, count: int, dtype: DType, contracts_last_dim: bool, is_permuted: bool
) -> Callable[[Array, Array], Array] | None:
    if contracts_last_dim and split_k_gemv.is_preferred(rows, count, dtype):
        return split_k_gemv.product
    if rows <= _MAX_ROWS and (is_permuted or dtype.itemsize == 2):
        if contracts_last_dim and count % _LANES == 0:
            return _by_lanes
        if not contracts_last_dim and count % _SLICES == 0 and (rows == 1 or is_permuted):
            return _by_slices
    return None


def _by_onednn(x: Array, y: Array, contracts_last_dim: bool) -> Array:
    x, wide = convert(x, y.dtype), dtypes.accumulator(y.dtype)
    if contracts_last_dim:
        return lax.transpose(onednn.matmul(y, x, False, True, wide), (0, 2, 1))
    return onednn.matmul(x, y, False, False, wide)


def strided_product(x: Array, y: Array, dims: Sequence[int]) -> Array:
    """Returns x times y for each batch, computed by oneDNN, which reads y without a copy.

    Args:
        dims: The dimensions of y: the batch dimensions, the dimension of the columns, the contracted dimension.

    Shape:  x (*batch, rows, n) gives (*batch, rows, columns).
    Dtype:  that of x and y.
    """
    order = tuple(map(dims.index, range(y.ndim)))
    return onednn.matmul(x, lax.transpose(y, dims), False, True, x.dtype, orders=(None, order, None))


def _by_lanes(x: Array, y: Array) -> Array:
    """Contracts the last dimensions of x and y. Partial sum i of a result adds the products i, i + _LANES, i + 2 * _LANES, and so on."""
    wide = dtypes.accumulator(y.dtype)
    (batch, rows, count), columns = x.shape, y.shape[1]
    shape = batch, rows, columns, _LANES
    x = in_memory(convert(x, wide))
    total = lax.full(shape, 0, wide)
    for start in range(0, count, _LANES):
        x_part = lax.slice_in_dim(x, start, start + _LANES, axis=2)
        y_part = lax.slice_in_dim(y, start, start + _LANES, axis=2)
        y_part = lax.broadcast_in_dim(convert(y_part, wide), shape, (0, 2, 3))
        total = lax.add(total, lax.mul(lax.broadcast_in_dim(x_part, shape, (0, 1, 3)), y_part))
    return lax.reduce_sum(total, [3])


def _by_slices(x: Array, y: Array) -> Array:
    """Contracts the last dimension of x with the middle one of y: adds _SLICES slices elementwise, then sums the result."""
    wide = dtypes.accumulator(y.dtype)
    (batch, rows, count), columns = x.shape, y.shape[2]
    length = count // _SLICES
    shape = batch, rows, length, columns
    x = in_memory(convert(x, wide))
    total = lax.full(shape, 0, wide)
    for start in range(0, count, length):
        x_part = lax.slice_in_dim(x, start, start + length, axis=2)
        y_part = lax.slice_in_dim(y, start, start + length, axis=1)
        y_part = lax.broadcast_in_dim(convert(y_part, wide), shape, (0, 2, 3))
        total = lax.add(total, lax.mul(lax.broadcast_in_dim(x_part, shape, (0, 1, 2)), y_part))
    return lax.reduce_sum(lax.optimization_barrier(total), [2])
