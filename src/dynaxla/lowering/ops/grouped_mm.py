"""The lowering of `aten._grouped_mm`: products of groups of rows with one matrix per group, as in mixtures of experts."""

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
    """Splits grouped rows into blocks of equal size. Each block belongs to one group; the last block of a group may have fewer valid rows.

    The number of blocks is static: an upper bound for all `ends`. Surplus blocks begin after the last row, and have no valid rows.

    Args:
        rows: The number of rows of all groups.
        ends: The end (exclusive) of each group.

    Returns:
        The block size; and for each block its group, its first row, and its number of valid rows (int32 vectors).
    """
    groups = ends.shape[0]
    size = min(128, max(16, 1 << (-(-rows // groups) - 1).bit_length()))
    block_count = min(rows, rows // size + groups)
    ends = convert(ends, _INT32)
    starts = lax.concatenate([lax.full((1,), 0, _INT32), lax.slice_in_dim(ends, 0, groups - 1)], 0)
    blocks_per_group = lax.div(lax.add(lax.sub(ends, starts), np.int32(size - 1)), np.int32(size))
    block_ends = running_sum(blocks_per_group, 0)
    block_index = lax.iota(_INT32, block_count)
    group = lax.min(convert(searchsorted(block_ends, block_index, right=True), _INT32), np.int32(groups - 1))
    index_in_group = lax.sub(block_index, take_along(lax.sub(block_ends, blocks_per_group), 0, group))
    is_used = lax.lt(index_in_group, take_along(blocks_per_group, 0, group))
    first_row = lax.select(
        is_used, lax.add(take_along(starts, 0, group), lax.mul(index_in_group, np.int32(size))), full_like(block_index, rows)
    )
    valid_rows = lax.max(lax.min(lax.sub(take_along(ends, 0, group), first_row), np.int32(size)), np.int32(0))
    return size, group, first_row, valid_rows


def _pad_zeros(x: Array, dim: int, size: int) -> Array:
    """Returns x, followed by `size` zeros along a dimension."""
    shape = [size if d == dim else extent for d, extent in enumerate(x.shape)]
    return lax.concatenate([x, lax.full(shape, 0, x.dtype)], dim)


def _multiply_by_group(x: Array, weights: Array, ends: Array, ctx: Context) -> Array:
    """Returns each row of x (rows, k) times the matrix of its group in weights (groups, k, n); 0 for rows after the last group."""
    rows, inner = x.shape
    size, *blocks = _blocks(rows, ends)
    x = _pad_zeros(x, 0, size)

    def multiply(out: Array, block: Any) -> tuple[Array, None]:
        group, first_row, _ = block
        block_rows = lax.dynamic_slice(x, (first_row, np.int32(0)), (size, inner))
        product = contract(block_rows, lax.dynamic_index_in_dim(weights, group, keepdims=False), ((1,), (0,)), ctx)
        # The following blocks, or the zeros below, overwrite the rows that a block writes past its group's end.
        return lax.dynamic_update_slice(out, convert(product, out.dtype), (first_row, np.int32(0))), None

    out = lax.full((rows + size, weights.shape[2]), 0, x.dtype)
    out = lax.slice_in_dim(lax.scan(multiply, out, tuple(blocks))[0], 0, rows)
    is_after_groups = lax.ge(lax.broadcasted_iota(_INT32, out.shape, 0), convert(lax.index_in_dim(ends, -1, keepdims=False), _INT32))
    return lax.select(is_after_groups, full_like(out, 0), out)


def _multiply_within_groups(x: Array, y: Array, ends: Array, ctx: Context) -> Array:
    """Returns, for each group, the product of its columns of x (m, columns) and its rows of y (columns, n).

    Shape:  (groups, m, n).
    """
    columns = x.shape[1]
    size, *blocks = _blocks(columns, ends)
    x, y = _pad_zeros(x, 1, size), _pad_zeros(y, 0, size)

    def add(out: Array, block: Any) -> tuple[Array, None]:
        group, first_column, valid_columns = block
        zero = np.int32(0)
        left = lax.dynamic_slice(x, (zero, first_column), (x.shape[0], size))
        right = lax.dynamic_slice(y, (first_column, zero), (size, y.shape[1]))
        left = lax.select(lax.lt(lax.broadcasted_iota(_INT32, left.shape, 1), valid_columns), left, full_like(left, 0))
        right = lax.select(lax.lt(lax.broadcasted_iota(_INT32, right.shape, 0), valid_columns), right, full_like(right, 0))
        total = lax.add(lax.dynamic_index_in_dim(out, group, keepdims=False), contract(left, right, ((1,), (0,)), ctx))
        return lax.dynamic_update_index_in_dim(out, total, group, 0), None

    out = lax.full((ends.shape[0], x.shape[0], y.shape[1]), 0, dtypes.accumulator(x.dtype))
    return lax.scan(add, out, tuple(blocks))[0]


@lowers(aten._grouped_mm.default)
def grouped_mm(
    x: Array, y: Array, offs: Array | None = None, bias: Array | None = None, out_dtype: DType | None = None, *, ctx: Context
) -> Array:
    """Matrix products in groups.

    Args:
        offs: The end (exclusive) of each group along the rows of x, the columns of y, or the contracted dimension.

    Shape:  x (rows, k) and y (groups, k, n) give (rows, n).
            x (groups, m, k) and y (k, columns) give (m, columns).
            x (m, k) and y (k, n), with k in groups, give (groups, m, n).
            x (groups, m, k) and y (groups, k, n), without offs, give (groups, m, n).
    Dtype:  `out_dtype` if given, else that of x.
    Raises: UnsupportedOp with a bias, or without offs unless x and y have rank 3.
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
        out = lax.transpose(_multiply_by_group(lax.transpose(y, (1, 0)), lax.transpose(x, (0, 2, 1)), offs, ctx), (1, 0))
    else:
        out = (_multiply_by_group if y.ndim == 3 else _multiply_within_groups)(x, y, offs, ctx)
    return convert(out, spec.jax_dtype)
