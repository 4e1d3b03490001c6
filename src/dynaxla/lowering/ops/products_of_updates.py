"""Products with an updated tensor, computed from the tensor before the update and the new slices, without a copy (see slice_updates.py).

An updated tensor is a tensor with a few new slices, such as a key/value cache after a new token. If the updated dimension remains in the
result, the products with the new slices replace the products with the overwritten slices. If the updated dimension is summed, the
overwritten slices are multiplied by zero, and the products with the new slices are added. Zero times infinity or NaN is NaN. So if an
overwritten slice has such a value, the overwritten slices are set to zero first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu import onednn_support
from ..cpu.gemv import product, strided_product
from ..cpu.materialize import in_memory
from ..dtypes import DType
from ..implementations import Implementations
from ..promotion import convert, expand
from ..slice_updates import Factor, SliceUpdate, UpdatedOperand, updated_operand, written_range
from .indexed_slices import IndexedSlices, indexed_slices, product_with_slices
from .indexing import take_along, wrap_negative
from .scattering import broadcast_values, write_slices


@dataclass(frozen=True)
class UpdatedProductProblem:
    """The problem (see implementations.py) of a product with an updated tensor.

    Attributes:
        shape: The shape of the tensor, with its dimensions split (see `UpdatedOperand`).
        dtype: The dtype of the tensor.
        new_slice_count: The number of new slices.
        slice_count: The number of slices of the tensor: the product of the sizes of the updated dimensions.
        rows: The number of vectors of the other operand with which each vector of the tensor is multiplied.
        sums_slices: True if the product sums over the dimension of the slices.
        is_moved: True if the batch dimensions are not the first dimensions of the tensor.
        has_strides: True if the tensor has, apart from the batch dimensions, one summed dimension and one other dimension, and one of the
            two is the fastest-varying in memory.
        platform: JAX's name of the platform.
    """

    shape: tuple[int, ...]
    dtype: DType
    new_slice_count: int
    slice_count: int
    rows: int
    sums_slices: bool
    is_moved: bool
    has_strides: bool
    platform: str


PRODUCT_OF_UPDATE: Implementations[UpdatedProductProblem] = Implementations("product_of_update")

# For a tensor of at most this many elements, copying the tensor is faster than avoiding the copy.
_MAX_COPIED_ELEMENTS = 20_000
# With more rows than this, the product (the scores, in attention) is no smaller than the tensor.
_MAX_ROWS = 32
# The tensor must have at least this many slices for each new one.
_MIN_SLICES_PER_NEW_SLICE = 4


def product_of_update(ctx: Context, position: int, other: Array, contracting: Sequence[int], batch: Sequence[int]) -> Array | None:
    """Returns the current node's product of a view of an updated tensor and another array, without materializing the updated tensor.

    Returns None if the argument is not a view of an updated tensor, or if materializing the tensor is expected to be faster.

    Shape:  batch dimensions, then the remaining dimensions of `other`, then those of the view.
    Dtype:  the accumulator's.

    Args:
        ctx: The context of the current node.
        position: The position of the node's argument that is the view.
        other: The other operand.
        contracting: The summed dimensions of `other`.
        batch: The batch dimensions of `other`.
    """
    operand = updated_operand(ctx, position)
    if operand is None:
        return None
    dtype = dtypes.to_jax(operand.dtype)
    problem = UpdatedProductProblem(
        operand.shape,
        dtype,
        operand.new_slice_count,
        operand.slice_count,
        operand.rows,
        operand.sums_slices,
        operand.is_moved,
        operand.has_strides,
        ctx.platform,
    )
    result: Array | None = ctx.choose(PRODUCT_OF_UPDATE, problem).run(problem, ctx, operand, other, contracting, batch)
    return result


def _prefers_parts(problem: UpdatedProductProblem) -> bool:
    """True if avoiding the copy is expected to be faster.

    If the batch dimensions of the tensor are not its first ones, a product with several rows needs a transposed copy of the tensor. So
    such products return False, except for half types, and for tensors that oneDNN reads with their strides.
    """
    if problem.is_moved and problem.rows > 1 and problem.dtype.itemsize > 2 and not _reads_strides(problem):
        return False
    return (
        math.prod(problem.shape) > _MAX_COPIED_ELEMENTS
        and problem.rows <= _MAX_ROWS
        and problem.new_slice_count * _MIN_SLICES_PER_NEW_SLICE <= problem.slice_count
    )


def _reads_strides(problem: UpdatedProductProblem) -> bool:
    """True if oneDNN reads the tensor with its strides, without a copy. Half types would be converted first."""
    return problem.is_moved and problem.has_strides and problem.dtype == np.float32 and onednn_support.supports(problem.dtype)


@dataclass(frozen=True)
class _OtherOperand:
    """The other operand of the product, reshaped so that each dimension corresponds to one (split) dimension of the tensor or to none.

    Attributes:
        array: The reshaped operand.
        labels: For each dimension of `array`, the corresponding dimension of the tensor, or a string if there is none.
        batch_labels: For each batch dimension of the product, the labels of the dimensions of `array` of which it consists.
        rows: The labels of the dimensions that are neither summed nor batch dimensions.
    """

    array: Array
    labels: tuple[int | str, ...]
    batch_labels: tuple[tuple[int | str, ...], ...]
    rows: tuple[str, ...]

    @staticmethod
    def of(operand: UpdatedOperand, array: Array, contracting: Sequence[int], batch: Sequence[int]) -> _OtherOperand:
        tensor_dims = {
            **dict(zip(contracting, operand.roles.contracting, strict=True)),
            **dict(zip(batch, operand.roles.batch, strict=True)),
        }
        labels: list[int | str] = []
        shape: list[int] = []
        labels_of_dim: dict[int, tuple[int | str, ...]] = {}
        for dim, size in enumerate(array.shape):
            factors: Sequence[Factor] = operand.factors[tensor_dims[dim]] if dim in tensor_dims else [(None, size)]
            parts = [(f"{dim} {n}" if label is None else label, part) for n, (label, part) in enumerate(factors)]
            labels += [label for label, _ in parts]
            shape += [part for _, part in parts]
            labels_of_dim[dim] = tuple(label for label, _ in parts)
        rows = tuple(str(label) for dim in range(array.ndim) if dim not in tensor_dims for label in labels_of_dim[dim])
        return _OtherOperand(lax.reshape(array, shape), tuple(labels), tuple(labels_of_dim[dim] for dim in batch), rows)


@PRODUCT_OF_UPDATE.implementation("parts", platforms=["cpu"], preferred=_prefers_parts)
def _by_parts(
    problem: UpdatedProductProblem,
    ctx: Context,
    operand: UpdatedOperand,
    other_array: Array,
    contracting: Sequence[int],
    batch_dims: Sequence[int],
) -> Array:
    """Multiplies with the tensor before the update and with the new slices, and combines the products as the module's docstring says.

    Dimensions of the tensor with a size above 1 are in `batch`, `summed`, or `free`, which the other operand lacks. `rows` are the labels
    of the other operand's dimensions that the tensor lacks.
    """
    other = _OtherOperand.of(operand, other_array, contracting, batch_dims)
    old = lax.reshape(ctx.values[operand.updates[0].base], operand.shape)
    nontrivial = [dim for dim, size in enumerate(operand.shape) if size > 1]
    contracted = {origin for dim in operand.roles.contracting for origin, _ in operand.factors[dim]}
    summed = [dim for dim in nontrivial if dim in contracted]
    batch = [dim for dim in nontrivial if dim in other.labels and dim not in summed]
    free = [dim for dim in nontrivial if dim not in other.labels]
    rows = [label for label in other.labels if isinstance(label, str)]
    leading: list[int | str] = [*batch, *rows]
    sizes: dict[int | str, int] = dict(zip(other.labels, other.array.shape, strict=True))
    x = lax.transpose(other.array, [other.labels.index(label) for label in (*leading, *summed)])

    def multiply(x: Array, y: Array) -> Array:
        """Returns the product (*batch, *rows, *free) of x (*batch, *rows, *summed) and y, which has the dimensions of the tensor."""
        if y.shape == old.shape and _reads_strides(problem):
            x = lax.reshape(x, [*(sizes[label] for label in batch), math.prod(sizes[label] for label in rows), old.shape[summed[0]]])
            out = strided_product(
                x, lax.reshape(y, [old.shape[dim] for dim in nontrivial]), [nontrivial.index(dim) for dim in (*batch, *free, *summed)]
            )
            return lax.reshape(out, [*(sizes[label] for label in leading), old.shape[free[0]]])
        groups = [math.prod(sizes[label] for label in batch), math.prod(sizes[label] for label in rows)]
        groups.append(math.prod(y.shape[dim] for dim in summed))
        out = product(lax.reshape(x, groups), *_batched_matrices(y, batch, summed, free), ctx.settings.matmul_precision)
        return lax.reshape(out, [*(sizes[label] for label in leading), *(y.shape[dim] for dim in free)])

    if len(operand.dims) > 1:
        new = IndexedSlices.of(operand, [_written_slices(ctx, update) for update in operand.updates])
        out = product_with_slices(
            x, old, new, ([*leading, *summed], [*leading, *free]), operand.sums_slices, multiply, dtypes.accumulator(problem.dtype)
        )
    elif operand.sums_slices:
        out = _product_over_slices(x, old, _SlicesAlongDim.of(ctx, operand), len(leading) + summed.index(operand.dims[0]), multiply)
    else:
        slices, axis = _SlicesAlongDim.of(ctx, operand), len(leading) + free.index(operand.dims[0])
        old_scores, new_scores = multiply(x, old), multiply(x, slices.new)
        # The scores are materialized because a softmax reads them twice.
        out = in_memory(
            lax.select(
                lax.broadcast_in_dim(slices.is_written, old_scores.shape, (axis,)),
                slices.to_indices(new_scores, axis, old_scores.shape),
                old_scores,
            )
        )
    sizes.update(zip(free, (operand.shape[dim] for dim in free), strict=True))
    return _in_result_order(out, [*leading, *free], sizes, operand, other)


def _in_result_order(
    out: Array, labels: Sequence[int | str], sizes: Mapping[int | str, int], operand: UpdatedOperand, other: _OtherOperand
) -> Array:
    """Transposes and reshapes a product to the op's result. labels: a label for each dimension of `out`. sizes: the size for each label."""
    operand_groups = [
        [dim for dim, _ in factor]
        for dim_of_view, factor in enumerate(operand.factors)
        if dim_of_view not in operand.roles.contracting + operand.roles.batch
    ]
    groups: list[Sequence[int | str | None]] = [*other.batch_labels, *([row] for row in other.rows), *operand_groups]
    out = lax.transpose(out, [labels.index(label) for group in groups for label in group if label is not None])
    return lax.reshape(out, [math.prod(sizes[label] for label in group if label is not None) for group in groups])


def _product_over_slices(x: Array, old: Array, slices: _SlicesAlongDim, axis: int, multiply: Callable[[Array, Array], Array]) -> Array:
    """Returns the product that sums over the dimension of the slices, which is `axis` in x."""
    masked_x = lax.select(lax.broadcast_in_dim(slices.is_written, x.shape, (axis,)), lax.full_like(x, 0), x)
    is_old_finite = lax.reduce_and(lax.is_finite(take_along(old, slices.dim, slices.clamped_indices)), range(old.ndim))

    def multiply_without_overwritten(old: Array, masked_x: Array) -> Array:
        return multiply(masked_x, lax.select(lax.broadcast_in_dim(slices.is_written, old.shape, (slices.dim,)), lax.full_like(old, 0), old))

    product_with_old = lax.cond(is_old_finite, lambda old, masked_x: multiply(masked_x, old), multiply_without_overwritten, old, masked_x)
    return lax.add(product_with_old, multiply(slices.gather(x, axis), slices.remaining_slices))


def _batched_matrices(y: Array, batch: Sequence[int], summed: Sequence[int], free: Sequence[int]) -> tuple[Array, bool, bool]:
    """Returns y as a batch of matrices, and two flags.

    The matrices are (batch, free, summed) if a summed dimension of y comes after all free ones, else (batch, summed, free). The first flag
    is True for (batch, free, summed). The second flag is True if the matrices have their elements in another order in memory than y.
    """
    size_one_dims = [dim for dim in range(y.ndim) if dim not in (*batch, *summed, *free)]
    is_summed_last = not free or (bool(summed) and max(summed) > max(free))
    groups = [batch, free, summed] if is_summed_last else [batch, summed, free]
    order = [dim for dims in groups for dim in dims]
    transposed = lax.transpose(y, [*size_one_dims, *order])
    return lax.reshape(transposed, [math.prod(y.shape[dim] for dim in dims) for dims in groups]), is_summed_last, order != sorted(order)


@PRODUCT_OF_UPDATE.implementation("whole")
def _by_whole(
    problem: UpdatedProductProblem, ctx: Context, operand: UpdatedOperand, other: Array, contracting: Sequence[int], batch: Sequence[int]
) -> None:
    """Returns None: the caller multiplies with the updated tensor."""


@dataclass(frozen=True)
class _SlicesAlongDim:
    """The new slices of a tensor along one dimension, from the first written to the last.

    Attributes:
        new: The slices, concatenated along `dim`.
        indices: The index of each slice in `dim`, int32; -1 or `size` for a slice that is out of range and not written.
        dim: The updated dimension of the tensor.
        size: The size of that dimension in the tensor.
    """

    new: Array
    indices: Array
    dim: int
    size: int

    @staticmethod
    def of(ctx: Context, operand: UpdatedOperand) -> _SlicesAlongDim:
        (dim,) = operand.dims
        pairs = [_slices_along_dim(ctx, update) for update in operand.updates]
        dtype, size = dtypes.to_jax(operand.dtype), operand.shape[dim]
        shape = (*operand.shape[:dim], -1, *operand.shape[dim + 1 :])
        new = [convert(lax.reshape(values, [index.size if extent < 0 else extent for extent in shape]), dtype) for values, index in pairs]
        indices = [
            lax.convert_element_type(lax.clamp(np.array(-1, index.dtype), index, np.array(size, index.dtype)), np.int32)
            for _, index in pairs
        ]
        if len(pairs) == 1:
            return _SlicesAlongDim(new[0], indices[0], dim, size)
        return _SlicesAlongDim(lax.concatenate(new, dim), lax.concatenate(indices, 0), dim, size)

    @property
    def count(self) -> int:
        return int(self.indices.shape[0])

    @property
    def clamped_indices(self) -> Array:
        """The indices of the slices, clamped to the range of the dimension."""
        return lax.clamp(np.int32(0), self.indices, np.int32(self.size - 1))

    @property
    def last_writer(self) -> Array:
        """For each index of the dimension, the position in `new` of the last slice that is written there, or -1 if there is none."""
        no_writer = lax.full((self.size,), -1, np.int32)
        return write_slices(no_writer, 0, self.indices, lax.iota(np.int32, self.count), "amax")

    @property
    def is_written(self) -> Array:
        """For each index of the dimension, True if a slice is written there."""
        if self.count == 1:
            return lax.eq(lax.iota(np.int32, self.size), lax.broadcast_in_dim(self.indices, (self.size,), (0,)))
        return lax.ge(self.last_writer, lax.full((self.size,), 0, np.int32))

    @property
    def remaining(self) -> Array:
        """For each slice, True if it remains in the result: its index is in range and no later slice overwrites it."""
        if self.count == 1:
            return lax.eq(self.indices, self.clamped_indices)
        return lax.eq(take_along(self.last_writer, 0, self.clamped_indices), lax.iota(np.int32, self.count))

    @property
    def remaining_slices(self) -> Array:
        """The slices, with zeros for slices that do not remain (see `remaining`)."""
        return lax.select(lax.broadcast_in_dim(self.remaining, self.new.shape, (self.dim,)), self.new, lax.full_like(self.new, 0))

    def to_indices(self, x: Array, axis: int, shape: Sequence[int]) -> Array:
        """Moves the products of the slices, which lie along `axis` of x, to the indices of the slices. Other elements are arbitrary."""
        if self.count == 1:
            return expand(x, shape)
        return take_along(x, axis, lax.max(self.last_writer, lax.full((self.size,), 0, np.int32)))

    def gather(self, x: Array, axis: int) -> Array:
        """Returns the parts of x at the indices of the slices along `axis`, with zeros for slices that do not remain (see `remaining`)."""
        parts = take_along(x, axis, self.clamped_indices)
        return lax.select(lax.broadcast_in_dim(self.remaining, parts.shape, (axis,)), parts, lax.full_like(parts, 0))


def _written_slices(ctx: Context, update: SliceUpdate) -> tuple[Array, dict[int, Array]]:
    """Returns the slices that an update writes, and their indices by dimension, with the shapes that `indexed_slices` returns."""
    if _has_several_indices(update.node):
        return indexed_slices(ctx, update)
    values, indices = _slices_along_dim(ctx, update)
    dim = update.dims[0]
    return lax.transpose(values, [dim, *(d for d in range(values.ndim) if d != dim)]), {dim: indices}


def _has_several_indices(node: torch.fx.Node) -> bool:
    is_put = node.target in (aten.index_put.default, aten._unsafe_index_put.default)
    return node.target is aten.scatter.src or (is_put and sum(index is not None for index in node.args[1]) > 1)


def _slices_along_dim(ctx: Context, update: SliceUpdate) -> tuple[Array, Array]:
    """Returns the slices that an update in one dimension writes, concatenated along that dimension, and their indices in that dimension."""
    node, dim, shape = update.node, update.dims[0], ctx.values[update.base].shape
    if _has_several_indices(node):
        values, indices_by_dim = indexed_slices(ctx, update)
        values = lax.reshape(values, (update.count, *shape[:dim], *shape[dim + 1 :]))
        return lax.transpose(values, [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]), indices_by_dim[dim]
    if node.target is aten.index_copy.default:
        indices = ctx.values[node.args[2]]
        source = lax.reshape(ctx.values[node.args[3]], (*shape[:dim], indices.size, *shape[dim + 1 :]))
        return source, lax.reshape(indices, (indices.size,))
    if node.target in (aten.slice_scatter.default, aten.select_scatter.default):
        positions = written_range(ctx, node)
        source = ctx.values[node.args[1]]
        source = lax.expand_dims(source, [dim]) if node.target is aten.select_scatter.default else source
        indices = lax.add(lax.mul(lax.iota(np.int32, len(positions)), np.int32(positions.step)), np.int32(positions.start))
        return expand(source, (*shape[:dim], len(positions), *shape[dim + 1 :])), indices
    index, values = ctx.values[node.args[1][dim]], ctx.values[node.args[2]]
    slices = broadcast_values(values, (*shape[:dim], *index.shape, *shape[dim + 1 :]))
    slices = lax.reshape(slices, (*shape[:dim], index.size, *shape[dim + 1 :]))
    return slices, lax.reshape(wrap_negative(index, shape[dim]), (index.size,))
