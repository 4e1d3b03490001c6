"""Products with an updated tensor whose new slices are indexed in several dimensions. Used by products_of_updates.py.

An example is a key/value cache in which each sample has its own position: `cache[samples, :, positions] = new`. A new slice is multiplied
only with the part of the other operand that belongs to its indices. In an attention, a new key is multiplied with its own sample's queries,
and the score replaces that of the old key; a new value is multiplied with its own sample's weight, and added to its own sample's sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dtypes import DType
from ..promotion import convert
from ..slice_updates import SliceUpdate, UpdatedOperand, varying_dims
from .indexing import GatherIndices, take_along
from .scattering import fit, write_slices

# A label for each dimension of an array: the number of a dimension of the updated tensor, or a string for any other dimension.
Labels = Sequence[int | str]
Product = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class Samples:
    """The new slices of an updated tensor, from the first written to the last.

    Attributes:
        new: The slices, of shape (slices, *the tensor's dimensions without `dims`).
        places: The index of each slice in each of `dims`, int32 of shape (slices, len(dims)).
        dims: The dimensions of the tensor in which slices have an index.
        shape: The shape of the tensor.
    """

    new: Array
    places: Array
    dims: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(found: UpdatedOperand, written: Sequence[tuple[Array, dict[int, Array]]]) -> Samples:
        """Builds the slices of all updates of an operand. written: for each update, the result of `samples`."""
        dtype, shape = dtypes.to_jax(found.dtype), found.shape
        rest = [size for dim, size in enumerate(shape) if dim not in found.dims]
        new = [convert(lax.reshape(values, (values.shape[0], *rest)), dtype) for values, _ in written]
        places = [_unravelled(found, at) for _, at in written]
        return Samples(lax.concatenate(new, 0), lax.concatenate(places, 0), found.dims, shape)

    @property
    def count(self) -> int:
        return self.places.shape[0]

    @property
    def labels(self) -> list[int | str]:
        """The labels of the dimensions of `new`."""
        return ["slice", *(dim for dim in range(len(self.shape)) if dim not in self.dims)]

    @property
    def counts(self) -> Array:
        """For each slice, True if it remains in the result, that is, if no later slice has the same indices."""
        sizes = [self.shape[dim] for dim in self.dims]
        steps = np.array([math.prod(sizes[at + 1 :]) for at in range(len(sizes))], np.int32)
        flat = lax.reduce_sum(lax.mul(self.places, lax.broadcast_in_dim(steps, self.places.shape, (1,))), [1])
        order = lax.iota(np.int32, self.count)
        writer = write_slices(lax.full((math.prod(sizes),), -1, np.int32), 0, flat, order, "amax")
        return lax.eq(take_along(writer, 0, flat), order)

    def taken(self, x: Array, labels: Labels) -> tuple[Array, list[int | str]]:
        """Returns the parts of x at the indices of the slices, with the slices as first dimension, and the labels of that array."""
        dims = [dim for dim in self.dims if dim in labels]
        axes = tuple(labels.index(dim) for dim in dims)
        others = [label for label in labels if label not in dims]
        if not dims:
            return lax.broadcast(x, (self.count,)), ["slice", *others]
        numbers = lax.GatherDimensionNumbers(tuple(range(1, 1 + len(others))), tuple(sorted(axes)), axes)
        sizes = [1 if label in dims else size for label, size in zip(labels, x.shape, strict=True)]
        return lax.gather(x, self._rows(dims), numbers, sizes, mode=lax.GatherScatterMode.CLIP), ["slice", *others]

    def set(self, x: Array, labels: Labels, values: Array) -> Array:
        """Returns x with values written at the indices of the slices. As in `index_put`, the last of several slices at an index counts.

        values: one part for each slice, with dimensions as in the result of `taken`.
        """
        dims = [dim for dim in self.dims if dim in labels]
        return lax.scatter(x, self._rows(dims), values, _into(labels, dims), mode=lax.GatherScatterMode.FILL_OR_DROP)

    def add(self, x: Array, labels: Labels, values: Array) -> Array:
        """Returns x with values added at the indices of the slices. values: as for `set`."""
        dims = [dim for dim in self.dims if dim in labels]
        if not dims:
            return lax.add(x, lax.reduce_sum(values, [0]))
        return lax.scatter_add(x, self._rows(dims), values, _into(labels, dims), mode=lax.GatherScatterMode.FILL_OR_DROP)

    def counted(self, values: Array) -> Array:
        """Returns the values of each slice, with zeros for the slices that a later one overwrites."""
        return lax.select(lax.broadcast_in_dim(self.counts, values.shape, (0,)), values, lax.full_like(values, 0))

    def _rows(self, dims: Sequence[int]) -> Array:
        return lax.concatenate([lax.slice_in_dim(self.places, at, at + 1, axis=1) for at in map(self.dims.index, dims)], 1)


def _into(labels: Labels, dims: Sequence[int]) -> lax.ScatterDimensionNumbers:
    axes = tuple(labels.index(dim) for dim in dims)
    return lax.ScatterDimensionNumbers(tuple(range(1, 1 + len(labels) - len(dims))), tuple(sorted(axes)), axes)


def _unravelled(found: UpdatedOperand, at: dict[int, Array]) -> Array:
    """Converts indices in the dimensions of a tensor to indices in the dimensions they are split into (`UpdatedOperand.parts`).

    Dimensions of size 1 are left out. Indices out of range are clamped to -1 or the size.

    Shape:  (slices, indexed dimensions).
    Dtype:  int32.
    """
    columns = []
    for dim, sizes in enumerate(found.parts):
        place = at.get(dim)
        for inner in range(len(sizes)):
            if place is not None and sizes[inner] > 1:
                step = np.array(math.prod(sizes[inner + 1 :]), place.dtype)
                part, place = (lax.div(place, lax.full_like(place, step)), lax.rem(place, lax.full_like(place, step)))
                columns.append(convert(lax.clamp(np.array(-1, part.dtype), part, np.array(sizes[inner], part.dtype)), np.dtype(np.int32)))
    return lax.concatenate([lax.expand_dims(column, [1]) for column in columns], 1)


def samples(ctx: Context, update: SliceUpdate) -> tuple[Array, dict[int, Array]]:
    """Returns the slices that an index_put with several indices, or a scatter, writes, and their indices.

    The slices have shape (slices, *the tensor's dimensions without index). The indices are one vector for each indexed dimension.
    """
    node, old = update.node, ctx.values[update.base]
    shape = old.shape
    if node.target is not aten.scatter.src:
        picks = GatherIndices.of(old, [index if index is None else ctx.values[index] for index in node.args[1]])
        values = fit(ctx.values[node.args[2]], picks.result_shape(old))
        before = range(picks.position, picks.position + len(picks.shape))
        values = lax.transpose(values, [*before, *(dim for dim in range(values.ndim) if dim not in before)])
        rows = lax.reshape(picks.coordinates, (update.count, len(picks.dims)))
        at = {dim: lax.reshape(lax.slice_in_dim(rows, n, n + 1, axis=1), (update.count,)) for n, dim in enumerate(picks.dims)}
        return lax.reshape(values, (update.count, *(size for dim, size in enumerate(shape) if dim not in picks.dims))), at
    dim, indices = node.args[1] % len(shape), ctx.values[node.args[2]]
    dims = sorted({*varying_dims(ctx, node.args[2]), dim})
    chosen = lax.slice(indices, [0] * indices.ndim, [size if at in dims else 1 for at, size in enumerate(indices.shape)])
    source = lax.slice(ctx.values[node.args[3]], [0] * indices.ndim, indices.shape)
    source = lax.transpose(source, [*dims, *(at for at in range(len(shape)) if at not in dims)])
    coordinates = {at: chosen if at == dim else lax.broadcasted_iota(chosen.dtype, chosen.shape, at) for at in dims}
    rest = [size for at, size in enumerate(shape) if at not in dims]
    return lax.reshape(source, (update.count, *rest)), {at: lax.reshape(place, (update.count,)) for at, place in coordinates.items()}


def of_samples(x: Array, old: Array, new: Samples, labels: tuple[Labels, Labels], sums: bool, times: Product, wide: DType) -> Array:
    """Returns the product of x with the tensor that `old` is after the new slices have been written, without building that tensor.

    Args:
        x: The other operand.
        old: The tensor before the update.
        new: The new slices.
        labels: The labels of the dimensions of x and of those of the result.
        sums: True if the product sums over the indexed dimensions.
        times: Returns the product of an array like x and a tensor like `old`, in dtype `wide`.
        wide: The dtype of the result.
    """
    theirs, results = labels
    every: Labels = range(old.ndim)
    mine, own = new.taken(x, theirs)
    left = [label for label in results if label not in new.dims]
    if not sums:
        return new.set(times(x, old), results, _each(convert(mine, wide), own, convert(new.new, wide), new.labels, left))
    kept = new.set(x, theirs, lax.full_like(mine, 0))
    finite = lax.reduce_and(lax.is_finite(new.taken(old, every)[0]), range(new.new.ndim))

    def without(old: Array, kept: Array) -> Array:
        return times(kept, new.set(old, every, lax.full_like(new.new, 0)))

    untouched = lax.cond(finite, lambda old, kept: times(kept, old), without, old, kept)
    mine, fresh = new.counted(convert(mine, wide)), new.counted(convert(new.new, wide))
    return new.add(untouched, results, _each(mine, own, fresh, new.labels, left))


def _each(x: Array, own: Labels, y: Array, theirs: Labels, results: Labels) -> Array:
    """Returns the product of x and y for each slice, with the dimensions ("slice", *results). Other dimensions are summed.

    Args:
        x: The parts of the other operand, one for each slice.
        own: The labels of x.
        y: The slices.
        theirs: The labels of y.
        results: The labels of the dimensions that are not summed.
    """
    y = lax.reshape(y, [size for at, size in enumerate(y.shape) if at == 0 or size > 1])
    theirs = [label for label in theirs if label in own or label in results]
    both = [label for label in own if label in theirs]
    over, kept = [label for label in both if label not in ("slice", *results)], [label for label in both if label in ("slice", *results)]
    dims = tuple((tuple(map(own.index, some)), tuple(map(theirs.index, some))) for some in (over, kept))
    out = lax.dot_general(x, y, dims, precision=lax.Precision.HIGHEST)
    labels = [*kept, *(label for label in own if label not in both), *(label for label in theirs if label not in both)]
    return lax.transpose(out, [labels.index(label) for label in ("slice", *results)])
