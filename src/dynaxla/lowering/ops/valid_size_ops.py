"""Custom ops and their lowerings for programs that are compiled for rounded sizes (see passes/padding/padded_rules.py).

The ops read the true sizes from an input of the program: `true_sizes`, an int64 vector. A `size_index` is an index into `true_sizes`; -1
stands for a size or position that needs no true size. Along a dimension, the elements before the true size are valid. The elements after
it are padding with arbitrary values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from jax import Array, lax
from jax import numpy as jnp

from ..context import Context
from ..metadata import TensorSpec
from ..promotion import convert, full_like, number, to_accumulator
from ..registry import lowers

_library = torch.library.Library("dynaxla", "FRAGMENT")
_library.define("masked(Tensor x, Tensor true_sizes, int dim, SymInt[] sizes, int[] size_indices, Scalar fill) -> Tensor")
_library.define("slice_at(Tensor x, Tensor true_sizes, int dim, int size_index, int start=0) -> Tensor")
_library.define("cat_valid(Tensor[] tensors, Tensor true_sizes, int dim, int[] size_indices) -> Tensor")
_library.define("write_into_zeros(Tensor x, Tensor true_sizes, int dim, int size_index) -> Tensor")
_library.define(
    "check_index(Tensor index, Tensor true_sizes, int dim, int size_index, bool from_end, bool is_index, int? ignored=None) -> Tensor"
)
_library.define("size_product(Tensor true_sizes, int[] size_indices, int times) -> Tensor")
_library.define("as_tuple(Tensor?[] tensors) -> Tensor?[]")
_library.define("roll_or_flip(Tensor x, Tensor true_sizes, int dim, int size_index, int shift, bool is_flip) -> Tensor")
_library.define("repeat_last(Tensor x, Tensor true_sizes, int dim, int size_index) -> Tensor")
_library.define("reflect_or_replicate(Tensor x, Tensor true_sizes, int dim, int size_index, int before, bool is_reflection) -> Tensor")
_library.define(
    "reflect_or_replicate_backward(Tensor grad, Tensor true_sizes, int dim, int size_index, int before, bool is_reflection) -> Tensor"
)
_library.define(
    "write_into(Tensor x, Tensor added, Tensor true_sizes, int dim, int size_index, int start, int count_index, int count) -> Tensor"
)

masked = torch.ops.dynaxla.masked.default
slice_at = torch.ops.dynaxla.slice_at.default
cat_valid = torch.ops.dynaxla.cat_valid.default
write_into_zeros = torch.ops.dynaxla.write_into_zeros.default
check_index = torch.ops.dynaxla.check_index.default
size_product = torch.ops.dynaxla.size_product.default
as_tuple = torch.ops.dynaxla.as_tuple.default
roll_or_flip = torch.ops.dynaxla.roll_or_flip.default
repeat_last = torch.ops.dynaxla.repeat_last.default
reflect_or_replicate = torch.ops.dynaxla.reflect_or_replicate.default
reflect_or_replicate_backward = torch.ops.dynaxla.reflect_or_replicate_backward.default
write_into = torch.ops.dynaxla.write_into.default


@lowers(masked)
def _masked(x: Array, true_sizes: Array, dim: int, sizes: Sequence[int], size_indices: Sequence[int], fill: bool | int | float) -> Array:
    """Replaces the padding along `dim` by `fill`.

    `dim` may be several flattened dimensions. Then a position is padding if its coordinate in any of them is not less than the true size
    of that dimension.

    Shape:  that of x.
    Dtype:  that of x.

    Args:
        x: The tensor with padding.
        true_sizes: The true sizes.
        dim: The dimension to mask.
        sizes: The rounded size of each dimension that is flattened into `dim`, the slowest first.
        size_indices: The index of each dimension's true size, or -1.
        fill: The value of masked elements.
    """
    is_valid = lax.full((x.shape[dim],), True)
    step = 1
    for size, size_index in reversed(list(zip(sizes, size_indices, strict=True))):
        if size_index >= 0:
            positions = lax.iota(np.int64, x.shape[dim])
            coordinates = lax.rem(lax.div(positions, np.int64(step)), np.int64(size)) if len(sizes) > 1 else positions
            is_valid = lax.bitwise_and(is_valid, lax.lt(coordinates, lax.broadcast(true_sizes[size_index], is_valid.shape)))
        step *= size
    return lax.select(lax.broadcast_in_dim(is_valid, x.shape, (dim,)), x, full_like(x, fill))


@lowers(slice_at)
def _slice_at(x: Array, true_sizes: Array, dim: int, size_index: int, start: int = 0, *, ctx: Context) -> Array:
    """Returns a slice of x along `dim`, whose size is that of the node's output.

    The slice begins at position true_sizes[size_index], or at `start` if `size_index` is -1.
    """
    return lax.dynamic_slice_in_dim(x, true_sizes[size_index] if size_index >= 0 else start, cast(TensorSpec, ctx.output).shape[dim], dim)


@lowers(cat_valid)
def _cat_valid(tensors: Sequence[Array], true_sizes: Array, dim: int, size_indices: Sequence[int]) -> Array:
    """Concatenates the valid elements of tensors. The elements after the last valid one are arbitrary.

    size_indices: for each tensor but the first, the index into `true_sizes` of the tensor's position in the result, which is the sum of the
        true sizes of the tensors before it.
    """
    first, *rest = tensors
    total = sum(tensor.shape[dim] for tensor in tensors)
    padding = [(0, total - first.shape[dim] if d == dim else 0, 0) for d in range(first.ndim)]
    result = lax.pad(first, number(0, first.dtype), padding)
    for tensor, size_index in zip(rest, size_indices, strict=True):
        result = lax.dynamic_update_slice_in_dim(result, tensor, true_sizes[size_index], dim)
    return result


@lowers(write_into_zeros)
def _write_into_zeros(x: Array, true_sizes: Array, dim: int, size_index: int, ctx: Context) -> Array:
    """Returns zeros in the shape of the node's output, with x written at position true_sizes[size_index] along `dim`."""
    shape = (*x.shape[:dim], cast(TensorSpec, ctx.output).shape[dim], *x.shape[dim + 1 :])
    return lax.dynamic_update_slice_in_dim(lax.full(shape, number(0, x.dtype)), x, true_sizes[size_index], dim)


@lowers(check_index)
def _check_index(
    index: Array,
    true_sizes: Array,
    dim: int,
    size_index: int,
    from_end: bool,
    is_index: bool,
    ignored: int | None = None,
    *,
    ctx: Context,
) -> Array:
    """Checks indices against the true size of a dimension. Returns the indices; with `from_end`, the true size is added to negative ones.

    Dtype:  int64.
    Raises: IndexError if `is_index`, else RuntimeError, when the program runs, for an index out of range.

    Args:
        index: The indices.
        true_sizes: The true sizes.
        dim: The indexed dimension, for the message.
        size_index: The index of the dimension's true size.
        from_end: True if negative indices are allowed; they count from the true end.
        is_index: True for an op that raises IndexError in eager mode.
        ignored: An index that is always allowed, such as a loss's `ignore_index`.
        ctx: The context of the current node.
    """
    index = convert(index, np.dtype(np.int64))
    size = lax.broadcast(true_sizes[size_index], index.shape)
    zero = lax.full_like(index, 0)
    low = lax.neg(size) if from_end else zero
    is_in_range = lax.bitwise_and(lax.ge(index, low), lax.lt(index, size))
    if ignored is not None:
        is_in_range = lax.bitwise_or(is_in_range, lax.eq(index, lax.full_like(index, ignored)))
    ctx.require(is_in_range, IndexError if is_index else RuntimeError, f"index is out of bounds for dimension {dim}")
    return lax.select(lax.lt(index, zero), lax.add(index, size), index) if from_end else index


@lowers(size_product)
def _size_product(true_sizes: Array, size_indices: Sequence[int], times: int) -> Array:
    """Returns the product of `times` and the true sizes at `size_indices`: int64[]."""
    result = jnp.asarray(np.int64(times))
    for size_index in size_indices:
        result = lax.mul(result, true_sizes[size_index])
    return result


@lowers(as_tuple)
def _as_tuple(tensors: Sequence[Array | None]) -> tuple[Array | None, ...]:
    """Returns the tensors, each possibly None, as the results of one op."""
    return tuple(tensors)


@lowers(roll_or_flip)
def _roll_or_flip(x: Array, true_sizes: Array, dim: int, size_index: int, shift: int, is_flip: bool) -> Array:
    """Rolls the valid elements of x along `dim` by `shift`, or with `is_flip` reverses them.

    Shape:  that of x. The padding of the result is arbitrary.
    """
    size, positions = true_sizes[size_index], lax.iota(np.int64, x.shape[dim])
    source = lax.sub(lax.sub(size, np.int64(1)), positions) if is_flip else lax.sub(positions, np.int64(shift))
    return jnp.take(x, lax.rem(lax.add(lax.rem(source, size), size), size), axis=dim, mode="clip")


@lowers(repeat_last)
def _repeat_last(x: Array, true_sizes: Array, dim: int, size_index: int) -> Array:
    """Replaces the padding along `dim` by copies of the last valid element.

    Shape:  that of x.
    """
    last = lax.sub(true_sizes[size_index], np.int64(1))
    return jnp.take(x, lax.min(lax.iota(np.int64, x.shape[dim]), last), axis=dim, mode="clip")


def _source_indices(count: int, size: Array, before: int, is_reflection: bool) -> Array:
    """Returns, for each position after reflection or replication padding, the index of its element before padding: int64[count].

    Args:
        count: The size of the dimension after padding.
        size: The true size of the dimension before padding.
        before: The number of elements added in front of the first.
        is_reflection: True for reflection padding, False for replication padding.
    """
    last, positions = lax.sub(size, np.int64(1)), lax.sub(lax.iota(np.int64, count), np.int64(before))
    if is_reflection:
        positions = lax.sub(last, lax.abs(lax.sub(last, lax.abs(positions))))
    return lax.clamp(np.int64(0), positions, last)


@lowers(reflect_or_replicate)
def _reflect_or_replicate(
    x: Array, true_sizes: Array, dim: int, size_index: int, before: int, is_reflection: bool, *, ctx: Context
) -> Array:
    """Reflection padding (with `is_reflection`) or replication padding of the valid elements along `dim`.

    before: the number of elements added in front; a negative number removes elements.

    Shape:  that of the node's output, which differs from x in `dim` only. Elements after the result's true size are arbitrary.
    """
    sources = _source_indices(cast(TensorSpec, ctx.output).shape[dim], true_sizes[size_index], before, is_reflection)
    return jnp.take(x, sources, axis=dim, mode="clip")


@lowers(reflect_or_replicate_backward)
def _reflect_or_replicate_backward(
    grad: Array, true_sizes: Array, dim: int, size_index: int, before: int, is_reflection: bool, *, ctx: Context
) -> Array:
    """The gradient of x in `_reflect_or_replicate`: for each element, the sum of the gradients of its copies in the result.

    The padding of `grad` must be zero.

    Dtype:  that of grad; half types are added in float32.
    """
    sources = _source_indices(grad.shape[dim], true_sizes[size_index], before, is_reflection)
    wide = jnp.moveaxis(to_accumulator(grad), dim, 0)
    zeros = lax.full((cast(TensorSpec, ctx.output).shape[dim], *wide.shape[1:]), number(0, wide.dtype))
    return convert(jnp.moveaxis(zeros.at[sources].add(wide), 0, dim), grad.dtype)


@lowers(write_into)
def _write_into(x: Array, added: Array, true_sizes: Array, dim: int, size_index: int, start: int, count_index: int, count: int) -> Array:
    """Returns x with the first elements of `added` written along `dim`.

    The write begins at position true_sizes[size_index], or at `start` if `size_index` is -1. It covers true_sizes[count_index] elements, or
    `count` if `count_index` is -1.
    """
    if added.shape[dim] == 0:
        return x
    first = true_sizes[size_index] if size_index >= 0 else np.int64(start)
    written_count = true_sizes[count_index] if count_index >= 0 else np.int64(count)
    source = lax.sub(lax.iota(np.int64, x.shape[dim]), first)
    is_written = lax.bitwise_and(lax.ge(source, np.int64(0)), lax.lt(source, written_count))
    written_elements = jnp.take(added, lax.clamp(np.int64(0), source, np.int64(added.shape[dim] - 1)), axis=dim, mode="clip")
    return lax.select(lax.broadcast_in_dim(is_written, x.shape, (dim,)), written_elements, x)
