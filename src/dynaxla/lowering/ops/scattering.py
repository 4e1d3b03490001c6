"""Lowerings of writes by index: some elements of a tensor are replaced by, or combined with, given values.

Indices out of range make the call raise (see indexing.py). If several values are written to one element without a reduction, any of them
may remain, as in eager mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dimensions import wrap
from ..promotion import broadcast_shapes, convert, expand
from ..registry import lowers
from .bounds import argument, require_index
from .indexing import (
    GatherIndices,
    clamp_indices,
    expanded_dims,
    first_along,
    ordinals,
    require_elements,
    require_flat,
    require_indices,
    take_along,
    wrap_negative,
)

# For each reduction, the scatter and the elementwise op that combine a written value with the old value.
_SCATTERS: dict[str, Callable[..., Array]] = {
    "set": lax.scatter,
    "sum": lax.scatter_add,
    "prod": lax.scatter_mul,
    "amax": lax.scatter_max,
    "amin": lax.scatter_min,
}
_COMBINE: dict[str, Callable[[Array, Array], Array]] = {"sum": lax.add, "prod": lax.mul, "amax": lax.max, "amin": lax.min}


def _scatter(x: Array, coordinates: Array, source: Array, numbers: lax.ScatterDimensionNumbers, reduce: str) -> Array:
    """Returns x after a scatter with a reduction of `_SCATTERS`. Half types are combined in float32. Values out of range are dropped."""
    dtype = x.dtype
    if reduce != "set":
        # Bools are 0 and 1: a sum or maximum is "or", a product or minimum is "and".
        reduce = {"sum": "amax", "prod": "amin"}.get(reduce, reduce) if dtypes.is_bool(dtype) else reduce
        compute_dtype = np.dtype(np.uint8) if dtypes.is_bool(dtype) else dtypes.accumulator(dtype)
        x, source = convert(x, compute_dtype), convert(source, compute_dtype)
    return convert(_SCATTERS[reduce](x, coordinates, source, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP), dtype)


def _identity(reduce: str, dtype: dtypes.DType) -> Any:
    """Returns the identity element of a reduction."""
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtypes.is_bool(dtype):
        return reduce == "amin"
    if dtypes.is_float(dtype):
        return -np.inf if reduce == "amax" else np.inf
    return np.iinfo(dtype).min if reduce == "amax" else np.iinfo(dtype).max


def _reduce_into(x: Array, write: Callable[[Array, Array, str], Array], source: Array, reduce: str, include_self: bool) -> Array:
    """Returns x with `source` combined into it.

    Args:
        x: The array.
        write: Called as write(x, source, reduction), with a reduction of `_SCATTERS`. Returns x after the scatter. A mean is computed
            from two calls, for sums and counts.
        source: The values to combine.
        reduce: "sum", "prod", "mean", "amax" or "amin".
        include_self: False excludes the old values of the elements to which values are written. Other elements keep their values.
    """
    start = x
    if not include_self:
        start = write(x, lax.full_like(source, _identity(reduce, x.dtype)), "set")
    if reduce != "mean":
        return write(start, source, reduce)
    compute_dtype = dtypes.accumulator(x.dtype)
    total = write(convert(start, compute_dtype), convert(source, compute_dtype), "sum")
    count = write(lax.full(x.shape, int(include_self), compute_dtype), lax.full(source.shape, 1, compute_dtype), "sum")
    count = lax.select(lax.eq(count, lax.full_like(count, 0)), lax.full_like(count, 1), count)
    if dtypes.is_integer(compute_dtype):
        return convert(jax.numpy.floor_divide(total, count), x.dtype)
    return convert(lax.div(total, count), x.dtype)


def write_slices(x: Array, dim: int, indices: Array, source: Array, reduce: str, batch_dims: Sequence[int] = ()) -> Array:
    """Returns x with source[..., i, ...] combined into x[..., indices[i], ...]. Slices with an index out of range are dropped.

    `reduce` is a key of `_SCATTERS`. `batch_dims` are the other dimensions of x along which the indices vary: `indices` has these
    dimensions too, in the same order.
    """
    if x.size == 0 or source.size == 0:
        return x
    scatter_dims = sorted((dim, *batch_dims))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(d for d in range(x.ndim) if d not in scatter_dims),
        inserted_window_dims=(dim,),
        scatter_dims_to_operand_dims=(dim,),
        operand_batching_dims=tuple(batch_dims),
        scatter_indices_batching_dims=tuple(scatter_dims.index(d) for d in batch_dims),
    )
    return _scatter(x, lax.expand_dims(indices, [indices.ndim]), source, numbers, reduce)


def write_elements(x: Array, dim: int, indices: Array, source: Array, reduce: str) -> Array:
    """Returns x with source[i][j] combined into x[indices[i][j]][j] (for dim 0). `source` may be larger than `indices`."""
    if indices.size == 0 or x.size == 0:
        return x
    if x.ndim == 0 or indices.ndim == 0:
        shape = x.shape
        result = write_elements(lax.reshape(x, (x.size,)), 0, lax.reshape(indices, (1,)), lax.reshape(source, (source.size,)), reduce)
        return lax.reshape(result, shape)
    if source.shape != indices.shape:
        source = lax.slice(source, [0] * source.ndim, indices.shape)
    if indices.shape[dim] == 1 and all(d == dim or size == indices.shape[d] for d, size in enumerate(x.shape)):
        return _write_one_per_row(x, dim, indices, source, reduce)
    if x.ndim == 1:
        return write_slices(x, 0, indices, source, reduce)
    # Each update gets the full coordinates of its element.
    coordinates = [
        lax.expand_dims(indices if d == dim else lax.broadcasted_iota(indices.dtype, indices.shape, d), [x.ndim]) for d in range(x.ndim)
    ]
    all_dims = tuple(range(x.ndim))
    numbers = lax.ScatterDimensionNumbers(update_window_dims=(), inserted_window_dims=all_dims, scatter_dims_to_operand_dims=all_dims)
    return _scatter(x, lax.concatenate(coordinates, x.ndim), source, numbers, reduce)


def _write_one_per_row(x: Array, dim: int, indices: Array, source: Array, reduce: str) -> Array:
    """Returns x after one write per vector along `dim` (as in one-hot), by comparison: far faster in XLA than a scatter."""
    is_written = lax.eq(lax.broadcasted_iota(indices.dtype, x.shape, dim), expand(indices, x.shape))
    source = expand(source, x.shape)
    if reduce != "set":
        combine = _COMBINE[reduce] if not dtypes.is_bool(x.dtype) else (lax.bitwise_or if reduce in ("sum", "amax") else lax.bitwise_and)
        compute_dtype = dtypes.accumulator(x.dtype)
        source = convert(combine(convert(x, compute_dtype), convert(source, compute_dtype)), x.dtype)
    return lax.select(is_written, source, x)


def _write_checked(ctx: Context, x: Array, dim: int, indices: Array, source: Array, reduce: str) -> Array:
    """Returns x with `source` combined into it, as `write_elements` does. The call raises for an index out of range."""
    indices, write = _indices_and_write(ctx, x, wrap(dim, x.ndim), indices)
    require_elements(ctx, x, dim, indices)
    return write(x, convert(source, x.dtype), reduce)


def _indices_and_write(ctx: Context, x: Array, dim: int, indices: Array) -> tuple[Array, Callable[[Array, Array, str], Array]]:
    """Returns the current node's indices, and a function write(into, source, reduce) for any array `into` in the shape of x.

    If the graph has expanded the indices along some dimensions, returns the indices before the expansion, and the function writes whole
    slices.
    """
    shape, expanded = indices.shape, expanded_dims(ctx, x, dim, indices)
    other_dims = [d for d in range(x.ndim) if d != dim and d not in expanded]
    if not expanded or 0 in shape or any(shape[d] != x.shape[d] for d in other_dims):
        return indices, lambda into, source, reduce: write_elements(into, dim, indices, source, reduce)
    unexpanded = first_along(indices, expanded)

    def write(into: Array, source: Array, reduce: str) -> Array:
        return write_slices(into, dim, lax.squeeze(unexpanded, expanded), lax.slice(source, [0] * x.ndim, shape), reduce, other_dims)

    return unexpanded, write


@lowers(aten.scatter.src)
def scatter(x: Array, dim: int, indices: Array, source: Array, *, ctx: Context) -> Array:
    """x with source[i][j] written to x[indices[i][j]][j] (for dim 0); `source` may be larger than `indices`.

    Shape:  that of x.
    Dtype:  that of x.
    """
    return _write_checked(ctx, x, dim, indices, source, "set")


@lowers(aten.scatter.value)
def scatter_value(x: Array, dim: int, indices: Array, value: bool | int | float | complex, *, ctx: Context) -> Array:
    """x with one value written to the elements to which `scatter` writes."""
    return scatter(x, dim, indices, lax.full(indices.shape, convert(value, x.dtype)), ctx=ctx)


@lowers(aten.scatter.reduce)
def scatter_reduce(x: Array, dim: int, indices: Array, source: Array, *, reduce: str, ctx: Context) -> Array:
    """x with elements of `source` added or multiplied (reduce "add" or "multiply") to the elements to which `scatter` writes."""
    return _write_checked(ctx, x, dim, indices, source, {"add": "sum", "multiply": "prod"}[reduce])


@lowers(aten.scatter.value_reduce)
def scatter_value_reduce(x: Array, dim: int, indices: Array, value: bool | int | float | complex, *, reduce: str, ctx: Context) -> Array:
    """x with one value added or multiplied (reduce "add" or "multiply") to the elements to which `scatter` writes."""
    return scatter_reduce(x, dim, indices, lax.full(indices.shape, convert(value, x.dtype)), reduce=reduce, ctx=ctx)


@lowers(aten.scatter_add.default)
def scatter_add(x: Array, dim: int, indices: Array, source: Array, *, ctx: Context) -> Array:
    """x with elements of `source` added to the elements to which `scatter` writes.

    Shape:  that of x.
    Dtype:  that of x.
    """
    return _write_checked(ctx, x, dim, indices, source, "sum")


@lowers(aten.scatter_reduce.two)
def scatter_reduce_two(x: Array, dim: int, indices: Array, source: Array, reduce: str, *, include_self: bool = True, ctx: Context) -> Array:
    """x with elements of `source` combined (sum, prod, mean, amax or amin) into the elements to which `scatter` writes.

    Without `include_self`, the old values of these elements do not take part.

    Shape:  that of x.
    Dtype:  that of x.
    """
    shape = indices.shape
    indices, write = _indices_and_write(ctx, x, wrap(dim, x.ndim), indices)
    require_elements(ctx, x, dim, indices)
    if indices.size == 0 or x.size == 0:
        return x
    if source.ndim and source.shape != shape:
        source = lax.slice(source, [0] * source.ndim, shape)
    return _reduce_into(x, write, convert(source, x.dtype), reduce, include_self)


def _require_in_range(
    ctx: Context, x: Array, dim: int, indices: Array, error: type[Exception] = IndexError, *, from_end: bool = False
) -> None:
    """Adds the run-time check of the indices of index_add, index_copy, index_reduce and index_fill."""
    dim = wrap(dim, x.ndim)
    size = x.shape[dim] if x.ndim else 1
    message = f"index out of range in self: dimension {dim} has size {size}"
    require_index(ctx, indices, size, error, message, argument(ctx, 2), from_end=from_end)


def _with_rank_one_or_more(x: Array, indices: Array, source: Array) -> tuple[Array, Array, Array]:
    """Returns x, indices and source of index_add and similar ops, reshaped to at least one dimension each."""
    is_scalar = x.ndim == 0
    x = lax.reshape(x, (1,)) if is_scalar else x
    source = lax.reshape(source, (1,) * (x.ndim - source.ndim) + source.shape) if source.ndim < x.ndim else source
    return x, lax.reshape(indices, (indices.size,)), source


@lowers(aten.index_add.default)
def index_add(x: Array, dim: int, indices: Array, source: Array, *, alpha: bool | int | float | complex = 1, ctx: Context) -> Array:
    """x with alpha * source[..., i, ...] added to x[..., indices[i], ...].

    Shape:  that of x.
    Dtype:  that of x.
    """
    # Eager mode raises RuntimeError for the first and the last of several dimensions, else IndexError.
    is_first_or_last = x.ndim > 1 and wrap(dim, x.ndim) in (0, x.ndim - 1)
    _require_in_range(ctx, x, dim, indices, RuntimeError if is_first_or_last else IndexError)
    flat, rows, added = _with_rank_one_or_more(x, indices, source)
    if alpha != 1:
        scale = lax.full(added.shape, convert(alpha, added.dtype))
        added = lax.bitwise_and(added, scale) if dtypes.is_bool(added.dtype) else lax.mul(added, scale)
    return lax.reshape(write_slices(flat, wrap(dim, x.ndim), rows, convert(added, x.dtype), "sum"), x.shape)


@lowers(aten.index_copy.default)
def index_copy(x: Array, dim: int, indices: Array, source: Array, *, ctx: Context) -> Array:
    """x with source[..., i, ...] written to x[..., indices[i], ...].

    Shape:  that of x.
    Dtype:  that of x.
    """
    _require_in_range(ctx, x, dim, indices)
    flat, rows, written = _with_rank_one_or_more(x, indices, source)
    return lax.reshape(write_slices(flat, wrap(dim, x.ndim), rows, convert(written, x.dtype), "set"), x.shape)


@lowers(aten.index_reduce.default)
def index_reduce(x: Array, dim: int, indices: Array, source: Array, reduce: str, *, include_self: bool = True, ctx: Context) -> Array:
    """x with source[..., i, ...] combined (prod, mean, amax or amin) into x[..., indices[i], ...].

    Without `include_self`, the old values of these elements do not take part.

    Shape:  that of x.
    Dtype:  that of x.
    """
    _require_in_range(ctx, x, dim, indices)
    flat, rows, written = _with_rank_one_or_more(x, indices, source)
    if x.size == 0 or written.size == 0:
        return x

    def write(into: Array, values: Array, reduction: str) -> Array:
        return write_slices(into, wrap(dim, x.ndim), rows, values, reduction)

    return lax.reshape(_reduce_into(flat, write, convert(written, x.dtype), reduce, include_self), x.shape)


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(x: Array, dim: int, indices: Array, value: Array | bool | int | float | complex, *, ctx: Context) -> Array:
    """x with one value at the given indices of one dimension.

    Shape:  that of x.
    Dtype:  that of x.
    """
    _require_in_range(ctx, x, dim, indices, from_end=True)
    if x.size == 0 or indices.size == 0:
        return x
    rank, dim = x.ndim, wrap(dim, x.ndim)
    flat = x if rank else lax.reshape(x, (1,))
    rows = wrap_negative(lax.reshape(indices, (indices.size,)), flat.shape[dim])
    if flat.ndim == 1:  # the mask below would be as large as x
        return lax.reshape(write_slices(flat, 0, rows, expand(convert(value, x.dtype), rows.shape), "set"), x.shape)
    is_written = write_slices(lax.full((flat.shape[dim],), False), 0, rows, lax.full(rows.shape, True), "set")
    mask = lax.broadcast_in_dim(is_written, flat.shape, [dim])
    return lax.reshape(lax.select(mask, expand(convert(value, x.dtype), flat.shape), flat), x.shape)


@lowers(aten.put.default)
def put(x: Array, indices: Array, source: Array, accumulate: bool = False, *, ctx: Context) -> Array:
    """x with the elements of `source` written (or added, with `accumulate`) at indices of the flattened tensor.

    Shape:  that of x.
    Dtype:  that of x.
    """
    require_flat(ctx, x, indices)
    flat_indices = wrap_negative(lax.reshape(indices, (indices.size,)), x.size)
    values = lax.reshape(source, (source.size,))
    return lax.reshape(write_slices(lax.reshape(x, (x.size,)), 0, flat_indices, values, "sum" if accumulate else "set"), x.shape)


@lowers(aten._index_put_impl.default)
def index_put_impl(
    x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False, unsafe: bool = False, *, ctx: Context
) -> Array:
    """As `index_put`. `unsafe` is ignored: indices are always checked."""
    return index_put(x, indices, values, accumulate, ctx=ctx)


@lowers(aten.index_put.default)
def index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False, *, ctx: Context) -> Array:
    """x[indices] = values, or += with `accumulate`.

    Shape:  that of x; values are broadcast to the shape of x[indices].
    Dtype:  that of x.
    Raises: UnsupportedOp for a mask next to other indices. When the program runs, RuntimeError if the number of values is not that of the
            mask's True elements.
    """
    indices_by_dim = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(dtypes.is_bool(index.dtype) or index.dtype == np.uint8 for _, index in indices_by_dim):
        if len(indices_by_dim) > 1:
            raise UnsupportedOp("index_put with a mask and other indices: the number of elements that it writes depends on data")
        return _masked_put(x, *indices_by_dim[0], convert(values, x.dtype), accumulate, ctx) if x.size else x
    require_indices(ctx, x, indices, GatherIndices.of(x, indices))
    return unsafe_index_put(x, indices, values, accumulate)


@lowers(aten._unsafe_index_put.default)
def unsafe_index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    """As `index_put`, but indices are not checked."""
    if x.size == 0:
        return x
    gather_indices = GatherIndices.of(x, indices)
    target = gather_indices.result_shape(x)
    if 0 in target:
        return x
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=gather_indices.window_dims(x.ndim),
        inserted_window_dims=gather_indices.dims,
        scatter_dims_to_operand_dims=gather_indices.dims,
    )
    source = broadcast_values(convert(values, x.dtype), target)
    return _scatter(x, gather_indices.coordinates, source, numbers, "sum" if accumulate else "set")


def broadcast_values(values: Array, shape: tuple[int, ...]) -> Array:
    """Broadcasts the values of an index_put to `shape`. Leading dimensions of size 1 beyond the rank of `shape` are dropped, as in ATen."""
    if values.ndim > len(shape):
        values = lax.reshape(values, values.shape[values.ndim - len(shape) :])
    return expand(values, shape)


def _masked_put(x: Array, dim: int, mask: Array, values: Array, accumulate: bool, ctx: Context) -> Array:
    """Returns x after x[..., mask, ...] = values, or += with `accumulate`. The mask's dimensions are those of x from `dim` on."""
    mask = convert(mask, np.dtype(np.bool_))
    trailing = x.ndim - dim - mask.ndim
    full_mask = lax.broadcast_in_dim(mask, x.shape, range(dim, dim + mask.ndim))
    count = values.shape[values.ndim - trailing - 1] if values.ndim > trailing else 1
    if count == 1:
        # All True elements get the same values, broadcast to the dimensions of the mask.
        shape = (1,) * max(dim + 1 + trailing - values.ndim, 0) + values.shape
        shape = shape[len(shape) - dim - 1 - trailing :]
        updates = expand(lax.reshape(values, (*shape[:dim], *[1] * mask.ndim, *shape[dim + 1 :])), x.shape)
    else:
        # The n-th True element gets the n-th slice.
        true_count = lax.reduce_sum(convert(mask, np.dtype(np.int64)), range(mask.ndim))
        message = f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result"
        ctx.require(lax.eq(true_count, np.int64(count)), RuntimeError, message)
        values = broadcast_values(values, (*x.shape[:dim], count, *x.shape[dim + mask.ndim :]))
        updates = take_along(values, dim, ordinals(mask))
    if accumulate:
        compute_dtype = dtypes.accumulator(x.dtype)
        combine = lax.bitwise_or if dtypes.is_bool(x.dtype) else lax.add
        updates = convert(combine(convert(x, compute_dtype), convert(updates, compute_dtype)), x.dtype)
    return lax.select(full_mask, updates, x)


@lowers(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad: Array, mask: Array, sizes: Sequence[int]) -> Array:
    """The gradient of masked_scatter's source: the gradients at True elements of the mask, in order, then zeros.

    Shape:  `sizes`, that of the source.
    """
    count = math.prod(sizes)
    shape = broadcast_shapes([mask.shape, grad.shape])
    mask, grad = expand(mask, shape), expand(grad, shape)
    # Writes past the end are dropped.
    positions = lax.select(mask, ordinals(mask), lax.full(grad.shape, count, np.dtype(np.int64)))
    flat = write_slices(lax.full((count,), 0, grad.dtype), 0, lax.reshape(positions, (grad.size,)), lax.reshape(grad, (grad.size,)), "set")
    return lax.reshape(flat, tuple(sizes))


@lowers(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put_accumulate(x: Array, mask: Array, indices: Sequence[Array | None], values: Array) -> Array:
    """x[indices] += values where the mask is True. Indices under a False mask may be out of range.

    Shape:  that of x.
    Dtype:  that of x.
    """
    values = lax.select(expand(mask, values.shape), values, lax.full_like(values, 0))
    return unsafe_index_put(x, clamp_indices(x, indices), values, accumulate=True)


@lowers(aten.nonzero_static.default)
def nonzero_static(x: Array, *, size: int, fill_value: int = -1) -> Array:
    """The coordinates of the first `size` nonzero elements, one row for each. The remaining rows hold `fill_value`.

    Shape:  (size, dimensions of x).
    Dtype:  int64.
    """
    result = lax.full((size, x.ndim), fill_value, np.dtype(np.int64))
    if x.ndim == 0 or x.size == 0 or size == 0:
        return result
    hits = x if dtypes.is_bool(x.dtype) else lax.ne(x, lax.full_like(x, 0))
    # Rows past the end are dropped.
    rows = lax.select(hits, ordinals(hits), lax.full(x.shape, size, np.dtype(np.int64)))
    coordinates = [lax.reshape(lax.broadcasted_iota("int64", x.shape, dim), (x.size, 1)) for dim in range(x.ndim)]
    return write_slices(result, 0, lax.reshape(rows, (x.size,)), lax.concatenate(coordinates, 1), "set")
