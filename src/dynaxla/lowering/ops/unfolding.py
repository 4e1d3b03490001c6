"""Lowerings of im2col and col2im (`F.unfold` and `F.fold`): each position in a window is one strided slice of the image."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from jax import Array, lax

from ...torch_ops import aten
from ..promotion import convert, number, to_accumulator
from ..registry import lowers

Pair = Sequence[int]


def _window_positions(size: Pair, kernel: Pair, dilation: Pair, padding: Pair, stride: Pair) -> tuple[list[tuple[int, ...]], list[int]]:
    """Returns the position, in the padded image, of each element of the first window, and the number of windows in each dimension."""
    starts = itertools.product(*(range(0, count * step, step) for count, step in zip(kernel, dilation, strict=True)))
    counts = [(size[dim] + 2 * padding[dim] - dilation[dim] * (kernel[dim] - 1) - 1) // stride[dim] + 1 for dim in range(2)]
    return list(starts), counts


@lowers(aten.im2col.default)
def im2col(x: Array, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Array:
    """The windows of images, one column each.

    Shape:  x ([batch,] channels, height, width) gives ([batch,] channels * elements of a window, windows).
    Dtype:  that of x.
    """
    starts, counts = _window_positions(x.shape[-2:], kernel_size, dilation, padding, stride)
    batch = x.shape[:-3]
    if 0 in x.shape:
        return lax.full((*batch, x.shape[-3] * len(starts), counts[0] * counts[1]), 0, x.dtype)
    x = lax.pad(x, number(0, x.dtype), [(0, 0, 0)] * (x.ndim - 2) + [(width, width, 0) for width in padding])
    elements = []
    for start in starts:
        ends = [first + (count - 1) * step + 1 for first, count, step in zip(start, counts, stride, strict=True)]
        outer = x.ndim - 2
        slices = lax.slice(x, (0,) * outer + start, (*x.shape[:outer], *ends), (1,) * outer + tuple(stride))
        elements.append(lax.expand_dims(slices, [outer]))
    columns = lax.concatenate(elements, x.ndim - 2)
    return lax.reshape(columns, (*batch, x.shape[-3] * len(starts), counts[0] * counts[1]))


@lowers(aten.col2im.default)
def col2im(x: Array, output_size: Pair, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Array:
    """The inverse of im2col, with overlapping windows added. Half types are added in float32.

    Shape:  x ([batch,] channels * elements of a window, windows) gives ([batch,] channels, *output_size).
    Dtype:  that of x.
    """
    starts, counts = _window_positions(output_size, kernel_size, dilation, padding, stride)
    batch, channels = x.shape[:-2], x.shape[-2] // len(starts)
    if 0 in x.shape:
        return lax.full((*batch, channels, *output_size), 0, x.dtype)
    wide = to_accumulator(x)
    windows = lax.reshape(wide, (*batch, channels, len(starts), *counts))
    outer = len(batch) + 1
    padded = [size + 2 * width for size, width in zip(output_size, padding, strict=True)]

    def image_of_element(index: int) -> Array:
        """Returns an image, without the padding, with element `index` of every window at its position, and zeros elsewhere."""
        start = starts[index]
        slices = lax.squeeze(lax.slice_in_dim(windows, index, index + 1, axis=outer), [outer])
        padding_config = []
        for dim in range(2):
            end = start[dim] + (counts[dim] - 1) * stride[dim] + 1
            padding_config.append((start[dim] - padding[dim], padded[dim] - end - padding[dim], stride[dim] - 1))
        return lax.pad(slices, number(0, wide.dtype), [(0, 0, 0)] * outer + padding_config)

    return convert(functools.reduce(lax.add, map(image_of_element, range(len(starts)))), x.dtype)
