"""Windows along one dimension that are known at trace time, as adaptive pooling and resampling read them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array, lax

# Up to this number of reads, a window's sum is unrolled: XLA:CPU does not vectorize reductions of so few elements.
_FEW_READS = 8


@dataclass(frozen=True)
class Windows:
    """For each index of an output dimension, the indices of the input dimension that it reads, and their weights.

    Rows shorter than the longest are filled with reads that are not real: their weight is 0, their index that of a real read, and their
    values must not enter a result.

    Attributes:
        size: size of the input dimension.
        index: int32 (output size, reads), indices into the input dimension.
        weight: float64 (output size, reads).
        real: bool (output size, reads), False for fill.
    """

    size: int
    index: np.ndarray
    weight: np.ndarray
    real: np.ndarray

    @staticmethod
    def from_reads(places: int, size: int, place: np.ndarray, source: np.ndarray, weight: np.ndarray) -> Windows:
        """Returns windows from single reads (output index, input index, weight), in any order. An output without reads is 0."""
        order = np.argsort(place, kind="stable")
        place, source, weight = place[order], source[order], weight[order]
        count = np.bincount(place, minlength=places)
        position = np.arange(len(place)) - np.repeat(np.cumsum(count) - count, count)
        shape = (places, int(count.max(initial=1)))
        index, weights, real = np.zeros(shape, np.int32), np.zeros(shape), np.zeros(shape, np.bool_)
        first = np.full(places, -1)
        first[place[::-1]] = source[::-1]
        index[:] = np.maximum(first, 0)[:, None]
        index[place, position] = source
        weights[place, position] = weight
        real[place, position] = True
        return Windows(size, index, weights, real)

    @staticmethod
    def adaptive(size: int, places: int) -> Windows:
        """Returns adaptive pooling's windows: output i averages inputs floor(i * size / places) to ceil((i + 1) * size / places) - 1."""
        starts = np.arange(places) * size // places
        ends = -(-(np.arange(1, places + 1) * size) // places)
        lengths = ends - starts
        place = np.repeat(np.arange(places), lengths)
        source = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(starts, lengths)
        return Windows.from_reads(places, size, place, source, np.repeat(1.0 / lengths, lengths))

    def mirrored(self) -> Windows:
        """Returns the transposed windows: their sum over the output's gradient is the input's gradient."""
        place = np.broadcast_to(np.arange(len(self.index))[:, None], self.index.shape)
        return Windows.from_reads(self.size, len(self.index), self.index[self.real], place[self.real], self.weight[self.real])

    def gather(self, x: Array, dim: int) -> Array:
        """Returns the elements of x that each window reads: `dim` becomes two dimensions, (windows, reads)."""
        return take(x, self.index, dim)

    def sum(self, x: Array, dim: int) -> Array:
        """Returns the weighted sum of each window along `dim`, in x's dtype, which must be a float."""
        if self.index.shape[1] == 1 and (self.weight == 1).all():
            return take(x, self.index[:, 0], dim)
        if self.index.shape[1] <= _FEW_READS:
            return functools.reduce(lax.add, (self._share(x, dim, read) for read in range(self.index.shape[1])))
        read = self.gather(x, dim)
        weighted = lax.mul(read, self._per_read(self.weight.astype(x.dtype), read, dim))
        if not self.real.all():
            weighted = lax.select(self._per_read(self.real, read, dim), weighted, lax.full_like(weighted, 0))
        return lax.reduce_sum(weighted, (dim + 1,))

    def _share(self, x: Array, dim: int, read: int) -> Array:
        """Returns the weighted values of one column of reads: the summand with index `read` of each window's sum."""
        found = take(x, self.index[:, read], dim)
        weighted = lax.mul(found, lax.broadcast_in_dim(self.weight[:, read].astype(x.dtype), found.shape, (dim,)))
        if self.real[:, read].all():
            return weighted
        return lax.select(lax.broadcast_in_dim(self.real[:, read], found.shape, (dim,)), weighted, lax.full_like(weighted, 0))

    @staticmethod
    def _per_read(values: np.ndarray, read: Array, dim: int) -> Array:
        return lax.broadcast_in_dim(values, read.shape, (dim, dim + 1))


def take(x: Array, index: np.ndarray, dim: int) -> Array:
    """Returns x at constant indices along `dim`, which is replaced by the dimensions of `index`.

    Indices with a constant step become a slice, and each index repeated equally often a broadcast: XLA then reads no table of indices.
    """
    places = index.ravel()
    if index.ndim == 1 and len(places) > 1:
        step = int(places[1] - places[0])
        if step > 0 and (np.diff(places) == step).all():
            return lax.slice_in_dim(x, int(places[0]), int(places[-1]) + 1, step, dim)
        times = len(places) // x.shape[dim] if x.shape[dim] else 0
        if times > 1 and np.array_equal(places, np.repeat(np.arange(x.shape[dim]), times)):
            shape = (*x.shape[: dim + 1], times, *x.shape[dim + 1 :])
            spread = lax.broadcast_in_dim(x, shape, [place for place in range(len(shape)) if place != dim + 1])
            return lax.reshape(spread, (*x.shape[:dim], len(places), *x.shape[dim + 1 :]))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(*range(dim), *range(dim + index.ndim, x.ndim - 1 + index.ndim)),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
    )
    sizes: Sequence[int] = [1 if place == dim else size for place, size in enumerate(x.shape)]
    start = index.astype(np.int32)[..., None]
    return lax.gather(x, start, numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
