"""What a program with rounded sizes needs of the true ones, which are one of its inputs: see capture/padded_rules.py.

`lengths` is a vector of true sizes (int64), and a place is an index of it. -1 stands for a size that is true already.
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
    """x with `fill` wherever one of the coordinates of a position in `dim` is not less than its true size.

    sizes: of these coordinates, the slowest first, with a place for each.
    Shape, Dtype: those of x.
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
    """As many elements as the result has, from the true position on that stands at `place`, or from `start`."""
    return lax.dynamic_slice_in_dim(x, lengths[place] if place >= 0 else start, cast(TensorSpec, ctx.output).shape[dim], dim)


@lowers(cat_parts)
def _cat_parts(tensors: Sequence[Array], lengths: Array, dim: int, places: Sequence[int]) -> Array:
    """Tensors one behind the other, each where the true elements of those before it end.

    places: of these positions, for all but the first.
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
    """Zeros, as many in `dim` as the result has, with x from the true position on that stands at `place`."""
    shape = (*x.shape[:dim], cast(TensorSpec, ctx.output).shape[dim], *x.shape[dim + 1 :])
    return lax.dynamic_update_slice_in_dim(lax.full(shape, number(0, x.dtype)), x, lengths[place], dim)


@lowers(within)
def _within(
    index: Array, lengths: Array, dim: int, place: int, from_end: bool, is_index: bool, ignored: int | None = None, *, ctx: Context
) -> Array:
    """Indices of a dimension of which only the true size counts; negative ones, if they may be, counted from its true end.

    ignored: an index that stays as it is.

    Raises: IndexError (of a dimension `is_index`) or RuntimeError, when the program runs, for one out of range.
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
    """The product of true sizes and a number. int64[]."""
    result = jnp.asarray(np.int64(times))
    for place in places:
        result = lax.mul(result, lengths[place])
    return result


@lowers(together)
def _together(tensors: Sequence[Array | None]) -> tuple[Array | None, ...]:
    """Tensors as the results of one op."""
    return tuple(tensors)


@lowers(turned)
def _turned(x: Array, lengths: Array, dim: int, place: int, shift: int, backwards: bool) -> Array:
    """x with its true positions in another order: each moves on by `shift`, around the true end, or they run backwards from there.

    Shape:  that of x; what stands behind the true end is any element.
    """
    size, positions = lengths[place], lax.iota(np.int64, x.shape[dim])
    source = lax.sub(lax.sub(size, np.int64(1)), positions) if backwards else lax.sub(positions, np.int64(shift))
    return jnp.take(x, lax.rem(lax.add(lax.rem(source, size), size), size), axis=dim, mode="clip")


@lowers(last_repeated)
def _last_repeated(x: Array, lengths: Array, dim: int, place: int) -> Array:
    """x with its last true element at all positions behind that one. Shape: that of x."""
    last = lax.sub(lengths[place], np.int64(1))
    return jnp.take(x, lax.min(lax.iota(np.int64, x.shape[dim]), last), axis=dim, mode="clip")


def _sources(count: int, size: Array, before: int, mirrors: bool) -> Array:
    """Which of `size` elements stand at `count` positions, of which `before` are in front of the first one: int64[count]."""
    last, positions = lax.sub(size, np.int64(1)), lax.sub(lax.iota(np.int64, count), np.int64(before))
    if mirrors:
        positions = lax.sub(last, lax.abs(lax.sub(last, lax.abs(positions))))
    return lax.clamp(np.int64(0), positions, last)


@lowers(continued)
def _continued(x: Array, lengths: Array, dim: int, place: int, before: int, mirrors: bool, *, ctx: Context) -> Array:
    """x continued beyond the ends of what counts, as in mirrors that stand on the last elements, or by these. before: by how many in front;
    where there is less than none, so many are left out.

    Shape:  that of x, but for `dim`; what stands behind the true end is any element.
    """
    sources = _sources(cast(TensorSpec, ctx.output).shape[dim], lengths[place], before, mirrors)
    return jnp.take(x, sources, axis=dim, mode="clip")


@lowers(continued_backward)
def _continued_backward(grad: Array, lengths: Array, dim: int, place: int, before: int, mirrors: bool, *, ctx: Context) -> Array:
    """The gradient of x: each element gets what flowed to it and to its copies. What does not count of `grad` is zero.

    Dtype:  that of grad; half types are added in float32.
    """
    sources = _sources(grad.shape[dim], lengths[place], before, mirrors)
    wide = jnp.moveaxis(convert(grad, dtypes.accumulator(grad.dtype)), dim, 0)
    zeros = lax.full((cast(TensorSpec, ctx.output).shape[dim], *wide.shape[1:]), number(0, wide.dtype))
    return convert(jnp.moveaxis(zeros.at[sources].add(wide), 0, dim), grad.dtype)


@lowers(put_into)
def _put_into(x: Array, added: Array, lengths: Array, dim: int, place: int, start: int, count_place: int, count: int) -> Array:
    """x with the first elements of `added` from a position on.

    place: of that position, if it is no number, `start`. count_place: of how many elements, if that is no number, `count`.
    """
    if added.shape[dim] == 0:
        return x
    first = lengths[place] if place >= 0 else np.int64(start)
    number_of = lengths[count_place] if count_place >= 0 else np.int64(count)
    source = lax.sub(lax.iota(np.int64, x.shape[dim]), first)
    inside = lax.bitwise_and(lax.ge(source, np.int64(0)), lax.lt(source, number_of))
    moved = jnp.take(added, lax.clamp(np.int64(0), source, np.int64(added.shape[dim] - 1)), axis=dim, mode="clip")
    return lax.select(lax.broadcast_in_dim(inside, x.shape, (dim,)), moved, x)
