"""fractional_max_pool, forward and backward: max pooling over windows of equal size, at random positions."""

from __future__ import annotations

import math

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dimensions import Sizes
from ..dtypes import DType
from ..promotion import convert, full_like
from ..registry import lowers
from .max_pooling import maxima, scatter_maxima
from .rounding import rounded

_INT64 = np.dtype(np.int64)


def _window_starts(sample: Array, size: int, out: int, kernel: int, dtype: DType) -> Array:
    """Returns the start of each window along one dimension: int64[planes, out].

    Source: ATen native/FractionalMaxPool2d.cpp, fractional_max_pool2d_generate_intervals

    Args:
        sample: A random number in [0, 1) for each plane.
        size: The size of the dimension.
        out: The number of windows.
        kernel: The size of a window.
        dtype: The dtype to which each step of the computation is rounded, as in ATen.
    """
    shape = (sample.shape[0], out)
    last = lax.full(shape, size - kernel, _INT64)
    if out == 1:
        return last
    sample = lax.broadcast_in_dim(sample, shape, [0])
    operands = [rounded(lax.full(shape, number, sample.dtype), dtype) for number in (size - kernel, out - 1)]
    alpha = rounded(lax.div(*operands), dtype)
    position = lax.broadcasted_iota(sample.dtype, shape, 1)
    products = [rounded(lax.mul(rounded(value, dtype), alpha), dtype) for value in (lax.add(position, sample), sample)]
    starts = lax.sub(*(convert(product, _INT64) for product in products))
    return lax.select(lax.lt(position, full_like(position, out - 1)), starts, last)


def _gather(x: Array, dim: int, indices: Array) -> Array:
    """Returns the elements of x at the given indices along `dim`, with separate indices for each plane.

    Shape:  x (planes, ...) and indices (planes, count) give x's shape, with `count` as the size of `dim`.
    """
    dimension_numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, dim)) + tuple(range(dim + 1, x.ndim)),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    sizes = tuple(1 if d in (0, dim) else size for d, size in enumerate(x.shape))
    out = lax.gather(x, lax.expand_dims(indices, [2]), dimension_numbers, sizes, mode=lax.GatherScatterMode.CLIP)
    return out


@lowers(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def fractional_max_pool(x: Array, kernel: Sizes, output_size: Sizes, samples: Array, *, ctx: Context) -> tuple[Array, Array]:
    """The maximum of each window, and its flat index in the plane. Of equal maxima the first counts, of several NaNs the last.

    Args:
        samples: Random numbers in [0, 1), (batch, planes, spatial dimensions). In 2d the number for the width comes first. Numbers for
            more batches than x has are ignored.

    Shape:  both: x (..., *space) gives (..., *output_size).
    Dtype:  that of x, and int64.
    """
    count, space = len(output_size), x.shape[-len(output_size) :]
    planes = math.prod(x.shape[:-count])
    flat_samples = lax.slice_in_dim(lax.reshape(samples, (samples.size // count, count)), 0, planes)
    wide_samples = convert(flat_samples, dtypes.accumulator(samples.dtype))
    order = (1, 0) if count == 2 else (0, 1, 2)
    windows, flat_index = lax.reshape(x, (planes, *space)), lax.full((planes,) + (1,) * 2 * count, 0, _INT64)
    for index, (size, out, width) in enumerate(zip(space, output_size, kernel, strict=True)):
        starts = _window_starts(wide_samples[:, order[index]], size, out, width, samples.dtype)
        shape = (planes, out, width)
        indices = lax.add(lax.broadcast_in_dim(starts, shape, [0, 1]), lax.broadcasted_iota(_INT64, shape, 2))
        windows = _gather(windows, 1 + index, lax.reshape(indices, (planes, out * width)))
        index_along_dim = lax.reshape(indices, [planes, *(1,) * 2 * index, out, width, *(1,) * 2 * (count - 1 - index)])
        flat_index = flat_index * size + index_along_dim
    windows = lax.reshape(windows, flat_index.shape)
    maximum, index = maxima(windows, flat_index, range(2, 2 + 2 * count, 2))
    return lax.reshape(maximum, ctx.output[0].shape), lax.reshape(index, ctx.output[1].shape)


@lowers(aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default)
def fractional_max_pool_backward(grad: Array, x: Array, kernel: Sizes, output_size: Sizes, indices: Array) -> Array:
    """The gradient of x: each output's gradient is added at the index of its maximum.

    Shape:  that of x.
    Dtype:  that of x.
    """
    return scatter_maxima(grad, x, indices, len(output_size))
