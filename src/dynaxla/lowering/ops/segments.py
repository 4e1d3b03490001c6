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
from ..promotion import convert, full_like
from ..registry import lowers
from .indexing import take_along
from .scans import running_sum
from .scattering import write_slices
from .sorting import searchsorted

_INT64 = np.dtype(np.int64)
_HOW = {"sum": "sum", "mean": "sum", "prod": "prod", "max": "amax", "amax": "amax", "min": "amin", "amin": "amin"}
_START = {"sum": 0.0, "prod": 1.0, "amax": -math.inf, "amin": math.inf}


@dataclass(frozen=True)
class _Segments:
    """The segments of one dimension of a tensor (*outer, size, *inner), which is flattened to (outer * size, inner): its rows.

    Attributes:
        count: number of segments per outer element.
        segment: int64 (outer * size); the segment of each row, or outer * count for a row in no segment.
        lengths: int64 (outer * count); the length of each segment.
        outer_shape, inner_shape: the dimensions before and after the segmented one.
    """

    count: int
    segment: Array
    lengths: Array
    outer_shape: tuple[int, ...]
    inner_shape: tuple[int, ...]

    @staticmethod
    def of(shape: tuple[int, ...], axis: int, lengths: Array | None, offsets: Array | None, ctx: Context, unsafe: bool) -> _Segments:
        outer_shape, size = shape[:axis], shape[axis]
        outer = math.prod(outer_shape)
        if offsets is not None:
            edges = convert(lax.reshape(offsets, (outer, offsets.shape[-1])), _INT64)
            sizes = lax.sub(edges[:, 1:], edges[:, :-1])
        else:
            assert lengths is not None
            sizes = convert(lax.reshape(lengths, (outer, lengths.shape[-1])), _INT64)
            edges = lax.pad(running_sum(sizes, 1), np.int64(0), [(0, 0, 0), (1, 0, 0)])
            if not unsafe:
                message = "segment_reduce(): Expected all rows of lengths along axis to sum to data.size(lengths.dim()-1) when !unsafe."
                ctx.require(lax.eq(edges[:, -1], full_like(edges[:, -1], size)), RuntimeError, message)
        ctx.require(lax.ge(sizes, full_like(sizes, 0)), RuntimeError, "lengths contains negative value!")
        count = sizes.shape[1]
        place = lax.broadcasted_iota(_INT64, (outer, size), 1)
        number = searchsorted(edges[:, 1:], place, right=True)
        row = lax.mul(lax.broadcasted_iota(_INT64, (outer, size), 0), full_like(place, count))
        found = lax.ge(place, lax.broadcast_in_dim(edges[:, 0], place.shape, [0]))
        found = lax.bitwise_and(found, lax.lt(number, full_like(number, count)))
        segment = lax.select(found, lax.add(row, number), full_like(place, outer * count))
        return _Segments(count, lax.reshape(segment, (outer * size,)), lax.reshape(sizes, (outer * count,)), outer_shape, shape[axis + 1 :])

    @property
    def total(self) -> int:
        return self.lengths.size

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a tensor with one value per segment: (*outer, count, *inner)."""
        return (*self.outer_shape, self.count, *self.inner_shape)

    def rows(self, x: Array) -> Array:
        """Flattens a tensor with `size` or with `count` elements in the segmented dimension to rows."""
        return lax.reshape(x, (x.size // max(math.prod(self.inner_shape), 1), math.prod(self.inner_shape)))

    def reduce(self, rows: Array, how: str, start: Any) -> Array:
        """Combines the rows of each segment: (rows, inner) gives (segments, inner)."""
        return write_slices(lax.full((self.total, rows.shape[1]), start, rows.dtype), 0, self.segment, rows, how)

    def spread(self, values: Array) -> Array:
        """Returns, for each row, the values of its segment; 0 for a row in no segment."""
        taken = take_along(values, 0, self.segment)
        return lax.select(self._columns(lax.lt(self.segment, full_like(self.segment, self.total)), taken), taken, full_like(taken, 0))

    @staticmethod
    def _columns(values: Array, like: Array) -> Array:
        return lax.broadcast_in_dim(values, like.shape, [0])

    def columns_of_lengths(self, like: Array) -> Array:
        return self._columns(convert(self.lengths, like.dtype), like)


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
    Raises: UnsupportedOp for segments given by indices, which eager refuses too.
    Source: ATen native/SegmentReduce.cpp
    """
    if indices is not None:
        raise UnsupportedOp("segment_reduce by indices")
    segments = _Segments.of(data.shape, wrap(axis, data.ndim), lengths, offsets, ctx, unsafe)
    if 0 in segments.shape:
        return lax.full(segments.shape, 0, data.dtype)
    how = _HOW[reduce]
    rows = segments.rows(convert(data, dtypes.accumulator(data.dtype)))
    out = segments.reduce(rows, how, _START[how] if initial is None else initial)
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
    """The gradient of data. Several equal extrema share a positive gradient equally, but each gets a whole negative one, as in ATen.

    Shape:  that of data.
    Dtype:  that of data.
    Source: ATen native/SegmentReduce.cpp
    """
    segments = _Segments.of(data.shape, wrap(axis, data.ndim), lengths, offsets, ctx, unsafe=True)
    if 0 in segments.shape or data.size == 0:
        return full_like(data, 0)
    work = dtypes.accumulator(data.dtype)
    rows, grads, outputs = (segments.rows(convert(x, work)) for x in (data, grad, output))
    if reduce == "mean":
        grads = lax.div(grads, segments.columns_of_lengths(grads))
    here = segments.spread(grads)
    if reduce == "prod":
        here = _prod_gradient(segments, rows, here, segments.spread(lax.mul(grads, outputs)), initial)
    elif _HOW[reduce] != "sum":
        chosen = lax.bitwise_or(lax.ne(rows, rows), lax.eq(rows, segments.spread(outputs)))
        count = segments.spread(segments.reduce(convert(chosen, work), "sum", 0))
        shared = lax.bitwise_and(lax.gt(count, full_like(count, 1)), lax.gt(here, full_like(here, 0)))
        here = lax.select(chosen, lax.select(shared, lax.div(here, count), here), full_like(here, 0))
    return convert(lax.reshape(here, data.shape), data.dtype)


def _prod_gradient(segments: _Segments, rows: Array, here: Array, product: Array, initial: float | None) -> Array:
    """Returns the gradient times the product of the segment's other elements: by division, except for elements that are 0 or nan."""
    zero, nan = lax.eq(rows, full_like(rows, 0)), lax.ne(rows, rows)
    special = lax.bitwise_or(zero, nan)
    zeros, nans = (segments.spread(segments.reduce(convert(flag, rows.dtype), "sum", 0)) for flag in (zero, nan))
    plain = segments.reduce(lax.select(special, full_like(rows, 1), rows), "prod", 1.0 if initial is None else initial)
    others = segments.spread(plain)
    other_zeros, other_nans = (lax.sub(count, convert(flag, rows.dtype)) for count, flag in ((zeros, zero), (nans, nan)))
    others = lax.select(lax.gt(other_zeros, full_like(zeros, 0)), lax.mul(others, full_like(others, 0)), others)
    others = lax.select(lax.gt(other_nans, full_like(nans, 0)), full_like(others, math.nan), others)
    inside = lax.lt(segments.segment, full_like(segments.segment, segments.total))
    by_division = lax.select(special, lax.mul(here, others), lax.div(product, rows))
    return lax.select(lax.broadcast_in_dim(inside, rows.shape, [0]), by_division, full_like(rows, 0))
