"""Lowerings of grid_sampler: sampling of images at positions given by a tensor."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert
from ..registry import lowers
from .rounding import round_half_to_even

# Values of the arguments `interpolation_mode` and `padding_mode`.
_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _scale_and_shift(x: Array, factor: float, shift: float) -> Array:
    return lax.add(lax.mul(x, lax.full_like(x, factor)), lax.full_like(x, shift))


def _unnormalized(x: Array, size: int, align_corners: bool) -> Array:
    """Maps coordinates in [-1, 1] to positions in pixels."""
    return _scale_and_shift(x, (size - 1) / 2, (size - 1) / 2) if align_corners else _scale_and_shift(x, size / 2, (size - 1) / 2)


def _clipped(x: Array, size: int) -> Array:
    """Clamps positions to the borders; NaN becomes 0, as in ATen."""
    first = lax.full_like(x, 0)
    return lax.clamp(np.array(0, x.dtype), lax.select(lax.ne(x, x), first, x), np.array(size - 1, x.dtype))


def _reflected(x: Array, size: int, align_corners: bool) -> Array:
    """Reflects positions beyond the borders until they are inside."""
    low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    if low == high:
        return lax.full_like(x, 0)
    span = lax.full_like(x, high - low)
    distance = lax.abs(_scale_and_shift(x, 1, -low))
    flips = lax.floor(lax.div(distance, span))
    extra = lax.sub(distance, lax.mul(flips, span))
    even = lax.eq(lax.rem(flips, lax.full_like(x, 2)), lax.full_like(x, 0))
    return _scale_and_shift(lax.select(even, extra, lax.sub(span, extra)), 1, low)


def _bring_inside(x: Array, size: int, padding_mode: int, align_corners: bool) -> Array:
    """Moves positions outside of the image into it, as the padding mode demands. With padding by zeros, returns the positions unchanged."""
    if padding_mode == _BORDER:
        return _clipped(x, size)
    if padding_mode == _REFLECTION:
        return _clipped(_reflected(x, size, align_corners), size)
    return x


def _read(x: Array, positions: Sequence[Array]) -> Array:
    """Returns x (batch, channel, *space) at integral positions, one array (batch, points) per dimension. Values outside of x are 0.

    Shape:  (batch, channel, points).
    """
    space = x.shape[2:]
    is_inside: Array | None = None
    index: Array | None = None
    for position, size in zip(positions, space, strict=True):
        position = lax.stop_gradient(position)
        is_inside_dim = lax.bitwise_and(lax.ge(position, lax.full_like(position, 0)), lax.le(position, lax.full_like(position, size - 1)))
        is_inside = is_inside_dim if is_inside is None else lax.bitwise_and(is_inside, is_inside_dim)
        integral = lax.convert_element_type(lax.select(is_inside_dim, position, lax.full_like(position, 0)), np.dtype(np.int64))
        index = integral if index is None else lax.add(lax.mul(index, lax.full_like(index, size)), integral)
    assert is_inside is not None
    assert index is not None
    flat = lax.reshape(x, (*x.shape[:2], math.prod(space)))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(2,), start_index_map=(2,), operand_batching_dims=(0,), start_indices_batching_dims=(0,)
    )
    start = lax.reshape(index, (*index.shape, 1))
    out = lax.gather(flat, start, numbers, (1, x.shape[1], 1), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    return lax.select(_per_channel(is_inside, out), out, lax.full_like(out, 0))


def _per_channel(x: Array, like: Array) -> Array:
    return lax.broadcast_in_dim(x, like.shape, (0, 2))


def _weighted_sum(x: Array, reads: Sequence[Sequence[tuple[Array, Array]]]) -> Array:
    """Returns the weighted sum of x over all combinations of one (position, weight) pair of each dimension. `reads`: those pairs."""
    total: Array | None = None
    for combination in itertools.product(*reads):
        value = _read(x, [position for position, _ in combination])
        weight = combination[0][1]
        for _, dim_weight in combination[1:]:
            weight = lax.mul(weight, dim_weight)
        part = lax.mul(value, _per_channel(weight, value))
        total = part if total is None else lax.add(total, part)
    assert total is not None
    return total


def _linear_reads(position: Array) -> list[tuple[Array, Array]]:
    """Returns the two pixels next to each position, with their weights in linear interpolation."""
    left = lax.floor(position)
    fraction = lax.sub(position, lax.stop_gradient(left))
    return [(left, _scale_and_shift(fraction, -1, 1)), (_scale_and_shift(left, 1, 1), fraction)]


def _cubic_reads(position: Array, bring_inside: Callable[[Array], Array]) -> list[tuple[Array, Array]]:
    """Returns the four nearest pixels, each passed through `bring_inside`, and their weights in cubic convolution with slope -0.75 at 1."""
    left = lax.stop_gradient(lax.floor(position))
    fraction = lax.sub(position, left)
    a = -0.75

    def near(t: Array) -> Array:
        return _scale_and_shift(lax.mul(_scale_and_shift(t, a + 2, -(a + 3)), lax.mul(t, t)), 1, 1)

    def far(t: Array) -> Array:
        return _scale_and_shift(lax.mul(_scale_and_shift(lax.mul(_scale_and_shift(t, 1, -5), t), 1, 8), t), a, -4 * a)

    distances = (_scale_and_shift(fraction, 1, 1), fraction, _scale_and_shift(fraction, -1, 1), _scale_and_shift(fraction, -1, 2))
    weights = (far(distances[0]), near(distances[1]), near(distances[2]), far(distances[3]))
    return [(bring_inside(_scale_and_shift(left, 1, offset)), weight) for offset, weight in zip((-1, 0, 1, 2), weights, strict=True)]


def _sample(x: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Array:
    """Returns samples of x in the accumulator's dtype. Shapes are as in `grid_sampler`."""
    dtype = dtypes.accumulator(x.dtype)
    space = x.shape[2:]
    points = lax.reshape(convert(grid, dtype), (grid.shape[0], math.prod(grid.shape[1:-1]), len(space)))
    x = convert(x, dtype)
    reads = []
    for dim, size in enumerate(space):
        position = lax.index_in_dim(points, len(space) - 1 - dim, axis=2, keepdims=False)
        position = _unnormalized(position, size, align_corners)
        if interpolation_mode == _BICUBIC:
            bring_inside = functools.partial(_bring_inside, size=size, padding_mode=padding_mode, align_corners=align_corners)
            reads.append(_cubic_reads(position, bring_inside))
            continue
        position = _bring_inside(position, size, padding_mode, align_corners)
        if interpolation_mode == _NEAREST:
            reads.append([(round_half_to_even(position), lax.full_like(position, 1))])
        else:
            reads.append(_linear_reads(position))
    return lax.reshape(_weighted_sum(x, reads), (x.shape[0], x.shape[1], *grid.shape[1:-1]))


@lowers(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(x: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool, *, ctx: Context) -> Array:
    """Samples of x at the positions in grid, which range from -1 at one end of a dimension to 1 at the other end.

    Shape:  x (batch, channel, *space) and grid (batch, *out, len(space)) give (batch, channel, *out). The last dimension of grid holds
            coordinates in reverse order: the last dimension of x first.
    Dtype:  that of x.
    """
    if 0 in ctx.output.shape:
        return lax.full(ctx.output.shape, 0, x.dtype)
    return convert(_sample(x, grid, interpolation_mode, padding_mode, align_corners), x.dtype)


@lowers(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    grad: Array,
    x: Array,
    grid: Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Array | None, Array | None]:
    """Gradients of x and grid, each of its operand's shape and dtype; None for gradients that output_mask does not request."""
    if grad.size == 0:
        return lax.full_like(x, 0), lax.full_like(grid, 0)
    out, vjp = jax.vjp(lambda x, grid: _sample(x, grid, interpolation_mode, padding_mode, align_corners), x, grid)
    grad_x, grad_grid = vjp(convert(grad, out.dtype))
    return grad_x if output_mask[0] else None, grad_grid if output_mask[1] else None
