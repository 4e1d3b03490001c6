"""Windows along one dimension, known at trace time, for adaptive pooling and resampling."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array, lax

from ..promotion import broadcast_back

# Up to this number of reads per window, the sum of a window is unrolled: XLA:CPU does not vectorize reductions of so few elements.
_FEW_READS = 8


@dataclass(frozen=True)
class Windows:
    """The indices of an input dimension that each index of an output dimension reads, and their weights.

    An output index with fewer reads than others is padded with invalid reads, which have weight 0 and the index of the first valid read. A
    sum must leave them out instead of relying on the weight: 0 times infinity is NaN.

    Attributes:
        size: The size of the input dimension.
        index: The indices into the input dimension, int32 (output size, reads).
        weight: The weight of each read, float64 (output size, reads).
        is_valid: True for valid reads, bool (output size, reads).
    """

    size: int
    index: np.ndarray
    weight: np.ndarray
    is_valid: np.ndarray

    @staticmethod
    def from_reads(output_size: int, size: int, output_index: np.ndarray, input_index: np.ndarray, weight: np.ndarray) -> Windows:
        """Returns the windows that consist of these reads, which are in any order. The sum of an output without reads is 0."""
        order = np.argsort(output_index, kind="stable")
        output_index, input_index, weight = output_index[order], input_index[order], weight[order]
        count = np.bincount(output_index, minlength=output_size)
        read = np.arange(len(output_index)) - np.repeat(np.cumsum(count) - count, count)
        shape = (output_size, int(count.max(initial=1)))
        index, weights, is_read = np.zeros(shape, np.int32), np.zeros(shape), np.zeros(shape, np.bool_)
        first = np.full(output_size, -1)
        first[output_index[::-1]] = input_index[::-1]
        index[:] = np.maximum(first, 0)[:, None]
        index[output_index, read] = input_index
        weights[output_index, read] = weight
        is_read[output_index, read] = True
        return Windows(size, index, weights, is_read)

    @staticmethod
    def adaptive(size: int, output_size: int) -> Windows:
        """Returns the windows of adaptive pooling.

        Output i averages the inputs floor(i * size / output_size) to ceil((i + 1) * size / output_size) - 1.
        """
        starts = np.arange(output_size) * size // output_size
        ends = -(-(np.arange(1, output_size + 1) * size) // output_size)
        lengths = ends - starts
        output_index = np.repeat(np.arange(output_size), lengths)
        input_index = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(starts, lengths)
        return Windows.from_reads(output_size, size, output_index, input_index, np.repeat(1.0 / lengths, lengths))

    def transposed(self) -> Windows:
        """Returns the transposed windows. Their sum over the gradient of the output is the gradient of the input."""
        output_index = np.broadcast_to(np.arange(len(self.index))[:, None], self.index.shape)
        return Windows.from_reads(
            self.size, len(self.index), self.index[self.is_valid], output_index[self.is_valid], self.weight[self.is_valid]
        )

    def gather(self, x: Array, dim: int) -> Array:
        """Returns the elements of x that each window reads, invalid reads included. `dim` becomes two dimensions, (windows, reads)."""
        return take(x, self.index, dim)

    def sum(self, x: Array, dim: int) -> Array:
        """Returns the weighted sum of each window along `dim`, in x's dtype, which must be a float."""
        if self.index.shape[1] == 1 and (self.weight == 1).all():
            return take(x, self.index[:, 0], dim)
        if self.index.shape[1] <= _FEW_READS:
            return functools.reduce(lax.add, (self._weighted_read(x, dim, read) for read in range(self.index.shape[1])))
        read = self.gather(x, dim)
        weighted = lax.mul(read, self._per_read(self.weight.astype(x.dtype), read, dim))
        if not self.is_valid.all():
            weighted = lax.select(self._per_read(self.is_valid, read, dim), weighted, lax.full_like(weighted, 0))
        return lax.reduce_sum(weighted, (dim + 1,))

    def _weighted_read(self, x: Array, dim: int, read: int) -> Array:
        """Returns the weighted values of read number `read` of each window."""
        values = take(x, self.index[:, read], dim)
        weighted = lax.mul(values, lax.broadcast_in_dim(self.weight[:, read].astype(x.dtype), values.shape, (dim,)))
        if self.is_valid[:, read].all():
            return weighted
        return lax.select(lax.broadcast_in_dim(self.is_valid[:, read], values.shape, (dim,)), weighted, lax.full_like(weighted, 0))

    @staticmethod
    def _per_read(values: np.ndarray, read: Array, dim: int) -> Array:
        return lax.broadcast_in_dim(values, read.shape, (dim, dim + 1))


def take(x: Array, index: np.ndarray, dim: int) -> Array:
    """Returns x at constant indices along `dim`. The dimensions of `index` take the place of `dim`.

    For one dimension of indices, XLA needs no table of indices in two cases. Indices with a constant step become a slice. All indices of
    `dim` in order, each repeated equally often, become a broadcast.
    """
    indices = index.ravel()
    if index.ndim == 1 and len(indices) > 1:
        step = int(indices[1] - indices[0])
        if step > 0 and (np.diff(indices) == step).all():
            return lax.slice_in_dim(x, int(indices[0]), int(indices[-1]) + 1, step, dim)
        repeats = len(indices) // x.shape[dim] if x.shape[dim] else 0
        if repeats > 1 and np.array_equal(indices, np.repeat(np.arange(x.shape[dim]), repeats)):
            shape = (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :])
            repeated = broadcast_back(x, shape, (dim + 1,))
            return lax.reshape(repeated, (*x.shape[:dim], len(indices), *x.shape[dim + 1 :]))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(*range(dim), *range(dim + index.ndim, x.ndim - 1 + index.ndim)),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
    )
    sizes: Sequence[int] = [1 if d == dim else size for d, size in enumerate(x.shape)]
    start = index.astype(np.int32)[..., None]
    return lax.gather(x, start, numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
