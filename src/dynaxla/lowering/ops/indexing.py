"""Lowerings of ops that read or mask by index: gathers, masks, triangles. Scatters are in scattering.py, embeddings in embedding.py.

An index out of range makes the call raise, as in eager mode (see bounds.py). Inside the program, a read out of range is clamped to the
nearest element, and a write out of range is dropped, so no memory outside the tensor is touched. Only the ops that PyTorch names "unsafe"
have no checks: their indices come from PyTorch's own decompositions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array, lax
from jax import numpy as jnp
from torch.fx import Node

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dimensions import wrap
from ..graphs import is_view
from ..promotion import broadcast, broadcast_shapes, convert, expand, expand_leading
from ..registry import lowers
from .bounds import argument, require_index, require_static
from .scans import running_sum


def wrap_negative(index: Array, size: int) -> Array:
    """Returns the indices with `size` added to the negative indices, which count from the end.

    Raises: UnsupportedOp for a mask (bool or uint8): the result's size would depend on data.
    """
    if dtypes.is_bool(index.dtype) or index.dtype == np.uint8:
        raise UnsupportedOp(
            "a mask among the indices: the result's size depends on data", hint="use torch.where, masked_fill, or integer indices"
        )
    index = convert(index, np.dtype(np.int64)) if index.dtype.itemsize < 4 else index
    return lax.select(lax.lt(index, lax.full_like(index, 0)), lax.add(index, lax.full_like(index, size)), index)


@dataclass(frozen=True)
class GatherIndices:
    """Index tensors for some dimensions of a tensor, in the format of XLA's gather and scatter.

    Attributes:
        dims: The indexed dimensions.
        coordinates: The indices, of shape (*shape, len(dims)).
        shape: The shape of the index tensors after broadcasting.
        position: The first of the dimensions of the result that come from `shape`.
    """

    dims: tuple[int, ...]
    coordinates: Array
    shape: tuple[int, ...]
    position: int

    @staticmethod
    def of(x: Array, indices: Sequence[Array | None]) -> GatherIndices:
        """Builds the gather indices of x[indices].

        If the indexed dimensions are adjacent, the dimensions of the broadcast indices replace them. Otherwise the dimensions of the
        indices come first.
        """
        dims = tuple(dim for dim, index in enumerate(indices) if index is not None)
        index_arrays = broadcast([wrap_negative(index, x.shape[dim]) for dim, index in enumerate(indices) if index is not None])
        dtype = np.dtype(np.int64) if any(index.dtype != index_arrays[0].dtype for index in index_arrays) else index_arrays[0].dtype
        rank = index_arrays[0].ndim
        columns = [lax.expand_dims(convert(index, dtype), [rank]) for index in index_arrays]
        is_adjacent = dims[-1] - dims[0] == len(dims) - 1
        coordinates = columns[0] if len(columns) == 1 else lax.concatenate(columns, rank)
        return GatherIndices(dims, coordinates, index_arrays[0].shape, dims[0] if is_adjacent else 0)

    def window_dims(self, rank: int) -> tuple[int, ...]:
        """Returns the dimensions of the result that come from dimensions without an index.

        Args:
            rank: The rank of the indexed tensor.
        """
        total = rank - len(self.dims) + len(self.shape)
        return tuple(dim for dim in range(total) if not self.position <= dim < self.position + len(self.shape))

    def result_shape(self, x: Array) -> tuple[int, ...]:
        """Returns the shape of x[indices]."""
        kept_sizes = [size for dim, size in enumerate(x.shape) if dim not in self.dims]
        return (*kept_sizes[: self.position], *self.shape, *kept_sizes[self.position :])


def require_indices(ctx: Context, x: Array, indices: Sequence[Array | None], gather_indices: GatherIndices) -> None:
    """Makes the call raise IndexError for an index out of range. As in eager mode, nothing is checked if the result is empty."""
    if 0 in gather_indices.result_shape(x):
        return
    for dim, (index, source) in enumerate(zip(indices, argument(ctx, 1), strict=True)):
        if index is not None:
            message = f"index is out of bounds for dimension {dim} with size {x.shape[dim]}"
            require_index(ctx, index, x.shape[dim], IndexError, message, source, from_end=True)


@lowers(aten.index.Tensor)
def index(x: Array, indices: Sequence[Array | None], ctx: Context) -> Array:
    """x[indices], where None stands for a whole dimension.

    Shape:  that of x, with the shape of the broadcast indices in place of the indexed dimensions if these are adjacent, else in front.
    Dtype:  that of x.
    Raises: UnsupportedOp for masks: the result's size would depend on data.
    """
    gather_indices = GatherIndices.of(x, indices)
    require_indices(ctx, x, indices, gather_indices)
    return _gather_slices(x, gather_indices)


@lowers(aten._unsafe_index.Tensor)
def unsafe_index(x: Array, indices: Sequence[Array | None]) -> Array:
    """Like `index`, but without a check: an index out of range reads the nearest element."""
    return _gather_slices(x, GatherIndices.of(x, indices))


def _gather_slices(x: Array, gather_indices: GatherIndices) -> Array:
    """Returns x[indices]. An index out of range reads the nearest element."""
    if 0 in gather_indices.result_shape(x) or x.size == 0:
        return lax.full(gather_indices.result_shape(x), 0, x.dtype)
    dimension_numbers = lax.GatherDimensionNumbers(
        offset_dims=gather_indices.window_dims(x.ndim), collapsed_slice_dims=gather_indices.dims, start_index_map=gather_indices.dims
    )
    sizes = tuple(1 if dim in gather_indices.dims else size for dim, size in enumerate(x.shape))
    return lax.gather(x, gather_indices.coordinates, dimension_numbers, sizes, mode=lax.GatherScatterMode.CLIP)


def take_along(x: Array, dim: int, indices: Array) -> Array:
    """Returns the slices of x at non-negative indices along `dim`. The dimensions of `indices` replace `dim` in the result."""
    shape = (*x.shape[:dim], *indices.shape, *x.shape[dim + 1 :])
    if 0 in shape or x.size == 0:
        return lax.full(shape, 0, x.dtype)
    dimension_numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(d if d < dim else d + indices.ndim - 1 for d in range(x.ndim) if d != dim),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
    )
    sizes = tuple(1 if d == dim else size for d, size in enumerate(x.shape))
    return lax.gather(x, lax.expand_dims(indices, [indices.ndim]), dimension_numbers, sizes, mode=lax.GatherScatterMode.CLIP)


@lowers(aten.index_select.default)
def index_select(x: Array, dim: int, indices: Array, ctx: Context) -> Array:
    """The slices of x along `dim` at the given indices, a vector or a rank-0 tensor.

    Shape:  that of x, with the number of indices as the size of `dim`.
    Dtype:  that of x.
    """
    indices, dim = lax.reshape(indices, (indices.size,)), wrap(dim, x.ndim)
    size = x.shape[dim] if x.ndim else 1
    error_type = RuntimeError if dim == 1 else IndexError  # eager mode raises RuntimeError for dim 1 only
    require_index(ctx, indices, size, error_type, f"index out of range in self: dimension {dim} has size {size}", argument(ctx, 2))
    return take_along(x, dim, indices) if x.ndim else x


@lowers(aten.gather.default)
def checked_gather(x: Array, dim: int, indices: Array, *, sparse_grad: bool = False, ctx: Context) -> Array:
    """Like `gather`, but an index out of range makes the call raise RuntimeError.

    Shape:  that of `indices`.
    Dtype:  that of x.
    """
    dim = wrap(dim, x.ndim)
    expanded = expanded_dims(ctx, x, dim, indices)
    indices = first_along(indices, expanded)
    require_elements(ctx, x, dim, indices)
    return gather(x, dim, indices, expanded)


def expanded_dims(ctx: Context, x: Array, dim: int, indices: Array) -> tuple[int, ...]:
    """Returns the dimensions other than `dim` along which the graph expands the indices to the full size of x.

    The indices are the current node's third argument. Only an expand inside the graph counts. If the tensor of which the indices are a view
    already has a stride of 0 (an expanded graph input), the result is empty, because a JAX array has no strides.
    """
    source = argument(ctx, 2)
    while isinstance(source, Node) and is_view(source):
        source = source.args[0]
    if not isinstance(source, Node) or 0 in ctx.spec(source).stride or x.ndim != indices.ndim:
        return ()
    stride = ctx.input(2).stride
    return tuple(d for d, size in enumerate(x.shape) if d != dim and stride[d] == 0 and size == indices.shape[d] > 0)


def first_along(x: Array, dims: Sequence[int]) -> Array:
    """Returns the first slice of x along each of `dims`. The result has size 1 in these dimensions."""
    return lax.slice(x, [0] * x.ndim, [1 if d in dims else size for d, size in enumerate(x.shape)])


def require_elements(ctx: Context, x: Array, dim: int, indices: Array) -> None:
    """Makes the call raise RuntimeError if an index of gather or of a scatter is out of range."""
    dim = wrap(dim, x.ndim)
    size = x.shape[dim] if x.ndim else 1
    require_index(ctx, indices, size, RuntimeError, f"index is out of bounds for dimension {dim} with size {size}", argument(ctx, 2))


def gather(x: Array, dim: int, indices: Array, expanded: tuple[int, ...] = ()) -> Array:
    """Returns the elements of x at non-negative indices along `dim`: result[i][j] = x[indices[i][j]][j] for dim 0, and so on.

    Shape:  that of `indices`, but along `expanded` that of x.
    Dtype:  that of x.

    Args:
        x: The tensor to read.
        dim: The indexed dimension.
        indices: May be smaller than x in dimensions other than `dim`.
        expanded: Dimensions along which `indices` has size 1, and each index is used for all elements of x.
    """
    if x.ndim == 0:
        return expand(x, indices.shape)
    dim = wrap(dim, x.ndim)
    if indices.size == 0 or x.size == 0:
        return lax.full([x.shape[d] if d in expanded else size for d, size in enumerate(indices.shape)], 0, x.dtype)
    if indices.ndim == 0:
        return lax.reshape(take_along(x, 0, indices), ())
    if x.ndim == 1:
        return take_along(x, 0, indices)
    kept = tuple(size if d == dim or d in expanded else indices.shape[d] for d, size in enumerate(x.shape))
    if kept != x.shape:
        x = lax.slice(x, [0] * x.ndim, kept)
    index_dims = [d for d in range(x.ndim) if d not in expanded]  # the dimensions along which indices differ
    others = tuple(d for d in index_dims if d != dim)
    dimension_numbers = lax.GatherDimensionNumbers(
        offset_dims=expanded,
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        operand_batching_dims=others,
        start_indices_batching_dims=tuple(index_dims.index(d) for d in others),
    )
    coordinates = lax.expand_dims(lax.squeeze(indices, expanded), [len(index_dims)])
    sizes = [size if d in expanded else 1 for d, size in enumerate(x.shape)]
    return lax.gather(x, coordinates, dimension_numbers, sizes, mode=lax.GatherScatterMode.CLIP)


@lowers(aten.take.default)
def take(x: Array, indices: Array, ctx: Context) -> Array:
    """The elements of the flattened tensor at the given indices.

    Shape:  that of `indices`.
    Dtype:  that of x.
    """
    require_flat(ctx, x, indices)
    return take_along(lax.reshape(x, (x.size,)), 0, wrap_negative(indices, x.size))


def require_flat(ctx: Context, x: Array, indices: Array) -> None:
    """Makes the call raise IndexError if an index of take or put is out of range."""
    message = f"out of range: tried to access an index that a tensor of {x.size} elements does not have"
    require_index(ctx, indices, x.size, IndexError, message, argument(ctx, 1), from_end=True)


def ordinals(mask: Array) -> Array:
    """Returns, for each element of a mask in row-major order, the number of True elements up to and including this element, minus 1.

    At a True element, the result is the number of True elements before it.

    Dtype:  int64.
    """
    counts = running_sum(convert(lax.reshape(mask, (mask.size,)), np.dtype(np.int64)), 0)
    return lax.reshape(lax.sub(counts, lax.full_like(counts, 1)), mask.shape)


@lowers(aten.masked_scatter.default)
def masked_scatter(x: Array, mask: Array, source: Array, ctx: Context) -> Array:
    """x, in which the n-th element of `source` replaces the element at the n-th True element of the mask.

    Shape:  x and mask, broadcast.
    Dtype:  that of x.
    """
    require_static(ctx, dtypes.is_bool(mask.dtype), RuntimeError, "masked_scatter_ only supports boolean masks")
    shape = broadcast_shapes([x.shape, mask.shape])
    x, mask = expand(x, shape), expand(convert(mask, np.dtype(np.bool_)), shape)
    if source.size < x.size:
        count = lax.reduce_sum(convert(mask, np.dtype(np.int64)), range(mask.ndim))
        message = "masked_scatter: Number of elements of source < number of ones in mask"
        ctx.require(lax.le(count, np.int64(source.size)), RuntimeError, message)
    if source.size == 0 or x.size == 0:
        return x
    return lax.select(mask, take_along(lax.reshape(source, (source.size,)), 0, ordinals(mask)), x)


def clamp_indices(x: Array, indices: Sequence[Array | None]) -> list[Array | None]:
    """Returns the indices of x, clamped to the range of their dimensions, [-size, size - 1]."""

    def clamp(index: Array, size: int) -> Array:
        low, high = (lax.full((), value, index.dtype) for value in (-size, max(size - 1, 0)))
        return lax.clamp(low, index, high)

    return [None if index is None else clamp(index, x.shape[dim]) for dim, index in enumerate(indices)]


@lowers(aten._unsafe_masked_index.default)
def unsafe_masked_index(x: Array, mask: Array, indices: Sequence[Array | None], fill: bool | int | float) -> Array:
    """x[indices] where the mask is True, `fill` elsewhere. Indices where the mask is False may be out of range.

    Shape:  as for `index`.
    Dtype:  that of x.
    """
    result = unsafe_index(x, clamp_indices(x, indices))
    if x.size == 0:
        return lax.full(result.shape, convert(fill, x.dtype))
    return lax.select(expand(mask, result.shape), result, lax.full_like(result, fill))


def _triangle(x: Array, diagonal: int, lower: bool) -> Array:
    """Returns the matrices x (..., rows, columns) with zeros above a diagonal if `lower`, else with zeros below it."""
    rows = lax.broadcasted_iota("int32", x.shape, x.ndim - 2)
    columns = lax.broadcasted_iota("int32", x.shape, x.ndim - 1)
    edge = lax.add(rows, lax.full_like(rows, max(min(diagonal, x.shape[-1]), -x.shape[-2])))
    return lax.select(lax.le(columns, edge) if lower else lax.ge(columns, edge), x, lax.full_like(x, 0))


@lowers(aten.tril.default)
def tril(x: Array, diagonal: int = 0) -> Array:
    """The lower triangles of matrices, with zeros above a diagonal: 0 is the main diagonal, 1 the diagonal above it, and so on.

    Shape:  that of x.
    Dtype:  that of x.
    """
    return _triangle(x, diagonal, lower=True)


@lowers(aten.triu.default)
def triu(x: Array, diagonal: int = 0) -> Array:
    """The upper triangles of matrices, with zeros below a diagonal: 0 is the main diagonal, 1 the diagonal above it, and so on.

    Shape:  that of x.
    Dtype:  that of x.
    """
    return _triangle(x, diagonal, lower=False)


@lowers(aten.tril_indices.default)
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: dtypes.DType | None = None, ctx: Context) -> Array:
    """The row and column indices of a matrix's elements on and below a diagonal, in row-major order.

    Shape:  (2, number of elements).
    Dtype:  `dtype` if given, else int64.
    """
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)).astype(ctx.output.jax_dtype))


@lowers(aten.triu_indices.default)
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: dtypes.DType | None = None, ctx: Context) -> Array:
    """The row and column indices of a matrix's elements on and above a diagonal, in row-major order.

    Shape:  (2, number of elements).
    Dtype:  `dtype` if given, else int64.
    """
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)).astype(ctx.output.jax_dtype))


@lowers(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats: Array, *, output_size: int | None = None, ctx: Context) -> Array:
    """The indices i of the vector `repeats`, each repeated repeats[i] times.

    Shape:  [output_size].
    Dtype:  that of `repeats`.
    Raises: UnsupportedOp without `output_size`: the result's size would depend on data.
    """
    if output_size is None:
        raise UnsupportedOp("repeat_interleave by a tensor: the result's size depends on data", hint="give output_size")
    ends = running_sum(convert(repeats, np.dtype(np.int64)), 0)
    ctx.require(lax.ge(repeats, lax.full_like(repeats, 0)), RuntimeError, "repeats can not be negative")
    total = ends[-1] if ends.size else lax.full((), 0, np.int64)
    ctx.require(lax.eq(total, np.int64(output_size)), RuntimeError, "allocated size does not match required size")
    positions = lax.broadcasted_iota("int64", (output_size,), 0)
    return convert(jnp.searchsorted(ends, positions, side="right"), repeats.dtype)


@lowers(aten.one_hot.default)
def one_hot(x: Array, num_classes: int = -1, *, ctx: Context) -> Array:
    """One-hot vectors: for each element of x, a vector with 1 at the index given by the element, and 0 elsewhere.

    Shape:  (*x.shape, num_classes).
    Dtype:  int64.
    Raises: UnsupportedOp without `num_classes`: the result's size would depend on data.
    """
    if num_classes < 0:
        raise UnsupportedOp("one_hot without num_classes: the result's size depends on data", hint="give num_classes")
    require_index(ctx, x, num_classes, RuntimeError, "Class values must be non-negative and smaller than num_classes.", argument(ctx, 0))
    shape = (*x.shape, num_classes)
    classes = lax.broadcasted_iota(x.dtype, shape, x.ndim)
    return convert(lax.eq(classes, expand_leading(x, shape)), np.dtype(np.int64))
