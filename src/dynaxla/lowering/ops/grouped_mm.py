"""`aten._grouped_mm`: products of groups of rows with one matrix per group, as in mixtures of experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dtypes import DType
from ..promotion import convert, full_like
from ..registry import lowers
from .indexing import take_along
from .matmul import contract
from .scans import running_sum
from .sorting import searchsorted

_INT32 = np.dtype(np.int32)


def _blocks(rows: int, ends: Array) -> tuple[int, Array, Array, Array]:
    """Splits rows into blocks of one size, none of which extends into the next group.

    Returns the block size and, for each block, its group, its first row, and its number of rows. Surplus blocks begin after the last row
    and have no rows.
    """
    groups = ends.shape[0]
    size = min(128, max(16, 1 << (-(-rows // groups) - 1).bit_length()))
    count = min(rows, rows // size + groups)
    ends = convert(ends, _INT32)
    begins = lax.concatenate([lax.full((1,), 0, _INT32), lax.slice_in_dim(ends, 0, groups - 1)], 0)
    blocks = lax.div(lax.add(lax.sub(ends, begins), np.int32(size - 1)), np.int32(size))
    last = running_sum(blocks, 0)
    place = lax.iota(_INT32, count)
    group = lax.min(convert(searchsorted(last, place, right=True), _INT32), np.int32(groups - 1))
    within = lax.sub(place, take_along(lax.sub(last, blocks), 0, group))
    used = lax.lt(within, take_along(blocks, 0, group))
    first = lax.select(used, lax.add(take_along(begins, 0, group), lax.mul(within, np.int32(size))), full_like(place, rows))
    filled = lax.max(lax.min(lax.sub(take_along(ends, 0, group), first), np.int32(size)), np.int32(0))
    return size, group, first, filled


def _padded(x: Array, dim: int, size: int) -> Array:
    shape = [size if d == dim else extent for d, extent in enumerate(x.shape)]
    return lax.concatenate([x, lax.full(shape, 0, x.dtype)], dim)


def _each_rows_group(x: Array, weights: Array, ends: Array, ctx: Context) -> Array:
    """Each row of x (rows, k) times the matrix of its group in weights (groups, k, n); 0 for rows after the last group."""
    rows, inner = x.shape
    size, *blocks = _blocks(rows, ends)
    x = _padded(x, 0, size)

    def multiply(out: Array, block: Any) -> tuple[Array, None]:
        group, first, _ = block
        piece = lax.dynamic_slice(x, (first, np.int32(0)), (size, inner))
        product = contract(piece, lax.dynamic_index_in_dim(weights, group, keepdims=False), ((1,), (0,)), ctx)
        # Rows that a block writes past its group's end are overwritten by the following blocks.
        return lax.dynamic_update_slice(out, convert(product, out.dtype), (first, np.int32(0))), None

    out = lax.full((rows + size, weights.shape[2]), 0, x.dtype)
    out = lax.slice_in_dim(lax.scan(multiply, out, tuple(blocks))[0], 0, rows)
    behind = lax.ge(lax.broadcasted_iota(_INT32, out.shape, 0), convert(lax.index_in_dim(ends, -1, keepdims=False), _INT32))
    return lax.select(behind, full_like(out, 0), out)


def _each_groups_product(x: Array, y: Array, ends: Array, ctx: Context) -> Array:
    """For each group, the product of its columns of x (m, columns) and its rows of y (columns, n): (groups, m, n)."""
    columns = x.shape[1]
    size, *blocks = _blocks(columns, ends)
    x, y = _padded(x, 1, size), _padded(y, 0, size)

    def add(out: Array, block: Any) -> tuple[Array, None]:
        group, first, filled = block
        zero = np.int32(0)
        left = lax.dynamic_slice(x, (zero, first), (x.shape[0], size))
        right = lax.dynamic_slice(y, (first, zero), (size, y.shape[1]))
        left = lax.select(lax.lt(lax.broadcasted_iota(_INT32, left.shape, 1), filled), left, full_like(left, 0))
        right = lax.select(lax.lt(lax.broadcasted_iota(_INT32, right.shape, 0), filled), right, full_like(right, 0))
        total = lax.add(lax.dynamic_index_in_dim(out, group, keepdims=False), contract(left, right, ((1,), (0,)), ctx))
        return lax.dynamic_update_index_in_dim(out, total, group, 0), None

    out = lax.full((ends.shape[0], x.shape[0], y.shape[1]), 0, dtypes.accumulator(x.dtype))
    return lax.scan(add, out, tuple(blocks))[0]


@lowers(aten._grouped_mm.default)
def grouped_mm(
    x: Array, y: Array, offs: Array | None = None, bias: Array | None = None, out_dtype: DType | None = None, *, ctx: Context
) -> Array:
    """Matrix products in groups.

    offs: the end (exclusive) of each group along the rows of x, the columns of y, or the dimension that is summed over.

    Shape:  x (rows, k) and y (groups, k, n) give (rows, n).
            x (groups, m, k) and y (k, columns) give (m, columns).
            x (m, k) and y (k, n), with k in groups, give (groups, m, n).
            x (groups, m, k) and y (groups, k, n), without offs, give (groups, m, n).
    Dtype:  `out_dtype` if given, else that of x.
    Raises: UnsupportedOp with a bias, or without offs where groups need it.
    """
    if bias is not None:
        raise UnsupportedOp("_grouped_mm with a bias")
    spec = ctx.output
    if 0 in (*x.shape, *y.shape):
        return lax.full(spec.shape, 0, spec.jax_dtype)
    if x.ndim == 3 and y.ndim == 3:
        out = contract(x, y, ((2,), (1,)), ctx, batch=((0,), (0,)))
    elif offs is None:
        raise UnsupportedOp("_grouped_mm of a matrix without the ends of its groups (offs)")
    elif x.ndim == 3:
        out = lax.transpose(_each_rows_group(lax.transpose(y, (1, 0)), lax.transpose(x, (0, 2, 1)), offs, ctx), (1, 0))
    else:
        out = (_each_rows_group if y.ndim == 3 else _each_groups_product)(x, y, offs, ctx)
    return convert(out, spec.jax_dtype)
