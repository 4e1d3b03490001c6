"""Products with an updated tensor whose new slices are indexed in several dimensions. Used by products_of_updates.py.

An example is a key/value cache in which each sample has its own position: `cache[samples, :, positions] = new`. A new slice is multiplied
only with the part of the other operand at the same indices. In attention, a new key is multiplied with the queries of its sample, and the
score replaces that of the old key. A new value is multiplied with its attention weight, and added to the sum of its sample.
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
from .scattering import broadcast_values, write_slices

# A label for each dimension of an array: the number of a dimension of the updated tensor, or a string for any other dimension.
Labels = Sequence[int | str]
Product = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class IndexedSlices:
    """The new slices of an updated tensor, from the first written to the last.

    Attributes:
        new: The slices, of shape (slices, *the tensor's dimensions without `dims`).
        indices: The index of each slice in each of `dims`, int32 of shape (slices, len(dims)); -1 or the size if out of range.
        dims: The dimensions of the tensor in which slices have an index.
        shape: The shape of the tensor.
    """

    new: Array
    indices: Array
    dims: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def of(operand: UpdatedOperand, written: Sequence[tuple[Array, dict[int, Array]]]) -> IndexedSlices:
        """Builds the slices of all updates of an operand. `written` holds the result of `indexed_slices` for each update."""
        dtype, shape = dtypes.to_jax(operand.dtype), operand.shape
        rest = [size for dim, size in enumerate(shape) if dim not in operand.dims]
        new = [convert(lax.reshape(values, (values.shape[0], *rest)), dtype) for values, _ in written]
        indices = [_unravelled_indices(operand, indices_by_dim) for _, indices_by_dim in written]
        return IndexedSlices(lax.concatenate(new, 0), lax.concatenate(indices, 0), operand.dims, shape)

    @property
    def count(self) -> int:
        return self.indices.shape[0]

    @property
    def labels(self) -> list[int | str]:
        """The labels of the dimensions of `new`."""
        return ["slice", *(dim for dim in range(len(self.shape)) if dim not in self.dims)]

    @property
    def remaining(self) -> Array:
        """For each slice, True if it remains in the result, because no later slice has the same indices."""
        sizes = [self.shape[dim] for dim in self.dims]
        strides = np.array([math.prod(sizes[n + 1 :]) for n in range(len(sizes))], np.int32)
        flat = lax.reduce_sum(lax.mul(self.indices, lax.broadcast_in_dim(strides, self.indices.shape, (1,))), [1])
        slice_numbers = lax.iota(np.int32, self.count)
        last_writer = write_slices(lax.full((math.prod(sizes),), -1, np.int32), 0, flat, slice_numbers, "amax")
        return lax.eq(take_along(last_writer, 0, flat), slice_numbers)

    def gather(self, x: Array, labels: Labels) -> tuple[Array, list[int | str]]:
        """Returns the part of x at the indices of each slice, and the labels of the dimensions: "slice", then the remaining ones of x."""
        dims = [dim for dim in self.dims if dim in labels]
        axes = tuple(labels.index(dim) for dim in dims)
        other_labels = [label for label in labels if label not in dims]
        if not dims:
            return lax.broadcast(x, (self.count,)), ["slice", *other_labels]
        dimension_numbers = lax.GatherDimensionNumbers(tuple(range(1, 1 + len(other_labels))), tuple(sorted(axes)), axes)
        sizes = [1 if label in dims else size for label, size in zip(labels, x.shape, strict=True)]
        return lax.gather(x, self._index_columns(dims), dimension_numbers, sizes, mode=lax.GatherScatterMode.CLIP), ["slice", *other_labels]

    def set(self, x: Array, labels: Labels, values: Array) -> Array:
        """Returns x with values written at the indices of the slices. Of several slices at one index, the last remains.

        Args:
            x: The array.
            labels: The labels of the dimensions of x.
            values: One part for each slice, with the dimensions of the result of `gather`.
        """
        dims = [dim for dim in self.dims if dim in labels]
        return lax.scatter(x, self._index_columns(dims), values, _scatter_numbers(labels, dims), mode=lax.GatherScatterMode.FILL_OR_DROP)

    def add(self, x: Array, labels: Labels, values: Array) -> Array:
        """Returns x with values added at the indices of the slices. The arguments are those of `set`."""
        dims = [dim for dim in self.dims if dim in labels]
        if not dims:
            return lax.add(x, lax.reduce_sum(values, [0]))
        return lax.scatter_add(
            x, self._index_columns(dims), values, _scatter_numbers(labels, dims), mode=lax.GatherScatterMode.FILL_OR_DROP
        )

    def zero_overwritten(self, values: Array) -> Array:
        """Returns values (slices, ...), with zeros for the slices that a later slice overwrites."""
        return lax.select(lax.broadcast_in_dim(self.remaining, values.shape, (0,)), values, lax.full_like(values, 0))

    def _index_columns(self, dims: Sequence[int]) -> Array:
        """Returns the indices of the slices in some of the dimensions: (slices, len(dims))."""
        return lax.concatenate([lax.slice_in_dim(self.indices, column, column + 1, axis=1) for column in map(self.dims.index, dims)], 1)


def _scatter_numbers(labels: Labels, dims: Sequence[int]) -> lax.ScatterDimensionNumbers:
    axes = tuple(labels.index(dim) for dim in dims)
    return lax.ScatterDimensionNumbers(tuple(range(1, 1 + len(labels) - len(dims))), tuple(sorted(axes)), axes)


def _unravelled_indices(operand: UpdatedOperand, indices_by_dim: dict[int, Array]) -> Array:
    """Converts indices in the dimensions of a tensor to indices in the dimensions into which they are split (`UpdatedOperand.parts`).

    Dimensions of size 1 are left out. Indices out of range are clamped to -1 or the size.

    Shape:  (slices, indexed dimensions).
    Dtype:  int32.
    """
    columns = []
    for dim, sizes in enumerate(operand.parts):
        index = indices_by_dim.get(dim)
        for n in range(len(sizes)):
            if index is not None and sizes[n] > 1:
                stride = np.array(math.prod(sizes[n + 1 :]), index.dtype)
                digit, index = (lax.div(index, lax.full_like(index, stride)), lax.rem(index, lax.full_like(index, stride)))
                columns.append(convert(lax.clamp(np.array(-1, digit.dtype), digit, np.array(sizes[n], digit.dtype)), np.dtype(np.int32)))
    return lax.concatenate([lax.expand_dims(column, [1]) for column in columns], 1)


def indexed_slices(ctx: Context, update: SliceUpdate) -> tuple[Array, dict[int, Array]]:
    """Returns the slices that an index_put with several indices or a scatter writes, and their indices.

    The slices have shape (slices, *the tensor's dimensions without an index). The indices are a dict from each indexed dimension to a
    vector (slices).
    """
    node, old = update.node, ctx.values[update.base]
    shape = old.shape
    if node.target is not aten.scatter.src:
        gather_indices = GatherIndices.of(old, [index if index is None else ctx.values[index] for index in node.args[1]])
        values = broadcast_values(ctx.values[node.args[2]], gather_indices.result_shape(old))
        indexed_dims = range(gather_indices.position, gather_indices.position + len(gather_indices.shape))
        values = lax.transpose(values, [*indexed_dims, *(dim for dim in range(values.ndim) if dim not in indexed_dims)])
        rows = lax.reshape(gather_indices.coordinates, (update.count, len(gather_indices.dims)))
        indices_by_dim = {
            dim: lax.reshape(lax.slice_in_dim(rows, n, n + 1, axis=1), (update.count,)) for n, dim in enumerate(gather_indices.dims)
        }
        other_sizes = [size for dim, size in enumerate(shape) if dim not in gather_indices.dims]
        return lax.reshape(values, (update.count, *other_sizes)), indices_by_dim
    dim, indices = node.args[1] % len(shape), ctx.values[node.args[2]]
    dims = sorted({*varying_dims(ctx, node.args[2]), dim})
    varying_indices = lax.slice(indices, [0] * indices.ndim, [size if d in dims else 1 for d, size in enumerate(indices.shape)])
    source = lax.slice(ctx.values[node.args[3]], [0] * indices.ndim, indices.shape)
    source = lax.transpose(source, [*dims, *(d for d in range(len(shape)) if d not in dims)])
    coordinates = {d: varying_indices if d == dim else lax.broadcasted_iota(varying_indices.dtype, varying_indices.shape, d) for d in dims}
    other_sizes = [size for d, size in enumerate(shape) if d not in dims]
    return lax.reshape(source, (update.count, *other_sizes)), {d: lax.reshape(index, (update.count,)) for d, index in coordinates.items()}


def product_with_slices(
    x: Array, old: Array, slices: IndexedSlices, labels: tuple[Labels, Labels], sums_slices: bool, multiply: Product, dtype: DType
) -> Array:
    """Returns the product of x and the updated tensor, without building that tensor.

    Args:
        x: The other operand.
        old: The tensor before the update.
        slices: The new slices.
        labels: The labels of the dimensions of x, and those of the dimensions of the result.
        sums_slices: True if the product sums over the indexed dimensions.
        multiply: A function of two arrays with the dimensions of x and of `old`, which returns their product in `dtype`.
        dtype: The dtype of the result.
    """
    x_labels, result_labels = labels
    old_labels: Labels = range(old.ndim)
    x_parts, part_labels = slices.gather(x, x_labels)
    other_labels = [label for label in result_labels if label not in slices.dims]
    if not sums_slices:
        return slices.set(
            multiply(x, old),
            result_labels,
            _product_per_slice(convert(x_parts, dtype), part_labels, convert(slices.new, dtype), slices.labels, other_labels),
        )
    masked_x = slices.set(x, x_labels, lax.full_like(x_parts, 0))
    is_old_finite = lax.reduce_and(lax.is_finite(slices.gather(old, old_labels)[0]), range(slices.new.ndim))

    def multiply_without_overwritten(old: Array, masked_x: Array) -> Array:
        return multiply(masked_x, slices.set(old, old_labels, lax.full_like(slices.new, 0)))

    product_with_old = lax.cond(is_old_finite, lambda old, masked_x: multiply(masked_x, old), multiply_without_overwritten, old, masked_x)
    x_parts, new_slices = slices.zero_overwritten(convert(x_parts, dtype)), slices.zero_overwritten(convert(slices.new, dtype))
    return slices.add(product_with_old, result_labels, _product_per_slice(x_parts, part_labels, new_slices, slices.labels, other_labels))


def _product_per_slice(x: Array, x_labels: Labels, y: Array, y_labels: Labels, result_labels: Labels) -> Array:
    """Returns the product of x and y for each slice, with the dimensions ("slice", *result_labels). Other dimensions are summed.

    Args:
        x: The parts of the other operand, one for each slice.
        x_labels: The labels of the dimensions of x.
        y: The slices.
        y_labels: The labels of the dimensions of y.
        result_labels: The labels of the dimensions that are not summed.
    """
    y = lax.reshape(y, [size for dim, size in enumerate(y.shape) if dim == 0 or size > 1])
    y_labels = [label for label in y_labels if label in x_labels or label in result_labels]
    common = [label for label in x_labels if label in y_labels]
    summed, batch = (
        [label for label in common if label not in ("slice", *result_labels)],
        [label for label in common if label in ("slice", *result_labels)],
    )
    dims = tuple((tuple(map(x_labels.index, group)), tuple(map(y_labels.index, group))) for group in (summed, batch))
    out = lax.dot_general(x, y, dims, precision=lax.Precision.HIGHEST)
    labels = [*batch, *(label for label in x_labels if label not in common), *(label for label in y_labels if label not in common)]
    return lax.transpose(out, [labels.index(label) for label in ("slice", *result_labels)])
