"""Histograms: counts of numbers in a row of bins, or of points in a grid of bins."""

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
from .rounding import rounded
from .scattering import write_slices
from .sorting import searchsorted

_INT64 = np.dtype(np.int64)


def _outer_edges(x: Array, given: Sequence[float] | None, ctx: Context) -> list[tuple[Array, Array]]:
    """The first and last edge in each dimension, in float64: the given ones, else the extrema of x (count, dimensions).

    Makes the compiled call raise for a range that is not finite or is reversed. An empty range is extended by 0.5 on both sides.
    """
    if given is not None:
        ends = [(lax.full((), low, np.float64), lax.full((), high, np.float64)) for low, high in zip(given[::2], given[1::2], strict=True)]
    elif x.size == 0:
        ends = [(lax.full((), 0.0, np.float64), lax.full((), 1.0, np.float64))] * x.shape[1]
    else:
        lows, highs = (convert(reduce(x, (0,)), np.dtype(np.float64)) for reduce in (lax.reduce_min, lax.reduce_max))
        ends = [(lows[dim], highs[dim]) for dim in range(x.shape[1])]
    for dim, (low, high) in enumerate(ends):
        finite = lax.bitwise_and(lax.is_finite(low), lax.is_finite(high))
        ctx.require(finite, RuntimeError, f"torch.histogramdd: dimension {dim}'s range is not finite")
        ctx.require(lax.le(low, high), RuntimeError, f"torch.histogramdd: min should not exceed max for dimension {dim}")
    return [_widened(low, high, 0.5) for low, high in ends]


def _widened(low: Array, high: Array, margin: float) -> tuple[Array, Array]:
    """The range from low to high; if it is empty, extended by `margin` on both sides."""
    extra = lax.select(lax.eq(low, high), full_like(low, margin), full_like(low, 0))
    return lax.sub(low, extra), lax.add(high, extra)


def _even_edges(low: Array, high: Array, bins: int, dtype: dtypes.DType) -> Array:
    """bins + 1 evenly spaced numbers from low to high, each computed from the nearer end.

    Source: ATen native/cpu/RangeFactoriesKernel.cpp, linspace_kernel
    """
    work = dtypes.accumulator(dtype)
    low, high = (lax.broadcast(convert(convert(end, dtype), work), (bins + 1,)) for end in (low, high))
    step = lax.div(lax.sub(high, low), full_like(low, bins))
    place = lax.iota(work, bins + 1)
    forward = lax.add(low, lax.mul(place, step))
    backward = lax.sub(high, lax.mul(lax.sub(full_like(place, bins), place), step))
    return convert(lax.select(lax.lt(place, full_like(place, (bins + 1) // 2)), forward, backward), dtype)


def _inside(x: Array, low: Array, high: Array) -> Array:
    return lax.bitwise_and(lax.ge(x, lax.broadcast(low, x.shape)), lax.le(x, lax.broadcast(high, x.shape)))


def _collect(places: Array, inside: Array, bins: Sequence[int], weight: Array | None, dtype: dtypes.DType) -> Array:
    """The sum of the weights of the points in each bin.

    Args:
        places: the index of each point's bin in the flattened, row-major array of bins.
        inside: True for points that count.
        bins: shape of the array of bins.
        weight: of each point; None: 1 for all.
        dtype: of the result.
    """
    count = math.prod(bins)
    work = dtypes.accumulator(dtype)
    weights = lax.full(places.shape, 1, work) if weight is None else convert(lax.reshape(weight, places.shape), work)
    # write_slices drops indices past the end.
    places = lax.select(inside, places, full_like(places, count))
    total = write_slices(lax.full((count,), 0, work), 0, places, weights, "sum")
    return convert(lax.reshape(total, tuple(bins)), dtype)


def _histogram(x: Array, edges: Sequence[Array], weight: Array | None, density: bool) -> Array:
    """The histogram of the points x (points, dimensions). Points outside the edges do not count.

    Each bin contains its left edge, the last one also its right edge. With `density`, a bin is divided by the sum of all bins and by its
    volume.
    """
    shape = [edge.size - 1 for edge in edges]
    places, inside = lax.full((x.shape[0],), 0, _INT64), lax.full((x.shape[0],), True)
    for dim, edge in enumerate(edges):
        values, last = lax.index_in_dim(x, dim, 1, keepdims=False), shape[dim] - 1
        after = searchsorted(edge, values, right=True)
        place = lax.min(lax.sub(after, full_like(after, 1)), full_like(after, last))
        places = lax.add(lax.mul(places, full_like(places, shape[dim])), place)
        inside = lax.bitwise_and(inside, _inside(values, edge[0], edge[-1]))
    counts = _collect(places, inside, shape, weight, x.dtype)
    if not density:
        return counts
    counts = lax.div(counts, lax.broadcast(lax.reduce_sum(counts, range(counts.ndim)), counts.shape))
    for dim, edge in enumerate(edges):
        lengths = lax.sub(edge[1:], edge[:-1])
        counts = lax.div(counts, lax.broadcast_in_dim(lengths, counts.shape, [dim]))
    return counts


def _points(x: Array) -> Array:
    return lax.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


@lowers(aten._histogramdd_bin_edges.default)
def histogramdd_bin_edges(
    x: Array, bins: Sequence[int], *, range: Sequence[float] | None = None, weight: Array | None = None, density: bool = False, ctx: Context
) -> list[Array]:
    """The edges of evenly spaced bins in each dimension: between the bounds in `range`, or else between the extrema of x.

    Shape:  [bins + 1] for each dimension; x (..., dimensions).
    Dtype:  that of x.
    """
    ends = _outer_edges(_points(x), range, ctx)
    return [_even_edges(low, high, count, x.dtype) for (low, high), count in zip(ends, bins, strict=True)]


@lowers(aten._histogramdd_from_bin_cts.default)
def histogramdd_from_bin_cts(
    x: Array, bins: Sequence[int], *, range: Sequence[float] | None = None, weight: Array | None = None, density: bool = False, ctx: Context
) -> Array:
    """The number of points, or the sum of their weights, in each of evenly spaced bins; with `density`, divided by the sum of all bins and
    by the bin's volume.

    Shape:  `bins`; x (..., dimensions), weight as x without its last dimension.
    Dtype:  that of x.
    """
    return _histogram(_points(x), histogramdd_bin_edges(x, bins, range=range, ctx=ctx), weight, density)


@lowers(aten._histogramdd_from_bin_tensors.default)
def histogramdd_from_bin_tensors(x: Array, bins: Sequence[Array], *, weight: Array | None = None, density: bool = False) -> Array:
    """Same as `histogramdd_from_bin_cts`, where `bins` are the edges in each dimension.

    Shape:  one less than the number of edges, in each dimension.
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
    """Same as `histogram`, where `bins` are the edges.

    Shape:  one less than the number of edges; and the edges.
    Dtype:  that of x; the edges as they are.
    """
    return _histogram(lax.reshape(x, (x.size, 1)), [bins], weight, density), bins


@lowers(aten.histc.default)
def histc(x: Array, bins: int = 100, min: float = 0, max: float = 0, *, ctx: Context) -> Array:
    """The number of elements in each of `bins` equal intervals from min to max, or between the extrema of x if min == max. Elements outside
    do not count.

    Shape:  [bins].
    Dtype:  that of x.
    Source: ATen native/cpu/HistogramKernel.cpp: the bin is computed by a division, which is rounded, not from the edges. For integers,
            which torch's CPU kernel refuses: native/cuda/SummaryOps.cu.
    """
    if np.issubdtype(x.dtype, np.integer):
        return _integer_histc(x, bins, int(min), int(max), ctx)
    flat, work = lax.reshape(x, (x.size,)), dtypes.accumulator(x.dtype)
    low, high = (lax.full((), end, np.float64) for end in (min, max))
    if min == max and x.size:
        low, high = (convert(reduce(flat, (0,)), np.dtype(np.float64)) for reduce in (lax.reduce_min, lax.reduce_max))
    low, high = _widened(low, high, 1)
    finite = lax.bitwise_and(lax.is_finite(low), lax.is_finite(high))
    ctx.require(finite, RuntimeError, "torch.histc: range is not finite")
    ctx.require(lax.lt(low, high), RuntimeError, "torch.histc: max must be larger than min")
    low, high = (convert(convert(end, x.dtype), work) for end in (low, high))
    values = convert(flat, work)
    distance = rounded(lax.sub(values, lax.broadcast(low, flat.shape)), x.dtype)
    scaled = rounded(lax.mul(distance, number(bins, work)), x.dtype)
    span = lax.broadcast(rounded(lax.sub(high, low), x.dtype), flat.shape)
    place, inside = rounded(lax.div(scaled, span), x.dtype), _inside(values, low, high)
    place = convert(lax.select(inside, place, full_like(place, 0)), _INT64)
    return _collect(lax.min(place, full_like(place, bins - 1)), inside, [bins], None, x.dtype)


def _integer_histc(x: Array, bins: int, min: int, max: int, ctx: Context) -> Array:
    """`histc` of integers, in int64, with a division that rounds down."""
    flat = convert(lax.reshape(x, (x.size,)), _INT64)
    low, high = (lax.full((), end, _INT64) for end in (min, max))
    if min == max and x.size:
        low, high = lax.reduce_min(flat, (0,)), lax.reduce_max(flat, (0,))
    low, high = _widened(low, high, 1)
    ctx.require(lax.lt(low, high), RuntimeError, "torch.histc: max must be larger than min")
    inside = _inside(flat, low, high)
    distance = lax.sub(flat, lax.broadcast(low, flat.shape))
    place = lax.div(lax.mul(distance, full_like(flat, bins)), lax.broadcast(lax.sub(high, low), flat.shape))
    place = lax.select(inside, lax.min(place, full_like(place, bins - 1)), full_like(place, 0))
    return _collect(place, inside, [bins], None, x.dtype)
