"""Windows along one dimension that are known when the program is traced: what adaptive pooling and resampling read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array, lax

# With so many reads at most, a place's sum is written out: XLA:CPU vectorizes no reduction of so few numbers.
_FEW_READS = 8


@dataclass(frozen=True)
class Windows:
    """For each place of an output dimension, the places of the input dimension that it reads, and with which weights.

    Attributes: size, of the input; index, weight, real: (places, reads). A read that is not real only fills the row: its weight is 0,
    its index is that of a real one, and what it reads must not count.
    """

    size: int
    index: np.ndarray
    weight: np.ndarray
    real: np.ndarray

    @staticmethod
    def from_reads(places: int, size: int, place: np.ndarray, source: np.ndarray, weight: np.ndarray) -> Windows:
        """From single reads (output place, input place, weight), in any order. A place without any gives 0."""
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
        """Adaptive pooling: place i reads from floor(i * size / places) to ceil((i + 1) * size / places), all with the same weight."""
        starts = np.arange(places) * size // places
        ends = -(-(np.arange(1, places + 1) * size) // places)
        lengths = ends - starts
        place = np.repeat(np.arange(places), lengths)
        source = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(starts, lengths)
        return Windows.from_reads(places, size, place, source, np.repeat(1.0 / lengths, lengths))

    def mirrored(self) -> Windows:
        """The transpose: how the gradient of the output is read to give that of the input."""
        place = np.broadcast_to(np.arange(len(self.index))[:, None], self.index.shape)
        return Windows.from_reads(self.size, len(self.index), self.index[self.real], place[self.real], self.weight[self.real])

    def gather(self, x: Array, dim: int) -> Array:
        """The elements that each place reads: `dim` becomes two dimensions, (places, reads)."""
        return take(x, self.index, dim)

    def sum(self, x: Array, dim: int) -> Array:
        """The weighted sums of what is read along `dim`, in x's dtype, which must be a float."""
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
        """What the reads of one column add to each place."""
        found = take(x, self.index[:, read], dim)
        weighted = lax.mul(found, lax.broadcast_in_dim(self.weight[:, read].astype(x.dtype), found.shape, (dim,)))
        if self.real[:, read].all():
            return weighted
        return lax.select(lax.broadcast_in_dim(self.real[:, read], found.shape, (dim,)), weighted, lax.full_like(weighted, 0))

    @staticmethod
    def _per_read(values: np.ndarray, read: Array, dim: int) -> Array:
        return lax.broadcast_in_dim(values, read.shape, (dim, dim + 1))


def take(x: Array, index: np.ndarray, dim: int) -> Array:
    """x at constant positions along `dim`, in whose place the dimensions of `index` stand. Equal steps make a slice, equal repeats a
    broadcast: these XLA computes without looking up where to read."""
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
