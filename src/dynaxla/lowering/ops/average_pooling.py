"""Average pooling over windows, plain and adaptive, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from ..context import Context
from ..dimensions import Sizes
from ..pool_windows import PoolWindows, pad, reduce_window, windows_along
from ..promotion import broadcast_back, convert, to_accumulator
from ..registry import lowers
from .windows import Windows


def _divisors(windows: Sequence[PoolWindows], count_include_pad: bool, divisor_override: int | None) -> np.ndarray:
    """Returns `divisor_override`, or the number of positions in each window: padding counts if `count_include_pad`.

    Shape:  the number of windows along each pooled dimension.
    """
    if divisor_override is not None:
        return np.full([pooled.out for pooled in windows], divisor_override)
    counts = np.ones([1] * len(windows), np.int64)
    for index, pooled in enumerate(windows):
        low, high = (-pooled.padding, pooled.size + pooled.padding) if count_include_pad else (0, pooled.size)
        # With ceil_mode the last window may extend beyond the padding. The positions beyond the padding never count.
        covered = np.minimum(pooled.starts + pooled.kernel, high) - np.maximum(pooled.starts, low)
        counts = counts * np.expand_dims(covered, [axis for axis in range(len(windows)) if axis != index])
    return counts


def _divide(x: Array, divisors: np.ndarray) -> Array:
    """Returns x divided by `divisors`, which has the sizes of x's last dimensions. Integer quotients are truncated."""
    if (divisors == divisors.flat[0]).all():
        return lax.div(x, lax.full_like(x, divisors.flat[0]))
    return lax.div(x, lax.broadcast_in_dim(divisors.astype(x.dtype), x.shape, range(x.ndim - divisors.ndim, x.ndim)))


def _spatial_rank(ctx: Context) -> int:
    """Number of spatial dimensions of the current node's op."""
    return 2 if "2d" in ctx.node.target._schema.name else 3


@lowers(aten.avg_pool2d.default, aten.avg_pool3d.default)
def avg_pool(
    x: Array,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    ctx: Context,
) -> Array:
    """The mean of each window. Half types are added in float32; means of integers are truncated.

    Shape:  x (..., *space) gives (..., *windows), where space and windows are two dimensions for avg_pool2d, and three for avg_pool3d.
    Dtype:  that of x.
    """
    rank, shape = _spatial_rank(ctx), ctx.output.shape
    if 0 in shape:
        return lax.full(shape, 0, x.dtype)
    windows = windows_along(x.shape[-rank:], shape[-rank:], x.ndim, kernel, stride, padding)
    total = reduce_window(to_accumulator(x), 0, "add", windows)
    return convert(_divide(total, _divisors(windows, count_include_pad, divisor_override)), x.dtype)


@lowers(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    grad: Array,
    x: Array,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    ctx: Context,
) -> Array:
    """The gradient of x: each element adds up, over the windows that cover it, the window's gradient divided by the window's divisor.

    Shape:  that of x.
    Dtype:  that of x.
    """
    if 0 in grad.shape:
        return lax.full_like(x, 0)
    rank = _spatial_rank(ctx)
    windows = windows_along(x.shape[-rank:], grad.shape[-rank:], x.ndim, kernel, stride, padding)
    out = _divide(to_accumulator(grad), _divisors(windows, count_include_pad, divisor_override))
    for pooled in windows:
        out = _sum_over_covering_windows(out, pooled)
    return convert(out, x.dtype)


def _sum_over_covering_windows(x: Array, windows: PoolWindows) -> Array:
    """Returns, for each position of the input along `windows.dim`, the sum of the values in x of the windows that cover the position."""
    if windows.kernel == windows.stride and windows.padding == 0:
        shape = (*x.shape[: windows.dim + 1], windows.kernel, *x.shape[windows.dim + 1 :])
        repeated = broadcast_back(x, shape, (windows.dim + 1,))
        repeated = lax.reshape(repeated, (*x.shape[: windows.dim], windows.out * windows.kernel, *x.shape[windows.dim + 1 :]))
        uncovered = windows.size - windows.out * windows.kernel
        return pad(repeated, 0, {windows.dim: (0, uncovered)}) if uncovered else repeated
    before = windows.kernel - 1 - windows.padding
    after = windows.size + windows.padding - (windows.out - 1) * windows.stride - 1
    dilated = pad(x, 0, {windows.dim: (before, after)}, windows.stride - 1)
    window = [windows.kernel if dim == windows.dim else 1 for dim in range(x.ndim)]
    return lax.reduce_window(dilated, np.array(0, x.dtype), lax.add, window, [1] * x.ndim, "VALID")


@lowers(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(x: Array, output_size: Sizes) -> Array:
    """The means of windows that together cover the input, `output_size` of them along each dimension. Half types are added in float32.

    Shape:  x (..., *space) gives (..., *output_size).
    Dtype:  that of x.
    """
    rank = len(output_size)
    shape = (*x.shape[:-rank], *output_size)
    if 0 in shape:
        return lax.full(shape, 0, x.dtype)
    out = to_accumulator(x)
    for dim, size in enumerate(output_size, x.ndim - rank):
        out = _adaptive_mean(out, dim, size)
    return convert(out, x.dtype)


def _adaptive_mean(x: Array, dim: int, output_size: int) -> Array:
    """Returns x with adaptive average pooling along `dim`, in x's dtype, a float."""
    size = x.shape[dim]
    if size % output_size:
        return Windows.adaptive(size, output_size).sum(x, dim)
    if size == output_size:
        return x
    split = lax.reshape(x, (*x.shape[:dim], output_size, size // output_size, *x.shape[dim + 1 :]))
    total = lax.reduce_sum(split, (dim + 1,))
    return lax.div(total, lax.full_like(total, size // output_size))


@lowers(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(grad: Array, x: Array, *, ctx: Context) -> Array:
    """The gradient of x: each element adds up, over the windows that cover it, the window's gradient divided by the window's size.

    Shape:  that of x.
    Dtype:  that of x.
    """
    if 0 in grad.shape or 0 in x.shape:
        return lax.full_like(x, 0)
    out = to_accumulator(grad)
    for dim in range(x.ndim - _spatial_rank(ctx), x.ndim):
        out = Windows.adaptive(x.shape[dim], grad.shape[dim]).transposed().sum(out, dim)
    return convert(out, x.dtype)
