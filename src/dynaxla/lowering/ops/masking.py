"""Ops, and their lowerings, that apply the true sizes in a program compiled for rounded sizes (see passes/padding/padded_rules.py).

The true sizes are an input of the program: `lengths`, an int64 vector. A `place` is an index into it; -1 stands for a size or position that
needs no true size. Elements up to a true size are valid, those behind it are padding with arbitrary values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from jax import Array, lax
from jax import numpy as jnp

from .. import dtypes
from ..context import Context
from ..metadata import TensorSpec
from ..promotion import convert, number
from ..registry import lowers

_library = torch.library.Library("dynaxla", "FRAGMENT")
_library.define("masked(Tensor x, Tensor lengths, int dim, SymInt[] sizes, int[] places, Scalar fill) -> Tensor")
_library.define("part(Tensor x, Tensor lengths, int dim, int place, int start=0) -> Tensor")
_library.define("cat_parts(Tensor[] tensors, Tensor lengths, int dim, int[] places) -> Tensor")
_library.define("put(Tensor x, Tensor lengths, int dim, int place) -> Tensor")
_library.define("within(Tensor index, Tensor lengths, int dim, int place, bool from_end, bool is_index, int? ignored=None) -> Tensor")
_library.define("length(Tensor lengths, int[] places, int times) -> Tensor")
_library.define("together(Tensor?[] tensors) -> Tensor?[]")
_library.define("turned(Tensor x, Tensor lengths, int dim, int place, int shift, bool backwards) -> Tensor")
_library.define("last_repeated(Tensor x, Tensor lengths, int dim, int place) -> Tensor")
_library.define("continued(Tensor x, Tensor lengths, int dim, int place, int before, bool mirrors) -> Tensor")
_library.define("continued_backward(Tensor grad, Tensor lengths, int dim, int place, int before, bool mirrors) -> Tensor")
_library.define("put_into(Tensor x, Tensor added, Tensor lengths, int dim, int place, int start, int count_place, int count) -> Tensor")

masked = torch.ops.dynaxla.masked.default
part = torch.ops.dynaxla.part.default
cat_parts = torch.ops.dynaxla.cat_parts.default
put = torch.ops.dynaxla.put.default
within = torch.ops.dynaxla.within.default
length = torch.ops.dynaxla.length.default
together = torch.ops.dynaxla.together.default
turned = torch.ops.dynaxla.turned.default
last_repeated = torch.ops.dynaxla.last_repeated.default
continued = torch.ops.dynaxla.continued.default
continued_backward = torch.ops.dynaxla.continued_backward.default
put_into = torch.ops.dynaxla.put_into.default


@lowers(masked)
def _masked(x: Array, lengths: Array, dim: int, sizes: Sequence[int], places: Sequence[int], fill: bool | int | float) -> Array:
    """Replaces the padding along `dim` by `fill`.

    `dim` may be several dimensions in one: a position is padding if any of its coordinates in these is not less than its true size.

    Shape:  that of x.
    Dtype:  that of x.

    Args:
        x: The tensor with padding.
        lengths: The true sizes.
        dim: The dimension to mask.
        sizes: The rounded sizes of the dimensions in `dim`, the slowest first.
        places: The place of the true size of each of them, or -1.
        fill: The value of masked elements.
    """
    counts = lax.full((x.shape[dim],), True)
    step = 1
    for size, place in reversed(list(zip(sizes, places, strict=True))):
        if place >= 0:
            positions = lax.iota(np.int64, x.shape[dim])
            coordinates = lax.rem(lax.div(positions, np.int64(step)), np.int64(size)) if len(sizes) > 1 else positions
            counts = lax.bitwise_and(counts, lax.lt(coordinates, lax.broadcast(lengths[place], counts.shape)))
        step *= size
    return lax.select(lax.broadcast_in_dim(counts, x.shape, (dim,)), x, lax.full(x.shape, number(fill, x.dtype)))


@lowers(part)
def _part(x: Array, lengths: Array, dim: int, place: int, start: int = 0, *, ctx: Context) -> Array:
    """Returns a slice of x along `dim`, as long as the result, from position lengths[place], or from `start` if `place` is -1."""
    return lax.dynamic_slice_in_dim(x, lengths[place] if place >= 0 else start, cast(TensorSpec, ctx.output).shape[dim], dim)


@lowers(cat_parts)
def _cat_parts(tensors: Sequence[Array], lengths: Array, dim: int, places: Sequence[int]) -> Array:
    """Concatenates tensors: each begins where the valid elements of the tensors before it end.

    places: the places of these positions, for all tensors but the first.
    """
    first, *others = tensors
    total = sum(tensor.shape[dim] for tensor in tensors)
    padding = [(0, total - first.shape[dim] if d == dim else 0, 0) for d in range(first.ndim)]
    result = lax.pad(first, number(0, first.dtype), padding)
    for tensor, place in zip(others, places, strict=True):
        result = lax.dynamic_update_slice_in_dim(result, tensor, lengths[place], dim)
    return result


@lowers(put)
def _put(x: Array, lengths: Array, dim: int, place: int, ctx: Context) -> Array:
    """Returns zeros of the result's size along `dim`, with x written at position lengths[place]."""
    shape = (*x.shape[:dim], cast(TensorSpec, ctx.output).shape[dim], *x.shape[dim + 1 :])
    return lax.dynamic_update_slice_in_dim(lax.full(shape, number(0, x.dtype)), x, lengths[place], dim)


@lowers(within)
def _within(
    index: Array, lengths: Array, dim: int, place: int, from_end: bool, is_index: bool, ignored: int | None = None, *, ctx: Context
) -> Array:
    """Checks indices against the true size of dimension `dim` and makes negative ones non-negative.

    Dtype:  int64.
    Raises: IndexError if `is_index`, else RuntimeError, when the program runs, for an index out of range.

    Args:
        index: The indices.
        lengths: The true sizes.
        dim: The indexed dimension, for the message.
        place: The place of the dimension's true size.
        from_end: True if negative indices are allowed; they count from the true end.
        is_index: True for an op that raises IndexError in eager mode.
        ignored: An index that is always allowed, such as a loss's `ignore_index`.
        ctx: The context of the current node.
    """
    index = convert(index, np.dtype(np.int64))
    size = lax.broadcast(lengths[place], index.shape)
    zero = lax.full_like(index, 0)
    low = lax.neg(size) if from_end else zero
    good = lax.bitwise_and(lax.ge(index, low), lax.lt(index, size))
    if ignored is not None:
        good = lax.bitwise_or(good, lax.eq(index, lax.full_like(index, ignored)))
    ctx.require(good, IndexError if is_index else RuntimeError, f"index is out of bounds for dimension {dim}")
    return lax.select(lax.lt(index, zero), lax.add(index, size), index) if from_end else index


@lowers(length)
def _length(lengths: Array, places: Sequence[int], times: int) -> Array:
    """Returns the product of `times` and the true sizes at `places`, an int64 scalar."""
    result = jnp.asarray(np.int64(times))
    for place in places:
        result = lax.mul(result, lengths[place])
    return result


@lowers(together)
def _together(tensors: Sequence[Array | None]) -> tuple[Array | None, ...]:
    """Returns the tensors, as the results of one op."""
    return tuple(tensors)


@lowers(turned)
def _turned(x: Array, lengths: Array, dim: int, place: int, shift: int, backwards: bool) -> Array:
    """Rolls the valid elements of x along `dim` by `shift`, around the true end, or with `backwards` reverses them.

    Shape:  that of x; the padding is filled with arbitrary elements.
    """
    size, positions = lengths[place], lax.iota(np.int64, x.shape[dim])
    source = lax.sub(lax.sub(size, np.int64(1)), positions) if backwards else lax.sub(positions, np.int64(shift))
    return jnp.take(x, lax.rem(lax.add(lax.rem(source, size), size), size), axis=dim, mode="clip")


@lowers(last_repeated)
def _last_repeated(x: Array, lengths: Array, dim: int, place: int) -> Array:
    """Replaces the padding along `dim` by copies of the last valid element.

    Shape:  that of x.
    """
    last = lax.sub(lengths[place], np.int64(1))
    return jnp.take(x, lax.min(lax.iota(np.int64, x.shape[dim]), last), axis=dim, mode="clip")


def _sources(count: int, size: Array, before: int, mirrors: bool) -> Array:
    """Returns, for each of `count` positions of a padded dimension, the index of the element that stands there: int64[count].

    Args:
        count: The size of the padded dimension.
        size: The true size of the dimension before padding.
        before: The number of positions in front of the first element.
        mirrors: True for reflection padding, False for replication padding.
    """
    last, positions = lax.sub(size, np.int64(1)), lax.sub(lax.iota(np.int64, count), np.int64(before))
    if mirrors:
        positions = lax.sub(last, lax.abs(lax.sub(last, lax.abs(positions))))
    return lax.clamp(np.int64(0), positions, last)


@lowers(continued)
def _continued(x: Array, lengths: Array, dim: int, place: int, before: int, mirrors: bool, *, ctx: Context) -> Array:
    """Reflection padding (`mirrors`) or replication padding of the valid elements along `dim`.

    before: the number of elements added in front; a negative one crops.

    Shape:  that of x, with the result's size of `dim`; behind the true end, elements are arbitrary.
    """
    sources = _sources(cast(TensorSpec, ctx.output).shape[dim], lengths[place], before, mirrors)
    return jnp.take(x, sources, axis=dim, mode="clip")


@lowers(continued_backward)
def _continued_backward(grad: Array, lengths: Array, dim: int, place: int, before: int, mirrors: bool, *, ctx: Context) -> Array:
    """The gradient of x in `_continued`: each element gets the sum of the gradients of itself and its copies.

    The padding of `grad` must be zero.

    Dtype:  that of grad; half types are added in float32.
    """
    sources = _sources(grad.shape[dim], lengths[place], before, mirrors)
    wide = jnp.moveaxis(convert(grad, dtypes.accumulator(grad.dtype)), dim, 0)
    zeros = lax.full((cast(TensorSpec, ctx.output).shape[dim], *wide.shape[1:]), number(0, wide.dtype))
    return convert(jnp.moveaxis(zeros.at[sources].add(wide), 0, dim), grad.dtype)


@lowers(put_into)
def _put_into(x: Array, added: Array, lengths: Array, dim: int, place: int, start: int, count_place: int, count: int) -> Array:
    """Returns x with the first elements of `added` written along `dim`.

    The write begins at position lengths[place], or at `start` if `place` is -1. It has lengths[count_place] elements, or `count` if
    `count_place` is -1.
    """
    if added.shape[dim] == 0:
        return x
    first = lengths[place] if place >= 0 else np.int64(start)
    number_of = lengths[count_place] if count_place >= 0 else np.int64(count)
    source = lax.sub(lax.iota(np.int64, x.shape[dim]), first)
    inside = lax.bitwise_and(lax.ge(source, np.int64(0)), lax.lt(source, number_of))
    moved = jnp.take(added, lax.clamp(np.int64(0), source, np.int64(added.shape[dim] - 1)), axis=dim, mode="clip")
    return lax.select(lax.broadcast_in_dim(inside, x.shape, (dim,)), moved, x)
