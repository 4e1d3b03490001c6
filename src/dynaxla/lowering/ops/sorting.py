"""Lowerings of sorting, selection by rank (topk, median, mode), and search in sorted tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dimensions import definitely, slice_dim, wrap
from ..promotion import convert, expand, result_type
from ..registry import lowers
from .bounds import require_index, require_static
from .comparison import is_nan
from .indexing import gather, take_along
from .reductions import apply_keepdim, first_index

_INT32 = np.dtype(np.int32)
_INT64 = np.dtype(np.int64)


def sort_with_indices(x: Array, dim: int, descending: bool = False) -> tuple[Array, Array]:
    """Returns x stably sorted along `dim`, and the original index of each element, in int32 if it can hold all indices, else int64.

    NaN is the largest value, and -0.0 equals 0.0.
    """
    dtype = "int32" if definitely(lambda: x.shape[dim] < 2**31) else "int64"
    indices = lax.broadcasted_iota(dtype, x.shape, dim)
    if descending:
        # Sorting the reversed tensor and reversing the result keeps equal elements in order, and puts NaN first.
        x, indices = lax.rev(x, [dim]), lax.rev(indices, [dim])
    values, sorted_indices = lax.sort((x, indices), dimension=dim, is_stable=True, num_keys=1)
    return (lax.rev(values, [dim]), lax.rev(sorted_indices, [dim])) if descending else (values, sorted_indices)


@lowers(aten.sort.stable)
def sort_stable(x: Array, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """x sorted along one dimension, and the original index of each element. Always stable; nan is the largest value.

    Shape:  both: that of x.
    Dtype:  that of x, and int64 for the indices.
    """
    if x.ndim == 0 or x.size == 0:
        return x, lax.full(x.shape, 0, _INT64)
    values, indices = sort_with_indices(x, wrap(dim, x.ndim), descending)
    return values, convert(indices, _INT64)


@lowers(aten.sort.default)
def sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """As `sort_stable`."""
    return sort_stable(x, dim=dim, descending=descending)


@lowers(aten.argsort.default)
def argsort(x: Array, dim: int = -1, descending: bool = False) -> Array:
    """The indices that sort x along one dimension. Always stable.

    Shape:  that of x.
    Dtype:  int64.
    """
    return sort(x, dim, descending)[1]


@lowers(aten.argsort.stable)
def argsort_stable(x: Array, *, stable: bool, dim: int = -1, descending: bool = False) -> Array:
    """As `argsort`."""
    return sort(x, dim, descending)[1]


@lowers(aten.topk.default)
def topk(x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    """The k largest (or smallest) elements along one dimension, and their indices. nan is the largest value.

    Of equal elements, the first ones are taken (eager mode leaves the choice open). The result is always sorted.

    Shape:  both: that of x, with size k at `dim`.
    Dtype:  that of x, and int64 for the indices.
    """
    if x.ndim == 0:
        return (x, lax.full((), 0, _INT64)) if k else (lax.full((0,), 0, x.dtype), lax.full((0,), 0, _INT64))
    dim = wrap(dim, x.ndim)
    if k == 0 or x.size == 0:
        shape = [k if d == dim else size for d, size in enumerate(x.shape)]
        return lax.full(shape, 0, x.dtype), lax.full(shape, 0, _INT64)
    if not largest or dtypes.is_bool(x.dtype):
        values, indices = sort_with_indices(x, dim, descending=largest)
        return slice_dim(values, dim, 0, k), convert(slice_dim(indices, dim, 0, k), _INT64)
    if dtypes.is_float(x.dtype):
        # XLA orders a NaN by its sign bit, which x86 sets in each NaN that it computes.
        x = lax.select(is_nan(x), lax.full_like(x, np.nan), x)
    order = [d for d in range(x.ndim) if d != dim] + [dim]
    values, indices = lax.top_k(lax.transpose(x, order) if dim != x.ndim - 1 else x, k)
    if dim != x.ndim - 1:
        inverse = np.argsort(order)
        values, indices = lax.transpose(values, inverse), lax.transpose(indices, inverse)
    return values, convert(indices, _INT64)


def _select_rank(x: Array, dim: int, rank: Array | int, keepdim: bool) -> tuple[Array, Array]:
    """Returns the element of a rank (0 is the smallest) along `dim`, and its index. An array of ranks has size 1 in `dim`."""
    values, indices = sort_with_indices(x, dim)
    if isinstance(rank, int):
        chosen = slice_dim(values, dim, rank, rank + 1), slice_dim(indices, dim, rank, rank + 1)
    else:
        chosen = gather(values, dim, rank), gather(indices, dim, rank)
    value, index = (lax.squeeze(item, [dim]) for item in chosen)
    return apply_keepdim(value, x, (dim,), keepdim), convert(apply_keepdim(index, x, (dim,), keepdim), _INT64)


def _rank_0_result(x: Array) -> tuple[Array, Array]:
    return x, lax.full(x.shape, 0, _INT64)


def _empty_result(x: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    shape = [1 if d == dim else size for d, size in enumerate(x.shape) if d != dim or keepdim]
    return lax.full(shape, 0, x.dtype), lax.full(shape, 0, _INT64)


@lowers(aten.kthvalue.default)
def kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The k-th smallest element along one dimension, counted from 1, and its index. nan is the largest value.

    Shape:  x without `dim`; with `keepdim` it has size 1. Both results have this shape.
    Dtype:  that of x, and int64 for the indices.
    """
    if x.ndim == 0:
        return _rank_0_result(x)
    dim = wrap(dim, x.ndim)
    return _empty_result(x, dim, keepdim) if x.size == 0 else _select_rank(x, dim, k - 1, keepdim)


def _nan_count(x: Array, dim: int) -> Array:
    return lax.expand_dims(lax.reduce_sum(convert(is_nan(x), _INT32), (dim,)), [dim])


@lowers(aten.median.dim)
def median_dim(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The median along one dimension (the lower of two middle elements), and its index. If there are nans, the first nan.

    Shape:  x without `dim`; with `keepdim` it has size 1. Both results have this shape.
    Dtype:  that of x, and int64 for the indices.
    """
    if x.ndim == 0:
        return _rank_0_result(x)
    dim = wrap(dim, x.ndim)
    if x.size == 0:
        return _empty_result(x, dim, keepdim)
    count = x.shape[dim]
    middle = (count - 1) // 2
    if not dtypes.is_float(x.dtype):
        return _select_rank(x, dim, middle, keepdim)
    nans = _nan_count(x, dim)
    rank = lax.select(lax.gt(nans, lax.full_like(nans, 0)), lax.sub(lax.full_like(nans, count), nans), lax.full_like(nans, middle))
    return _select_rank(x, dim, rank, keepdim)


@lowers(aten.nanmedian.dim)
def nanmedian_dim(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The median of the elements that are not nan, and its index; nan if all are nan.

    Shape:  x without `dim`; with `keepdim` it has size 1. Both results have this shape.
    Dtype:  that of x, and int64 for the indices.
    """
    if x.ndim == 0 or not dtypes.is_float(x.dtype) or x.size == 0:
        return median_dim(x, dim, keepdim)
    dim = wrap(dim, x.ndim)
    nans = _nan_count(x, dim)
    rank = lax.shift_right_arithmetic(lax.sub(lax.full_like(nans, x.shape[dim] - 1), nans), lax.full_like(nans, 1))
    return _select_rank(x, dim, lax.max(rank, lax.full_like(rank, 0)), keepdim)


def _of_flattened(x: Array, along_dim: Callable[..., tuple[Array, Array]]) -> Array:
    """Returns the value of `along_dim` for the flattened x. For an empty x, returns nan, or for integers the lowest one, as in ATen."""
    if x.size == 0:
        return lax.full((), np.nan if dtypes.is_float(x.dtype) else np.iinfo(x.dtype).min, x.dtype)
    return along_dim(lax.reshape(x, (x.size,)), 0)[0]


@lowers(aten.median.default)
def median(x: Array) -> Array:
    """The median of all elements (the lower of two middle ones); nan if any element is nan.

    Shape:  [].
    Dtype:  that of x.
    """
    return _of_flattened(x, median_dim)


@lowers(aten.nanmedian.default)
def nanmedian(x: Array) -> Array:
    """The median of all elements that are not nan; nan if all are nan.

    Shape:  [].
    Dtype:  that of x.
    """
    return _of_flattened(x, nanmedian_dim)


@lowers(aten.mode.default)
def mode(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The most frequent element along one dimension (the smallest of several), and the index of its last occurrence.

    Shape:  x without `dim`; with `keepdim` it has size 1. Both results have this shape.
    Dtype:  that of x, and int64 for the indices.
    """
    if x.ndim == 0:
        return _rank_0_result(x)
    dim = wrap(dim, x.ndim)
    if x.size == 0:
        return _empty_result(x, dim, keepdim)
    count = x.shape[dim]
    values, indices = sort_with_indices(x, dim)
    position = lax.broadcasted_iota("int32", x.shape, dim)
    if count > 1:
        changes = lax.ne(slice_dim(values, dim, 1, count), slice_dim(values, dim, 0, count - 1))
        first = lax.full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), True)
        starts = lax.concatenate([first, changes], dim)
        start = lax.cummax(lax.select(starts, position, lax.full_like(position, 0)), dim)
        length = lax.sub(position, start)
        longest = lax.expand_dims(lax.reduce_max(length, (dim,)), [dim])
        # The last element of the first run of the greatest length.
        rank = lax.expand_dims(first_index(lax.eq(length, expand(longest, x.shape)), dim), [dim])
        values, indices = gather(values, dim, rank), gather(indices, dim, rank)
    value, index = lax.squeeze(values, [dim]), lax.squeeze(indices, [dim])
    return apply_keepdim(value, x, (dim,), keepdim), convert(apply_keepdim(index, x, (dim,), keepdim), _INT64)


def _search_rows(sequence: Array, values: Array, right: bool) -> Array:
    """Returns the number of elements before the first one that is not smaller (with `right`: greater) than each value of the same row.

    The comparisons are the same as in eager mode, so that a NaN gets the same index.

    Shape:  sequence [rows, length], sorted; values [rows, count].
    """
    rows, length = sequence.shape
    is_after = lax.gt if right else lax.ge

    if length <= 32:
        shape = (rows, values.shape[1], length)
        comes_after = is_after(lax.broadcast_in_dim(sequence, shape, (0, 2)), lax.broadcast_in_dim(values, shape, (0, 1)))
        positions = lax.select(comes_after, lax.broadcasted_iota("int64", shape, 2), lax.full(shape, length, _INT64))
        return lax.reduce_min(positions, (2,))

    flat = lax.reshape(sequence, (rows * length,))
    base = lax.mul(lax.broadcasted_iota("int64", values.shape, 0), lax.full(values.shape, length, _INT64))
    one = lax.full(values.shape, 1, _INT64)

    def halve(_: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = state
        middle = lax.shift_right_arithmetic(lax.add(low, high), one)
        goes_right = lax.bitwise_not(is_after(take_along(flat, 0, lax.add(base, middle)), values))
        is_open = lax.lt(low, high)
        return (
            lax.select(lax.bitwise_and(is_open, goes_right), lax.add(middle, one), low),
            lax.select(lax.bitwise_and(is_open, lax.bitwise_not(goes_right)), middle, high),
        )

    start = (lax.full(values.shape, 0, _INT64), lax.full(values.shape, length, _INT64))
    return lax.fori_loop(0, length.bit_length(), halve, start)[0]


@lowers(aten.searchsorted.Tensor)
def checked_searchsorted(
    sorted_sequence: Array,
    x: Array,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
    ctx: Context,
) -> Array:
    """The indices at which x would be inserted in each row of a sorted sequence, left or right of equal elements.

    With `sorter`, the sequence is first permuted by these indices, which are checked at run time.

    Shape:  that of x. The leading dimensions of x and of the sequence are equal, unless the sequence has one dimension.
    Dtype:  int32 with `out_int32`, else int64.
    """
    if sorter is not None:
        message = "torch.searchsorted(): sorter index out of range"
        require_index(ctx, sorter, sorted_sequence.shape[-1], RuntimeError, message, ctx.node.kwargs.get("sorter"))
        sorted_sequence = gather(sorted_sequence, -1, sorter)
    return searchsorted(sorted_sequence, x, out_int32=out_int32, right=side == "right" if side is not None else right)


def searchsorted(sorted_sequence: Array, x: Array, *, out_int32: bool = False, right: bool = False) -> Array:
    """Returns the indices at which x would be inserted in each row of a sorted sequence, left (or with `right`, right) of equal elements.

    Shape:  that of x. The leading dimensions of x and of the sequence are equal, unless the sequence has one dimension.
    Dtype:  int32 with `out_int32`, else int64.
    """
    out = _INT32 if out_int32 else _INT64
    dtype = result_type([sorted_sequence, x])
    length = sorted_sequence.shape[-1]
    if x.size == 0 or length == 0:
        return lax.full(x.shape, 0, out)
    rows = sorted_sequence.size // length
    indices = _search_rows(
        convert(lax.reshape(sorted_sequence, (rows, length)), dtype),
        convert(lax.reshape(x, (rows, x.size // rows)), dtype),
        right,
    )
    return convert(lax.reshape(indices, x.shape), out)


@lowers(aten.searchsorted.Scalar)
def searchsorted_scalar(
    sorted_sequence: Array,
    x: int | float,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
    ctx: Context,
) -> Array:
    """The index at which a number would be inserted in a sorted sequence of one dimension.

    Shape:  [].
    Dtype:  int32 with `out_int32`, else int64.
    """
    value = convert(x, result_type([sorted_sequence, x]))
    return checked_searchsorted(sorted_sequence, value, out_int32=out_int32, right=right, side=side, sorter=sorter, ctx=ctx)


@lowers(aten.bucketize.Tensor)
def bucketize(x: Array, boundaries: Array, *, out_int32: bool = False, right: bool = False, ctx: Context) -> Array:
    """The bucket of each element of x: the index at which the element would be inserted in the sorted vector `boundaries`.

    For an element that equals boundaries, this is the index of the first of them, or with `right` the index after the last of them.

    Shape:  that of x.
    Dtype:  int32 with `out_int32`, else int64.
    """
    if boundaries.ndim != 1:
        require_static(ctx, False, RuntimeError, f"boundaries tensor must be 1 dimension, but got dim({boundaries.ndim})")
        return lax.full(ctx.output.shape, 0, ctx.output.jax_dtype)
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


@lowers(aten.bucketize.Scalar)
def bucketize_scalar(x: int | float, boundaries: Array, *, out_int32: bool = False, right: bool = False, ctx: Context) -> Array:
    """The bucket of a number between the elements of the sorted vector `boundaries`.

    Shape:  [].
    Dtype:  int32 with `out_int32`, else int64.
    """
    return bucketize(convert(x, result_type([boundaries, x])), boundaries, out_int32=out_int32, right=right, ctx=ctx)
