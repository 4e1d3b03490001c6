"""Embedding tables: lookup of rows, reductions of bags of rows, and the gradients of both."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert, expand_leading, to_accumulator
from ..registry import lowers
from .bounds import argument, require_index
from .indexing import take_along
from .reductions import linalg_vector_norm
from .scattering import write_elements, write_slices
from .sorting import searchsorted

# The values of the argument `mode` of embedding_bag.
SUM, MEAN, MAX = range(3)

_OUT_OF_RANGE = "index out of range in self"


@lowers(aten.embedding.default)
def embedding(
    weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False, *, ctx: Context
) -> Array:
    """The rows of the table `weight` at the given indices. `sparse` has no effect.

    Shape:  that of the indices, followed by the width of the table.
    Dtype:  that of the weight.
    """
    require_index(ctx, indices, weight.shape[0], IndexError, _OUT_OF_RANGE, argument(ctx, 1))
    rows = take_along(weight, 0, indices)
    return (
        _with_torch_gradient(rows, indices, weight.shape[0], padding_idx, scale_grad_by_freq)
        if padding_idx >= 0 or scale_grad_by_freq
        else rows
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _with_torch_gradient(rows: Array, indices: Array, count: int, padding_idx: int, scale_grad_by_freq: bool) -> Array:
    """Returns `rows` unchanged, with a JVP rule for callers that differentiate the lowered function with JAX: it gives torch's gradient.

    Args:
        rows: the rows of a table at `indices`.
        indices: the indices, of any shape.
        count: number of rows of the table.
        padding_idx: index of a row without gradient; negative for none.
        scale_grad_by_freq: True if the gradient of a row is divided by the number of times that its index occurs.
    """
    return rows


@_with_torch_gradient.defjvp
def _torch_jvp(count: int, padding_idx: int, scale_grad_by_freq: bool, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (rows, indices), tangent = primals, tangents[0]
    index_dims = tuple(range(indices.ndim))
    if scale_grad_by_freq:
        counts = take_along(_use_counts(lax.reshape(indices, (indices.size,)), count, tangent.dtype), 0, indices)
        tangent = lax.div(tangent, lax.broadcast_in_dim(counts, tangent.shape, index_dims))
    if padding_idx >= 0:
        is_padding = lax.eq(indices, lax.full_like(indices, padding_idx))
        tangent = lax.select(lax.broadcast_in_dim(is_padding, tangent.shape, index_dims), lax.full_like(tangent, 0), tangent)
    return rows, tangent


def _use_counts(indices: Array, count: int, dtype: dtypes.DType) -> Array:
    """Returns, for each row of a table with `count` rows, the number of times that its index occurs in `indices`: (count)."""
    return write_slices(lax.full((count,), 0, dtype), 0, indices, lax.full(indices.shape, 1, dtype), "sum")


def _table_gradient(rows: Array, indices: Array, count: int, padding_idx: int, scale_grad_by_freq: bool, out_dtype: dtypes.DType) -> Array:
    """Returns the gradient of a table.

    Args:
        rows: gradients of the rows that were looked up, (indices, width), in float32 if grad has a half type.
        indices: the index of each row in the table, of rank 1.
        count: number of rows of the table.
        padding_idx: index of a row without gradient; negative for none.
        scale_grad_by_freq: True if the gradient of a row is divided by the number of times that its index occurs.
        out_dtype: dtype of the result.
    """
    if scale_grad_by_freq:
        rows = lax.div(rows, expand_leading(take_along(_use_counts(indices, count, rows.dtype), 0, indices), rows.shape))
    if padding_idx >= 0:
        # write_slices drops indices past the end.
        indices = lax.select(lax.eq(indices, lax.full_like(indices, padding_idx)), lax.full_like(indices, count), indices)
    return convert(write_slices(lax.full((count, rows.shape[1]), 0, rows.dtype), 0, indices, rows, "sum"), out_dtype)


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(grad: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool) -> Array:
    """The table's gradient.

    Each row is the sum of the rows of grad at which its index occurs; half types are added in float32. With `scale_grad_by_freq` the sum is
    divided by the number of summands. The row at `padding_idx` is zero.

    Shape:  (num_weights, width).
    Dtype:  that of grad.
    """
    rows = convert(lax.reshape(grad, (indices.size, grad.shape[-1])), dtypes.accumulator(grad.dtype))
    flat = lax.reshape(indices, (indices.size,))
    return _table_gradient(rows, flat, num_weights, padding_idx, scale_grad_by_freq, grad.dtype)


@lowers(aten.embedding_renorm.default)
def embedding_renorm(weight: Array, indices: Array, max_norm: float, norm_type: float, *, ctx: Context) -> Array:
    """The table, in which the rows at `indices` with a norm above `max_norm` are scaled down to the norm `max_norm`.

    Shape:  that of the weight.
    """
    require_index(ctx, indices, weight.shape[0], IndexError, _OUT_OF_RANGE, argument(ctx, 1))
    flat = lax.reshape(indices, (indices.size,))
    is_used = write_slices(lax.full(weight.shape[:1], False), 0, flat, lax.full(flat.shape, True), "set")
    norm = linalg_vector_norm(to_accumulator(weight), norm_type, [1], ctx=ctx)
    scale = lax.div(lax.full_like(norm, max_norm), lax.add(norm, lax.full_like(norm, 1e-7)))
    is_too_long = lax.bitwise_and(is_used, lax.gt(norm, lax.full_like(norm, max_norm)))
    scaled = lax.mul(convert(weight, norm.dtype), expand_leading(scale, weight.shape))
    return lax.select(expand_leading(is_too_long, weight.shape), convert(scaled, weight.dtype), weight)


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *,
    ctx: Context,
) -> tuple[Array, ...]:
    """The sum, mean or maximum (`mode`) of the rows of each bag; zeros for an empty bag. Indices equal to `padding_idx` do not count.

    The other results are for the backward: the bag of each index, the size of each bag, and the indices of the rows that have the maxima.
    A result that PyTorch does not compute for the given `mode` is zero.

    Shape:  (bags, width); others: as in PyTorch. With `include_last_offset` the last offset does not begin a bag.
    Dtype:  that of the weight; others: int32 if indices and offsets are int32, else int64.
    """
    bags, width = offsets.shape[0] - include_last_offset, weight.shape[1]
    message = f"input takes a value which is not in the valid range [0, {weight.shape[0]})"
    require_index(ctx, indices, weight.shape[0], RuntimeError, message, argument(ctx, 1))
    _require_offsets(ctx, offsets, indices.size)
    accumulator = dtypes.accumulator(weight.dtype)
    bag = _bag_indices(indices, lax.slice(offsets, [0], [bags]))
    # write_slices drops indices past the end.
    target = bag if padding_idx < 0 else lax.select(lax.eq(indices, lax.full_like(indices, padding_idx)), lax.full_like(bag, bags), bag)
    rows = convert(take_along(weight, 0, indices), accumulator)
    if per_sample_weights is not None:
        rows = lax.mul(rows, expand_leading(convert(per_sample_weights, accumulator), rows.shape))
    sizes = _use_counts(target, bags, np.dtype(np.int64))
    is_nonempty = expand_leading(lax.gt(sizes, lax.full_like(sizes, 0)), (bags, width))
    max_indices = lax.full((bags, width), 0, indices.dtype)
    if mode == MAX:
        result = write_slices(lax.full((bags, width), -np.inf, accumulator), 0, target, rows, "amax")
        # For each bag and column, `max_indices` needs the first position of the maximum. A NaN counts as the maximum.
        bag_max = take_along(result, 0, target)
        is_max = lax.bitwise_or(lax.eq(rows, bag_max), lax.ne(rows, rows))
        no_position = lax.full(rows.shape, indices.size, np.dtype(np.int64))
        positions = lax.select(is_max, lax.broadcasted_iota("int64", rows.shape, 0), no_position)
        first_position = write_slices(lax.full((bags, width), indices.size, np.dtype(np.int64)), 0, target, positions, "amin")
        max_indices = lax.select(is_nonempty, take_along(indices, 0, first_position), max_indices) if indices.size else max_indices
        result = lax.select(is_nonempty, result, lax.full_like(result, 0))
    else:
        if include_last_offset:  # Eager mode's sums end there. Its maxima, and the sizes by which it divides, count all indices.
            is_past_end = lax.ge(lax.iota(offsets.dtype, indices.size), offsets[-1])
            target = lax.select(is_past_end, lax.full_like(target, bags), target)
        result = write_slices(lax.full((bags, width), 0, accumulator), 0, target, rows, "sum")
        if mode == MEAN:
            result = lax.div(result, expand_leading(convert(lax.max(sizes, lax.full_like(sizes, 1)), accumulator), result.shape))
    other_results = [
        _crop_or_pad(value, spec.shape, spec.jax_dtype) for value, spec in zip((bag, sizes, max_indices), ctx.output[1:], strict=True)
    ]
    return convert(result, weight.dtype), *other_results


def _require_offsets(ctx: Context, offsets: Array, index_count: int) -> None:
    """Makes the compiled call raise unless the offsets begin with 0, ascend, and do not exceed the number of indices."""
    if offsets.size == 0:
        return
    zero, last = lax.full((), 0, offsets.dtype), offsets[-1]
    message = "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0"
    ctx.require(lax.eq(offsets[0], zero), RuntimeError, message)
    ctx.require(
        lax.le(last, lax.full_like(zero, index_count)), RuntimeError, f"offsets[-1] can not be greater than input's length {index_count}"
    )
    ctx.require(lax.le(offsets[:-1], offsets[1:]), RuntimeError, "embedding_bag: offsets have to be in ascending order")


def _bag_indices(indices: Array, offsets: Array) -> Array:
    """Returns the bag of each index. `offsets` has the position among the indices at which each bag begins."""
    positions = lax.broadcasted_iota("int64", indices.shape, 0)
    bags_begun = searchsorted(convert(offsets, positions.dtype), positions, right=True)
    return lax.sub(bags_begun, lax.full_like(bags_begun, 1))


def _crop_or_pad(value: Array, shape: tuple[int, ...], dtype: dtypes.DType) -> Array:
    """Returns `value`, cropped or zero-padded to `shape`; all zeros if its rank differs."""
    if len(shape) != value.ndim:
        return lax.full(shape, 0, dtype)
    return lax.pad(convert(value, dtype), lax.full((), 0, dtype), [(0, new - old, 0) for new, old in zip(shape, value.shape, strict=True)])


@lowers(aten._embedding_bag_dense_backward.default)
def embedding_bag_dense_backward(
    grad: Array,
    indices: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    """The table's gradient.

    Shape:  (num_weights, width).
    Dtype:  that of grad.
    """
    accumulator = dtypes.accumulator(grad.dtype)
    grads = convert(grad, accumulator)
    if mode == MAX:
        is_nonempty = lax.gt(bag_size, lax.full_like(bag_size, 0))
        grads = lax.select(expand_leading(lax.slice(is_nonempty, [0], grads.shape[:1]), grads.shape), grads, lax.full_like(grads, 0))
        total = lax.full((num_weights, grads.shape[1]), 0, accumulator)
        return convert(write_elements(total, 0, maximum_indices, grads, "sum"), grad.dtype)
    if mode == MEAN:
        sizes = convert(lax.max(bag_size, lax.full_like(bag_size, 1)), accumulator)
        grads = lax.div(grads, expand_leading(lax.slice(sizes, [0], grads.shape[:1]), grads.shape))
    rows = take_along(grads, 0, offset2bag)
    if per_sample_weights is not None:
        rows = lax.mul(rows, expand_leading(convert(per_sample_weights, accumulator), rows.shape))
    return _table_gradient(rows, indices, num_weights, padding_idx, scale_grad_by_freq, grad.dtype)


@lowers(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_per_sample_weights_backward(
    grad: Array, weight: Array, indices: Array, offsets: Array, offset2bag: Array, mode: int, padding_idx: int = -1
) -> Array:
    """The gradient of `per_sample_weights`: for each index, the dot product of its row of `weight` and the row of `grad` for its bag; 0 for
    `padding_idx`.

    Shape:  that of the indices.
    Dtype:  that of grad.
    """
    accumulator = dtypes.accumulator(grad.dtype)
    bag = offset2bag if offset2bag.size else _bag_indices(indices, offsets)
    products = lax.mul(convert(take_along(grad, 0, bag), accumulator), convert(take_along(weight, 0, indices), accumulator))
    result = lax.reduce_sum(products, (1,))
    if padding_idx >= 0:
        result = lax.select(lax.eq(indices, lax.full_like(indices, padding_idx)), lax.full_like(result, 0), result)
    return convert(result, grad.dtype)


@lowers(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    grad: Array,
    indices: Array,
    offsets: Array,
    offset2bag: Array,
    bag_size: Array,
    maximum_indices: Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Array | None,
    padding_idx: int = -1,
) -> Array:
    """The table's gradient.

    Shape:  (num_weights, width).
    Dtype:  that of grad.
    Raises: UnsupportedOp for sparse gradients.
    """
    if sparse:
        raise UnsupportedOp("embedding_bag with sparse=True has a sparse gradient", hint="use sparse=False")
    bag = offset2bag if offset2bag.size else _bag_indices(indices, offsets)
    return embedding_bag_dense_backward(
        grad, indices, bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx
    )
