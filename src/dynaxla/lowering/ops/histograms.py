"""Lowerings of histograms: counts of numbers in bins, or of points in a grid of bins."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert, full_like, number
from ..registry import lowers
from .creation import evenly_spaced
from .division import exact_division
from .rounding import rounded
from .scattering import write_slices
from .sorting import searchsorted

_INT64 = np.dtype(np.int64)


def _outer_edges(x: Array, bounds: Sequence[float] | None, ctx: Context) -> list[tuple[Array, Array]]:
    """Returns the first and the last edge in each dimension, in float64.

    Makes the compiled call raise if a range is not finite, or if its first edge is larger than its last. A range whose edges are equal is
    extended by 0.5 on both sides.

    Args:
        x: The points, (count, dimensions).
        bounds: The first and last edge of each dimension, [low, high, low, high, ...]; if None, the extrema of x.
        ctx: The context of the current node.
    """
    if bounds is not None:
        ends = [
            (lax.full((), low, np.float64), lax.full((), high, np.float64)) for low, high in zip(bounds[::2], bounds[1::2], strict=True)
        ]
    elif x.size == 0:
        ends = [(lax.full((), 0.0, np.float64), lax.full((), 1.0, np.float64))] * x.shape[1]
    else:
        lows, highs = (convert(reduce(x, (0,)), np.dtype(np.float64)) for reduce in (lax.reduce_min, lax.reduce_max))
        ends = [(lows[dim], highs[dim]) for dim in range(x.shape[1])]
    for dim, (low, high) in enumerate(ends):
        finite = lax.bitwise_and(lax.is_finite(low), lax.is_finite(high))
        ctx.require(finite, RuntimeError, f"torch.histogramdd: dimension {dim}'s range is not finite")
        ctx.require(lax.le(low, high), RuntimeError, f"torch.histogramdd: min should not exceed max for dimension {dim}")
    return [_extended(low, high, 0.5) for low, high in ends]


def _extended(low: Array, high: Array, margin: float) -> tuple[Array, Array]:
    """Returns the range from low to high; a range with low equal to high is extended by `margin` on both sides."""
    extra = lax.select(lax.eq(low, high), full_like(low, margin), full_like(low, 0))
    return lax.sub(low, extra), lax.add(high, extra)


def _is_inside(x: Array, low: Array, high: Array) -> Array:
    return lax.bitwise_and(lax.ge(x, lax.broadcast(low, x.shape)), lax.le(x, lax.broadcast(high, x.shape)))


def _sum_weights(bin_indices: Array, inside: Array, bins: Sequence[int], weight: Array | None, dtype: dtypes.DType) -> Array:
    """Returns the sum of the weights of the points in each bin.

    Args:
        bin_indices: The index of each point's bin in the flattened, row-major array of bins.
        inside: True for points that count.
        bins: The shape of the array of bins.
        weight: The weight of each point; if None, 1.
        dtype: The dtype of the result.
    """
    count = math.prod(bins)
    wide_dtype = dtypes.accumulator(dtype)
    weights = lax.full(bin_indices.shape, 1, wide_dtype) if weight is None else convert(lax.reshape(weight, bin_indices.shape), wide_dtype)
    # write_slices drops indices past the end.
    bin_indices = lax.select(inside, bin_indices, full_like(bin_indices, count))
    total = write_slices(lax.full((count,), 0, wide_dtype), 0, bin_indices, weights, "sum")
    return convert(lax.reshape(total, tuple(bins)), dtype)


def _histogram(x: Array, edges: Sequence[Array], weight: Array | None, density: bool) -> Array:
    """Returns the histogram of the points x (points, dimensions). Points outside the edges do not count.

    Each bin contains its left edge, and the last bin also its right edge. With `density`, each count is divided by the sum of all counts
    and by the volume of its bin.
    """
    shape = [dim_edges.size - 1 for dim_edges in edges]
    bin_indices, inside = lax.full((x.shape[0],), 0, _INT64), lax.full((x.shape[0],), True)
    for dim, dim_edges in enumerate(edges):
        values, last = lax.index_in_dim(x, dim, 1, keepdims=False), shape[dim] - 1
        edges_before = searchsorted(dim_edges, values, right=True)
        bin_index = lax.min(lax.sub(edges_before, full_like(edges_before, 1)), full_like(edges_before, last))
        bin_indices = lax.add(lax.mul(bin_indices, full_like(bin_indices, shape[dim])), bin_index)
        inside = lax.bitwise_and(inside, _is_inside(values, dim_edges[0], dim_edges[-1]))
    counts = _sum_weights(bin_indices, inside, shape, weight, x.dtype)
    if not density:
        return counts
    counts = lax.div(counts, lax.broadcast(lax.reduce_sum(counts, range(counts.ndim)), counts.shape))
    for dim, dim_edges in enumerate(edges):
        lengths = lax.sub(dim_edges[1:], dim_edges[:-1])
        counts = lax.div(counts, lax.broadcast_in_dim(lengths, counts.shape, [dim]))
    return counts


def _points(x: Array) -> Array:
    return lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


@lowers(aten._histogramdd_bin_edges.default)
def histogramdd_bin_edges(
    x: Array, bins: Sequence[int], *, range: Sequence[float] | None = None, weight: Array | None = None, density: bool = False, ctx: Context
) -> list[Array]:
    """The edges of evenly spaced bins in each dimension, between the bounds in `range` or, without them, between the extrema of x.

    Shape:  [bins + 1] for each dimension; x (..., dimensions).
    Dtype:  that of x.
    """
    ends = _outer_edges(_points(x), range, ctx)
    return [evenly_spaced(low, high, count + 1, x.dtype) for (low, high), count in zip(ends, bins, strict=True)]


@lowers(aten._histogramdd_from_bin_cts.default)
def histogramdd_from_bin_cts(
    x: Array, bins: Sequence[int], *, range: Sequence[float] | None = None, weight: Array | None = None, density: bool = False, ctx: Context
) -> Array:
    """The number of points, or the sum of their weights, in each of evenly spaced bins.

    With `density`, each number is divided by the sum of all numbers and by the volume of its bin.

    Shape:  `bins`; x (..., dimensions), weight as x without its last dimension.
    Dtype:  that of x.
    """
    return _histogram(_points(x), histogramdd_bin_edges(x, bins, range=range, ctx=ctx), weight, density)


@lowers(aten._histogramdd_from_bin_tensors.default)
def histogramdd_from_bin_tensors(x: Array, bins: Sequence[Array], *, weight: Array | None = None, density: bool = False) -> Array:
    """Same as `histogramdd_from_bin_cts`, where `bins` are the edges in each dimension.

    Shape:  in each dimension, the number of edges minus 1.
    Dtype:  that of x.
    """
    return _histogram(_points(x), bins, weight, density)


@lowers(aten.histogram.bin_ct)
def histogram(
    x: Array, bins: int = 100, *, range: Sequence[float] | None = None, weight: Array | None = None, density: bool = False, ctx: Context
) -> tuple[Array, Array]:
    """The number of elements, or the sum of their weights, in each of evenly spaced bins, and the bins' edges.

    Shape:  [bins] and [bins + 1].
    Dtype:  both: that of x.
    """
    flat = lax.reshape(x, (x.size, 1))
    edges = histogramdd_bin_edges(flat, [bins], range=range, ctx=ctx)
    return _histogram(flat, edges, weight, density), edges[0]


@lowers(aten.histogram.bins_tensor)
def histogram_of_edges(x: Array, bins: Array, *, weight: Array | None = None, density: bool = False) -> tuple[Array, Array]:
    """Same as `histogram`, where `bins` are the edges, and also the second result.

    Shape:  the number of edges minus 1; and that of the edges.
    Dtype:  that of x; and that of the edges.
    """
    return _histogram(lax.reshape(x, (x.size, 1)), [bins], weight, density), bins


@lowers(aten.histc.default)
def histc(x: Array, bins: int = 100, min: float = 0, max: float = 0, *, ctx: Context) -> Array:
    """The number of elements in each of `bins` equal intervals from min to max, or between the extrema of x if min == max.

    Elements outside of the intervals do not count. The call raises RuntimeError if the range is not finite, or max is below min.

    Shape:  [bins].
    Dtype:  that of x.
    Source: ATen native/cpu/HistogramKernel.cpp, which computes the bin by a rounded division, not from the edges; for integers, which that
            kernel rejects, native/cuda/SummaryOps.cu.
    """
    if np.issubdtype(x.dtype, np.integer):
        return _integer_histc(x, bins, int(min), int(max), ctx)
    flat, wide_dtype = lax.reshape(x, (x.size,)), dtypes.accumulator(x.dtype)
    low, high = (lax.full((), end, np.float64) for end in (min, max))
    if min == max and x.size:
        low, high = (convert(reduce(flat, (0,)), np.dtype(np.float64)) for reduce in (lax.reduce_min, lax.reduce_max))
    low, high = _extended(low, high, 1)
    finite = lax.bitwise_and(lax.is_finite(low), lax.is_finite(high))
    ctx.require(finite, RuntimeError, "torch.histc: range is not finite")
    ctx.require(lax.lt(low, high), RuntimeError, "torch.histc: max must be larger than min")
    low, high = (convert(convert(end, x.dtype), wide_dtype) for end in (low, high))
    values = convert(flat, wide_dtype)
    offset = rounded(lax.sub(values, lax.broadcast(low, flat.shape)), x.dtype)
    scaled = rounded(lax.mul(offset, number(bins, wide_dtype)), x.dtype)
    span = lax.broadcast(rounded(lax.sub(high, low), x.dtype), flat.shape)
    bin_index, inside = rounded(exact_division(ctx)(scaled, span), x.dtype), _is_inside(values, low, high)
    bin_index = convert(lax.select(inside, bin_index, full_like(bin_index, 0)), _INT64)
    return _sum_weights(lax.min(bin_index, full_like(bin_index, bins - 1)), inside, [bins], None, x.dtype)


def _integer_histc(x: Array, bins: int, min: int, max: int, ctx: Context) -> Array:
    """Returns `histc` of integers, computed in int64 with a division that rounds down."""
    flat = convert(lax.reshape(x, (x.size,)), _INT64)
    low, high = (lax.full((), end, _INT64) for end in (min, max))
    if min == max and x.size:
        low, high = lax.reduce_min(flat, (0,)), lax.reduce_max(flat, (0,))
    low, high = _extended(low, high, 1)
    ctx.require(lax.lt(low, high), RuntimeError, "torch.histc: max must be larger than min")
    inside = _is_inside(flat, low, high)
    offset = lax.sub(flat, lax.broadcast(low, flat.shape))
    bin_index = lax.div(lax.mul(offset, full_like(flat, bins)), lax.broadcast(lax.sub(high, low), flat.shape))
    bin_index = lax.select(inside, lax.min(bin_index, full_like(bin_index, bins - 1)), full_like(bin_index, 0))
    return _sum_weights(bin_index, inside, [bins], None, x.dtype)
