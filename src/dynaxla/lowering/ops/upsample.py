"""Lowerings of image resampling: nearest, linear, cubic and antialiased, forward and backward, one dimension after the other.

Under torch.compile, PyTorch decomposes most of these ops before they reach a graph, for every backend. Only the antialiased ops remain.
Source positions and weights are computed at trace time, in the precision in which ATen computes them, since the nearest pixel can depend
on the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dimensions import Sizes
from ..dtypes import DType
from ..promotion import convert
from ..registry import registry
from .windows import Windows

Scale = float | None
# A function of the dtype of the computation, the input size, the output size, align_corners and the user's scale, which returns the windows
# of one dimension.
Method = Callable[[DType, int, int, bool, Scale], Windows]


def _scale(dtype: DType, size: int, out: int, align_corners: bool, scale: Scale) -> np.floating:
    """Returns the number of input pixels per output pixel.

    Source: ATen native/UpSample.h, area_pixel_compute_scale
    """
    number = dtype.type
    if align_corners:
        return number(size - 1) / number(out - 1) if out > 1 else number(0)
    return number(1 / scale) if scale is not None and scale > 0 else number(size) / number(out)


def _source_positions(dtype: DType, size: int, out: int, align_corners: bool, scale: Scale) -> np.ndarray:
    """Returns the position of each output pixel in the input. Integral positions are centers of input pixels."""
    step, pixels = _scale(dtype, size, out, align_corners, scale), np.arange(out).astype(dtype)
    half = dtype.type(0.5)
    return step * pixels if align_corners else step * (pixels + half) - half


def _windows(size: int, sources: np.ndarray, weights: np.ndarray) -> Windows:
    """Returns the windows in which each output pixel reads its input pixels, `sources`, with its `weights`; both (output pixels, reads)."""
    output_index = np.broadcast_to(np.arange(len(sources))[:, None], sources.shape)
    return Windows.from_reads(len(sources), size, output_index.ravel(), sources.ravel(), weights.ravel())


def _nearest(dtype: DType, size: int, out: int, _: bool, scale: Scale) -> Windows:
    position = np.floor(_scale(dtype, size, out, False, scale) * np.arange(out).astype(dtype))
    return _windows(size, np.minimum(position, size - 1).astype(np.int64)[:, None], np.ones((out, 1)))


def _nearest2d(dtype: DType, size: int, out: int, align_corners: bool, scale: Scale) -> Windows:
    """Like `_nearest`, but ignores the scale if the size stays or doubles, as ATen's CPU kernels do in two dimensions.

    Source: ATen native/UpSample.h, nearest_idx
    """
    return _nearest(dtype, size, out, align_corners, None if out in (size, 2 * size) else scale)


def _nearest_exact(dtype: DType, size: int, out: int, _: bool, scale: Scale) -> Windows:
    position = np.floor(np.maximum(_source_positions(dtype, size, out, False, scale), 0) + dtype.type(0.5))
    return _windows(size, np.minimum(position, size - 1).astype(np.int64)[:, None], np.ones((out, 1)))


def _linear(dtype: DType, size: int, out: int, align_corners: bool, scale: Scale) -> Windows:
    if size == out:
        return _windows(size, np.arange(out)[:, None], np.ones((out, 1)))
    position = np.maximum(_source_positions(dtype, size, out, align_corners, scale), 0)
    left = np.minimum(np.floor(position), size - 1).astype(np.int64)
    fraction = np.clip(position - left, 0, 1)
    return _windows(size, np.stack([left, np.minimum(left + 1, size - 1)], 1), np.stack([1 - fraction, fraction], 1))


def _cubic(dtype: DType, size: int, out: int, align_corners: bool, scale: Scale) -> Windows:
    position = _source_positions(dtype, size, out, align_corners, scale)
    left = np.minimum(np.floor(position), size - 1).astype(np.int64)
    fraction = np.clip(position - left, 0, 1)
    offsets = np.arange(-1, 3)
    weights = _keys_filter(fraction[:, None] - offsets, -0.75)
    return _windows(size, np.clip(left[:, None] + offsets, 0, size - 1), weights)


def _keys_filter(x: np.ndarray, a: float) -> np.ndarray:
    """Returns the cubic convolution kernel at x; `a` is its slope at 1."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _triangle_filter(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _lanczos_filter(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


def _antialiased(filter_: Callable[[np.ndarray], np.ndarray], width: int) -> Method:
    """Returns the method for a filter of `width` pixels. The filter is stretched if the image shrinks, so that every input pixel counts."""

    def method(dtype: DType, size: int, out: int, align_corners: bool, scale: Scale) -> Windows:
        if size == out:  # ATen's CPU kernels skip such a dimension, whatever the scale is
            return _windows(size, np.arange(out)[:, None], np.ones((out, 1)))
        step = _scale(dtype, size, out, align_corners, scale)
        stretch = max(step, dtype.type(1))
        support = dtype.type(width / 2) * stretch
        center = step * (np.arange(out).astype(dtype) + dtype.type(0.5))
        first = np.maximum((center - support + dtype.type(0.5)).astype(np.int64), 0)
        last = np.minimum((center + support + dtype.type(0.5)).astype(np.int64), size)
        length = np.clip(last - first, 0, math.ceil(support) * 2 + 1)
        offset = np.arange(int(length.max(initial=1)))
        sources = first[:, None] + offset
        weights = filter_((sources - center[:, None] + 0.5) / stretch)
        weights = np.where(offset < length[:, None], weights, 0)
        total = weights.sum(1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
        is_read = offset < length[:, None]
        output_index = np.broadcast_to(np.arange(out)[:, None], is_read.shape)
        return Windows.from_reads(out, size, output_index[is_read], sources[is_read], weights[is_read])

    return method


def _resample(x: Array, windows: Sequence[Windows]) -> Array:
    """Resamples the last len(windows) dimensions, the last one first. Weighted sums are in the accumulator's dtype."""
    dtype = x.dtype
    if not all(window.index.shape[1] == 1 for window in windows):
        x = convert(x, dtypes.accumulator(dtype))
    for dim, window in reversed(list(enumerate(windows, x.ndim - len(windows)))):
        x = window.sum(x, dim)
    return convert(x, dtype)


def _check_dtype(x: Array, method: Method, ctx: Context) -> None:
    if not dtypes.is_float(x.dtype) and method not in (_nearest, _nearest2d, _nearest_exact):
        raise UnsupportedOp(
            f"{ctx.node.target} for {x.dtype}: torch's rounding of resampled integer images is not implemented",
            op=str(ctx.node.target),
            hint="convert the image to a float dtype first",
        )


def _register_upsample(name: str, count: int, method: Method, has_align_corners: bool) -> None:
    def split(rest: tuple) -> tuple[bool, list[Scale]]:
        align_corners = bool(rest[0]) if has_align_corners else False
        scales = list(rest[1:] if has_align_corners else rest)
        return align_corners, scales or [None] * count

    def windows(x: Array, space: Sizes, out: Sizes, rest: tuple) -> list[Windows]:
        align_corners, scales = split(rest)
        dtype = dtypes.accumulator(x.dtype) if dtypes.is_float(x.dtype) else np.dtype(np.float32)
        return [method(dtype, size, out_size, align_corners, scale) for size, out_size, scale in zip(space, out, scales, strict=True)]

    def forward(x: Array, output_size: Sizes, *rest: bool | Scale, ctx: Context) -> Array:
        """x resampled to other sizes. Half types are computed in float32.

        Shape:  x (batch, channel, *space) gives (batch, channel, *output_size).
        Dtype:  that of x.
        Raises: UnsupportedOp for integers, except in the nearest modes.
        """
        _check_dtype(x, method, ctx)
        if 0 in ctx.output.shape:
            return lax.full(ctx.output.shape, 0, x.dtype)
        return _resample(x, windows(x, x.shape[-count:], output_size, rest))

    def backward(grad: Array, output_size: Sizes, input_size: Sizes, *rest: bool | Scale, ctx: Context) -> Array:
        """The gradient of x: each input pixel gets weighted gradients of all output pixels that read it.

        Shape:  `input_size`: (batch, channel, *space).
        Dtype:  that of grad.
        """
        if 0 in ctx.output.shape:
            return lax.full(ctx.output.shape, 0, grad.dtype)
        return _resample(grad, [window.transposed() for window in windows(grad, input_size[-count:], output_size, rest)])

    registry.register(getattr(aten, name).default, forward, source=method)
    registry.register(getattr(aten, f"{name}_backward").default, backward, source=method)


for _count, _scheme in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
    _register_upsample(f"upsample_nearest{_count}d", _count, _nearest2d if _count == 2 else _nearest, has_align_corners=False)
    _register_upsample(f"_upsample_nearest_exact{_count}d", _count, _nearest_exact, has_align_corners=False)
    _register_upsample(f"upsample_{_scheme}", _count, _linear, has_align_corners=True)
_register_upsample("upsample_bicubic2d", 2, _cubic, has_align_corners=True)
_register_upsample("_upsample_bilinear2d_aa", 2, _antialiased(_triangle_filter, 2), has_align_corners=True)
_register_upsample("_upsample_bicubic2d_aa", 2, _antialiased(lambda x: _keys_filter(x, -0.5), 4), has_align_corners=True)
_register_upsample("_upsample_lanczos2d_aa", 2, _antialiased(_lanczos_filter, 6), has_align_corners=True)  # from torch 2.12 on
