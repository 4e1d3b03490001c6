"""fractional_max_pool, forward and backward: max pooling over windows of one size at random positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dtypes import DType
from ..promotion import convert, full_like
from ..registry import lowers
from .max_pooling import maxima, scatter_maxima
from .rounding import rounded

Sizes = Sequence[int]
_INT64 = np.dtype(np.int64)


def _starts(sample: Array, size: int, out: int, kernel: int, dtype: DType) -> Array:
    """The start of each window along one dimension, (planes, out). sample: a number in [0, 1) for each plane.

    Source: ATen native/FractionalMaxPool2d.cpp, fractional_max_pool2d_generate_intervals
    """
    shape = (sample.shape[0], out)
    last = lax.full(shape, size - kernel, _INT64)
    if out == 1:
        return last
    sample = lax.broadcast_in_dim(sample, shape, [0])
    whole = [rounded(lax.full(shape, number, sample.dtype), dtype) for number in (size - kernel, out - 1)]
    alpha = rounded(lax.div(*whole), dtype)
    place = lax.broadcasted_iota(sample.dtype, shape, 1)
    ends = [rounded(lax.mul(rounded(value, dtype), alpha), dtype) for value in (lax.add(place, sample), sample)]
    starts = lax.sub(*(convert(end, _INT64) for end in ends))
    return lax.select(lax.lt(place, full_like(place, out - 1)), starts, last)


def _read(x: Array, dim: int, places: Array) -> Array:
    """The elements of x (planes, ...) at `places` (planes, count) along `dim`."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, dim)) + tuple(range(dim + 1, x.ndim)),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    sizes = tuple(1 if d in (0, dim) else size for d, size in enumerate(x.shape))
    found = lax.gather(x, lax.expand_dims(places, [2]), numbers, sizes, mode=lax.GatherScatterMode.CLIP)
    return found


@lowers(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(x: Array, kernel: Sizes, output_size: Sizes, samples: Array, *, ctx: Context) -> tuple[Array, Array]:
    """The largest element of each window, and its flat position: of equal values the first, of NaNs the last.

    samples: random numbers (batch, planes, dimensions); in 2d the number for the width comes first. A batch longer than x's is cut off.

    Shape:  both: x (..., *space) gives (..., *output_size).
    Dtype:  that of x, and int64.
    """
    count, space = len(output_size), x.shape[-len(output_size) :]
    planes = math.prod(x.shape[:-count])
    used = lax.slice_in_dim(lax.reshape(samples, (samples.size // count, count)), 0, planes)
    numbers = convert(used, dtypes.accumulator(samples.dtype))
    order = (1, 0) if count == 2 else (0, 1, 2)
    read, position = lax.reshape(x, (planes, *space)), lax.full((planes,) + (1,) * 2 * count, 0, _INT64)
    for index, (size, out, width) in enumerate(zip(space, output_size, kernel, strict=True)):
        starts = _starts(numbers[:, order[index]], size, out, width, samples.dtype)
        shape = (planes, out, width)
        places = lax.add(lax.broadcast_in_dim(starts, shape, [0, 1]), lax.broadcasted_iota(_INT64, shape, 2))
        read = _read(read, 1 + index, lax.reshape(places, (planes, out * width)))
        along = lax.reshape(places, [planes, *(1,) * 2 * index, out, width, *(1,) * 2 * (count - 1 - index)])
        position = position * size + along
    read = lax.reshape(read, position.shape)
    best, index = maxima(read, position, range(2, 2 + 2 * count, 2))
    return lax.reshape(best, ctx.output[0].shape), lax.reshape(index, ctx.output[1].shape)


@lowers(aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)
def fractional_max_pool_backward(grad: Array, x: Array, kernel: Sizes, output_size: Sizes, indices: Array) -> Array:
    """The gradient of x: each output's gradient goes to the position of its maximum.

    Shape:  that of x.
    Dtype:  that of x.
    """
    return scatter_maxima(grad, x, indices, len(output_size))
