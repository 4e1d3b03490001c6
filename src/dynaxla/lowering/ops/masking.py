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

from ..context import Context
from ..metadata import TensorSpec
from ..promotion import convert, number
from ..registry import lowers

_library = torch.library.Library("dynaxla", "FRAGMENT")
_library.define("masked(Tensor x, Tensor lengths, int dim, SymInt[] sizes, int[] places, Scalar fill) -> Tensor")
_library.define("part(Tensor x, Tensor lengths, int dim, int place) -> Tensor")
_library.define("cat_parts(Tensor[] tensors, Tensor lengths, int dim, int[] places) -> Tensor")
_library.define("put(Tensor x, Tensor lengths, int dim, int place) -> Tensor")
_library.define("within(Tensor index, Tensor lengths, int dim, int place, bool from_end, bool is_index) -> Tensor")
_library.define("length(Tensor lengths, int[] places, int times) -> Tensor")

masked = torch.ops.dynaxla.masked.default
part = torch.ops.dynaxla.part.default
cat_parts = torch.ops.dynaxla.cat_parts.default
put = torch.ops.dynaxla.put.default
within = torch.ops.dynaxla.within.default
length = torch.ops.dynaxla.length.default


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
def _part(x: Array, lengths: Array, dim: int, place: int, ctx: Context) -> Array:
    """As many elements as the result has, from the true position on that stands at `place`."""
    return lax.dynamic_slice_in_dim(x, lengths[place], cast(TensorSpec, ctx.output).shape[dim], dim)


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
def _within(index: Array, lengths: Array, dim: int, place: int, from_end: bool, is_index: bool, ctx: Context) -> Array:
    """Indices of a dimension of which only the true size counts; negative ones, if they may be, counted from its true end.

    Raises: IndexError (of a dimension `is_index`) or RuntimeError, when the program runs, for one out of range.
    """
    index = convert(index, np.dtype(np.int64))
    size = lax.broadcast(lengths[place], index.shape)
    zero = lax.full_like(index, 0)
    low = lax.neg(size) if from_end else zero
    good = lax.bitwise_and(lax.ge(index, low), lax.lt(index, size))
    ctx.require(good, IndexError if is_index else RuntimeError, f"index is out of bounds for dimension {dim}")
    return lax.select(lax.lt(index, zero), lax.add(index, size), index)


@lowers(length)
def _length(lengths: Array, places: Sequence[int], times: int) -> Array:
    """The product of true sizes and a number. int64[]."""
    result = jnp.asarray(np.int64(times))
    for place in places:
        result = lax.mul(result, lengths[place])
    return result
