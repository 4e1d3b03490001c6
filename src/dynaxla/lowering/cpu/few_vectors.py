"""Products of a few vectors with many: they need not take longer than to read the many once.

XLA:CPU does that for float32 that lies as its products want it. Half types it first converts as a whole, and what lies otherwise it first
copies. Elementwise work, which it vectorizes, does neither; oneDNN, which takes strides, multiplies float32 where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax import Array, lax

from .. import dtypes
from ..dtypes import DType
from ..promotion import convert
from . import onednn, stretches
from .in_memory import in_memory

# Elementwise work reads the many once for each of the few.
_FEW_ROWS = 4
# Numbers that are left for a plain sum; slices that are added at once (with twice as many XLA does not vectorize).
_LANES = 16
_SLICES = 8


def product(x: Array, y: Array, is_over_last: bool, is_moved: bool, precision: lax.Precision) -> Array:
    """x times y for each batch. Half types are added in float32. is_moved: whether y lies in memory in another order.

    Shape:  x (batch, rows, n) and y (batch, columns, n), or (batch, n, columns) if not `is_over_last`, give (batch, rows, columns).
    Dtype:  the accumulator's.
    """
    way = _way(x.shape[1], x.shape[2], y.dtype, is_over_last, is_moved)
    if way is not None:
        return way(x, y)
    dims = ((2,), (2 if is_over_last else 1,)), ((0,), (0,))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=dtypes.accumulator(y.dtype))


def has_way(rows: int, count: int, dtype: DType, is_over_last: bool) -> bool:
    """Whether `product` is other than XLA's for so many of the few, which have `count` numbers each, and many as they lie."""
    return _way(rows, count, dtype, is_over_last, False) is not None


def _way(rows: int, count: int, dtype: DType, is_over_last: bool, is_moved: bool) -> Callable[[Array, Array], Array] | None:
    if is_over_last and stretches.suits(rows, count, dtype):
        return stretches.product
    if rows <= _FEW_ROWS and (is_moved or dtype.itemsize == 2):
        if is_over_last and count % _LANES == 0:
            return _by_lanes
        if not is_over_last and count % _SLICES == 0 and (rows == 1 or is_moved):
            return _by_slices
    return None


def strided_product(x: Array, y: Array, dims: Sequence[int]) -> Array:
    """x times y for each batch, by oneDNN, which reads y where it lies. dims: of y, those of the batch, its columns' and the summed one.

    Shape:  x (*batch, rows, n) gives (*batch, rows, columns).
    Dtype:  that of both.
    """
    order = tuple(map(dims.index, range(y.ndim)))
    return onednn.matmul(x, lax.transpose(y, dims), False, True, x.dtype, orders=(None, order, None))


def _by_lanes(x: Array, y: Array) -> Array:
    """Over both last dimensions: every 16th number belongs to one sum."""
    wide = dtypes.accumulator(y.dtype)
    (batch, rows, count), columns = x.shape, y.shape[1]
    shape = batch, rows, columns, _LANES
    x = in_memory(convert(x, wide))
    total = lax.full(shape, 0, wide)
    for start in range(0, count, _LANES):
        few = lax.slice_in_dim(x, start, start + _LANES, axis=2)
        many = lax.slice_in_dim(y, start, start + _LANES, axis=2)
        many = lax.broadcast_in_dim(convert(many, wide), shape, (0, 2, 3))
        total = lax.add(total, lax.mul(lax.broadcast_in_dim(few, shape, (0, 1, 3)), many))
    return lax.reduce_sum(total, [3])


def _by_slices(x: Array, y: Array) -> Array:
    """Over the last and the middle dimension: eight stretches are added to each other, and then the numbers of what they give."""
    wide = dtypes.accumulator(y.dtype)
    (batch, rows, count), columns = x.shape, y.shape[2]
    length = count // _SLICES
    shape = batch, rows, length, columns
    x = in_memory(convert(x, wide))
    total = lax.full(shape, 0, wide)
    for start in range(0, count, length):
        few = lax.slice_in_dim(x, start, start + length, axis=2)
        many = lax.slice_in_dim(y, start, start + length, axis=1)
        many = lax.broadcast_in_dim(convert(many, wide), shape, (0, 2, 3))
        total = lax.add(total, lax.mul(lax.broadcast_in_dim(few, shape, (0, 1, 2)), many))
    return lax.reduce_sum(lax.optimization_barrier(total), [2])
