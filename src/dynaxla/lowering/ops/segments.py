"""Lowerings of segment reductions: a dimension is cut into consecutive segments whose lengths are known at run time only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dimensions import wrap
from ..promotion import convert, full_like, to_accumulator
from ..registry import lowers
from .indexing import take_along
from .scans import running_sum
from .scattering import write_slices
from .sorting import searchsorted

_INT64 = np.dtype(np.int64)
# By torch's name of a reduction: the name that `write_slices` takes.
_REDUCTIONS = {"sum": "sum", "mean": "sum", "prod": "prod", "max": "amax", "amax": "amax", "min": "amin", "amin": "amin"}
# By name in `write_slices`: the identity element.
_IDENTITIES = {"sum": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf}


@dataclass(frozen=True)
class _Segments:
    """The segments of one dimension of a tensor (*outer, size, *inner), which is flattened to the rows (outer * size, inner).

    Attributes:
        count: The number of segments for each outer element.
        segment: The segment of each row, or outer * count for a row in no segment: int64 (outer * size).
        lengths: The length of each segment: int64 (outer * count).
        outer_shape: The sizes of the dimensions before the segmented dimension.
        inner_shape: The sizes of the dimensions after the segmented dimension.
    """

    count: int
    segment: Array
    lengths: Array
    outer_shape: tuple[int, ...]
    inner_shape: tuple[int, ...]

    @staticmethod
    def of(shape: tuple[int, ...], axis: int, lengths: Array | None, offsets: Array | None, ctx: Context, unsafe: bool) -> _Segments:
        """Builds the segments along `axis` from `offsets`, or from `lengths`. `unsafe`: see `segment_reduce`."""
        outer_shape, size = shape[:axis], shape[axis]
        outer = math.prod(outer_shape)
        if offsets is not None:
            boundaries = convert(lax.reshape(offsets, (outer, offsets.shape[-1])), _INT64)
            sizes = lax.sub(boundaries[:, 1:], boundaries[:, :-1])
        else:
            assert lengths is not None
            sizes = convert(lax.reshape(lengths, (outer, lengths.shape[-1])), _INT64)
            boundaries = lax.pad(running_sum(sizes, 1), np.int64(0), [(0, 0, 0), (1, 0, 0)])
            if not unsafe:
                message = "segment_reduce(): Expected all rows of lengths along axis to sum to data.size(lengths.dim()-1) when !unsafe."
                ctx.require(lax.eq(boundaries[:, -1], full_like(boundaries[:, -1], size)), RuntimeError, message)
        ctx.require(lax.ge(sizes, full_like(sizes, 0)), RuntimeError, "lengths contains negative value!")
        count = sizes.shape[1]
        position = lax.broadcasted_iota(_INT64, (outer, size), 1)
        segment_in_row = searchsorted(boundaries[:, 1:], position, right=True)
        row_offset = lax.mul(lax.broadcasted_iota(_INT64, (outer, size), 0), full_like(position, count))
        is_inside = lax.ge(position, lax.broadcast_in_dim(boundaries[:, 0], position.shape, [0]))
        is_inside = lax.bitwise_and(is_inside, lax.lt(segment_in_row, full_like(segment_in_row, count)))
        segment = lax.select(is_inside, lax.add(row_offset, segment_in_row), full_like(position, outer * count))
        return _Segments(count, lax.reshape(segment, (outer * size,)), lax.reshape(sizes, (outer * count,)), outer_shape, shape[axis + 1 :])

    @property
    def total(self) -> int:
        """The number of segments of all outer elements together."""
        return self.lengths.size

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor with one value per segment: (*outer, count, *inner)."""
        return (*self.outer_shape, self.count, *self.inner_shape)

    def rows(self, x: Array) -> Array:
        """Returns the rows of a tensor that has `size` or `count` elements in the segmented dimension."""
        return lax.reshape(x, (x.size // max(math.prod(self.inner_shape), 1), math.prod(self.inner_shape)))

    def reduce(self, rows: Array, reduction: str, initial: Any) -> Array:
        """Reduces the rows of each segment, from (rows, inner) to (segments, inner)."""
        return write_slices(lax.full((self.total, rows.shape[1]), initial, rows.dtype), 0, self.segment, rows, reduction)

    def broadcast(self, values: Array) -> Array:
        """Returns for each row the values of its segment, or 0 if it is in no segment: from (segments, inner) to (rows, inner)."""
        gathered = take_along(values, 0, self.segment)
        is_in_segment = lax.lt(self.segment, full_like(self.segment, self.total))
        return lax.select(lax.broadcast_in_dim(is_in_segment, gathered.shape, [0]), gathered, full_like(gathered, 0))

    def columns_of_lengths(self, like: Array) -> Array:
        """Returns the length of each segment, broadcast to the shape and in the dtype of `like`, (segments, inner)."""
        return lax.broadcast_in_dim(convert(self.lengths, like.dtype), like.shape, [0])


@lowers(aten.segment_reduce.default)
def segment_reduce(
    data: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    indices: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
    ctx: Context,
) -> Array:
    """The sum, mean, max, min or prod of each segment along `axis`.

    The result of an empty segment is `initial`, or by default the reduction's identity element (nan for mean).

    Shape:  that of data, with the number of segments at `axis`.
    Dtype:  that of data.
    Raises: UnsupportedOp for segments given by indices, which eager mode rejects too. When the program runs, RuntimeError for negative
            lengths, and unless `unsafe` for lengths that do not sum to the size of data along `axis`.
    Source: ATen native/SegmentReduce.cpp
    """
    if indices is not None:
        raise UnsupportedOp("segment_reduce by indices")
    segments = _Segments.of(data.shape, wrap(axis, data.ndim), lengths, offsets, ctx, unsafe)
    if 0 in segments.shape:
        return lax.full(segments.shape, 0, data.dtype)
    reduction = _REDUCTIONS[reduce]
    rows = segments.rows(to_accumulator(data))
    out = segments.reduce(rows, reduction, _IDENTITIES[reduction] if initial is None else initial)
    if reduce == "mean":
        sizes = segments.columns_of_lengths(out)
        empty = lax.eq(sizes, full_like(sizes, 0))
        out = lax.select(empty, full_like(out, math.nan) if initial is None else out, lax.div(out, sizes))
    return convert(lax.reshape(out, segments.shape), data.dtype)


@lowers(aten._segment_reduce_backward.default)
def segment_reduce_backward(
    grad: Array,
    output: Array,
    data: Array,
    reduce: str,
    *,
    lengths: Array | None = None,
    offsets: Array | None = None,
    axis: int = 0,
    initial: float | None = None,
    ctx: Context,
) -> Array:
    """The gradient of data. Several equal extrema share a positive gradient equally, but each gets a whole negative gradient, as in ATen.

    Shape:  that of data.
    Dtype:  that of data.
    Source: ATen native/SegmentReduce.cpp
    """
    segments = _Segments.of(data.shape, wrap(axis, data.ndim), lengths, offsets, ctx, unsafe=True)
    if 0 in segments.shape or data.size == 0:
        return full_like(data, 0)
    dtype = dtypes.accumulator(data.dtype)
    rows, grads, outputs = (segments.rows(convert(x, dtype)) for x in (data, grad, output))
    if reduce == "mean":
        grads = lax.div(grads, segments.columns_of_lengths(grads))
    grad_rows = segments.broadcast(grads)
    if reduce == "prod":
        grad_rows = _prod_gradient(segments, rows, grad_rows, segments.broadcast(lax.mul(grads, outputs)), initial)
    elif _REDUCTIONS[reduce] != "sum":
        is_extremum = lax.bitwise_or(lax.ne(rows, rows), lax.eq(rows, segments.broadcast(outputs)))
        count = segments.broadcast(segments.reduce(convert(is_extremum, dtype), "sum", 0))
        is_shared = lax.bitwise_and(lax.gt(count, full_like(count, 1)), lax.gt(grad_rows, full_like(grad_rows, 0)))
        grad_rows = lax.select(is_extremum, lax.select(is_shared, lax.div(grad_rows, count), grad_rows), full_like(grad_rows, 0))
    return convert(lax.reshape(grad_rows, data.shape), data.dtype)


def _prod_gradient(segments: _Segments, rows: Array, grad_rows: Array, scaled_products: Array, initial: float | None) -> Array:
    """Returns the gradient of each row: the gradient of its segment's product times the product of the other elements of the segment.

    The product of the other elements is computed by division, except for elements that are 0 or nan.

    Args:
        segments: The segments.
        rows: The elements, (rows, inner).
        grad_rows: The gradient of the product of each row's segment, (rows, inner).
        scaled_products: `grad_rows` times the product of each row's segment, (rows, inner).
        initial: The initial value of each product, or None for 1.
    """
    zero, nan = lax.eq(rows, full_like(rows, 0)), lax.ne(rows, rows)
    is_special = lax.bitwise_or(zero, nan)
    zeros, nans = (segments.broadcast(segments.reduce(convert(flag, rows.dtype), "sum", 0)) for flag in (zero, nan))
    nonzero_products = segments.reduce(lax.select(is_special, full_like(rows, 1), rows), "prod", 1.0 if initial is None else initial)
    others_product = segments.broadcast(nonzero_products)
    other_zeros, other_nans = (lax.sub(count, convert(flag, rows.dtype)) for count, flag in ((zeros, zero), (nans, nan)))
    others_product = lax.select(
        lax.gt(other_zeros, full_like(zeros, 0)), lax.mul(others_product, full_like(others_product, 0)), others_product
    )
    others_product = lax.select(lax.gt(other_nans, full_like(nans, 0)), full_like(others_product, math.nan), others_product)
    is_inside = lax.lt(segments.segment, full_like(segments.segment, segments.total))
    gradient = lax.select(is_special, lax.mul(grad_rows, others_product), lax.div(scaled_products, rows))
    return lax.select(lax.broadcast_in_dim(is_inside, rows.shape, [0]), gradient, full_like(rows, 0))
