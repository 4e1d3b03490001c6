"""Convolutions and their gradients, all as `lax.conv_general_dilated` in PyTorch's own order of dimensions (batch, channel, space)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jax import Array, lax

from .. import dtypes
from ..context import Context
from ..promotion import convert
from ..registry import lowers

aten = torch.ops.aten

Sizes = Sequence[int]


@lowers(aten.convolution.default)
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    *,
    ctx: Context,
) -> Array:
    """Shape: x (batch, in, *space), weight (out, in / groups, *kernel); transposed: weight (in, out / groups, *kernel)."""
    stride, padding, dilation = _per_dim(x, stride, padding, dilation)
    shape = ctx.output.shape
    if transposed:
        # The gradient of the convolution that goes the other way, with respect to its input.
        out = _input_gradient(x, weight, shape, stride, padding, dilation, groups, ctx)
    else:
        out = _convolve(x, weight, shape, stride, padding, dilation, groups, ctx)
    if bias is not None:
        out = lax.add(out, lax.broadcast_in_dim(convert(bias, out.dtype), shape, (1,)))
    return convert(out, x.dtype)


@lowers(aten.convolution_backward.default)
def convolution_backward(
    grad: Array,
    x: Array,
    weight: Array,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    output_mask: Sequence[bool],
    *,
    ctx: Context,
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of input, weight and bias: those that output_mask asks for."""
    stride, padding, dilation = _per_dim(x, stride, padding, dilation)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        if transposed:
            grad_input = _convolve(grad, weight, x.shape, stride, padding, dilation, groups, ctx)
        else:
            grad_input = _input_gradient(grad, weight, x.shape, stride, padding, dilation, groups, ctx)
        grad_input = convert(grad_input, x.dtype)
    if output_mask[1]:
        wide, narrow = (grad, x) if transposed else (x, grad)
        grad_weight = convert(_weight_gradient(wide, narrow, weight.shape, stride, padding, dilation, groups, ctx), weight.dtype)
    if output_mask[2]:
        total = lax.reduce_sum(convert(grad, dtypes.accumulator(grad.dtype)), [0, *range(2, grad.ndim)])
        grad_bias = convert(total, grad.dtype)
    return grad_input, grad_weight, grad_bias


def _per_dim(x: Array, *settings: Sizes) -> list[list[int]]:
    """Settings given once for all spatial dimensions, repeated for each."""
    count = x.ndim - 2
    return [list(values) * count if len(values) == 1 else list(values) for values in settings]


def _dimension_numbers(lhs: tuple[int, int], rhs: tuple[int, int], out: tuple[int, int], rank: int) -> lax.ConvDimensionNumbers:
    """Where (batch, feature), (output, input) features and (batch, feature) lie; space comes last in all three."""
    space = tuple(range(2, rank))
    return lax.ConvDimensionNumbers(lhs + space, rhs + space, out + space)


_PLAIN = (0, 1)
_SWAPPED = (1, 0)


def _convolve(x: Array, weight: Array, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, ctx: Context) -> Array:
    """The plain convolution, in the accumulator's dtype."""
    dtype = dtypes.accumulator(x.dtype)
    if 0 in x.shape or 0 in weight.shape or 0 in shape:
        return lax.full(shape, 0, dtype)
    out = lax.conv_general_dilated(
        x,
        weight,
        window_strides=stride,
        padding=[(pad, pad) for pad in padding],
        rhs_dilation=dilation,
        dimension_numbers=_dimension_numbers(_PLAIN, _PLAIN, _PLAIN, x.ndim),
        feature_group_count=groups,
        precision=ctx.convolution_precision,
        preferred_element_type=dtype,
    )
    # The gradient of a transposed convolution: an output padding beyond the stride gives more places than its input has.
    return out if out.shape == tuple(shape) else lax.slice(out, [0] * out.ndim, shape)


def _input_gradient(
    grad: Array, weight: Array, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, ctx: Context
) -> Array:
    """What flows back to an input of `shape`: grad spread out by the stride, convolved with the mirrored weight."""
    dtype = dtypes.accumulator(grad.dtype)
    if 0 in grad.shape or 0 in weight.shape or 0 in shape:
        return lax.full(shape, 0, dtype)
    space = range(2, grad.ndim)
    mirrored = lax.rev(weight, tuple(dim for dim in space if weight.shape[dim] > 1))
    if groups > 1:
        # (groups * out, in, ...) -> (groups * in, out, ...): XLA splits the first of the output features, so both carry the group.
        out, into = weight.shape[0] // groups, weight.shape[1]
        mirrored = lax.reshape(mirrored, (groups, out, *weight.shape[1:]))
        mirrored = lax.transpose(mirrored, (0, 2, 1, *range(3, grad.ndim + 1)))
        mirrored = lax.reshape(mirrored, (groups * into, out, *weight.shape[2:]))
    margins = []
    for dim, step, pad, spread in zip(space, stride, padding, dilation, strict=True):
        reach = spread * (weight.shape[dim] - 1)
        covered = (grad.shape[dim] - 1) * step + 1
        margins.append((reach - pad, shape[dim] + pad - covered))
    return lax.conv_general_dilated(
        grad,
        mirrored,
        window_strides=(1,) * len(space),
        padding=margins,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=_dimension_numbers(_PLAIN, _PLAIN if groups > 1 else _SWAPPED, _PLAIN, grad.ndim),
        feature_group_count=groups,
        precision=ctx.convolution_precision,
        preferred_element_type=dtype,
    )


def _weight_gradient(
    x: Array, grad: Array, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, ctx: Context
) -> Array:
    """The gradient of a weight of `shape` (out, in / groups, *kernel): x convolved with grad, batch and channels in each other's roles."""
    dtype = dtypes.accumulator(x.dtype)
    if 0 in x.shape or 0 in grad.shape or math.prod(shape) == 0:
        return lax.full(shape, 0, dtype)
    margins = []
    for dim, step, pad, spread in zip(range(2, x.ndim), stride, padding, dilation, strict=True):
        covered = (grad.shape[dim] - 1) * step + 1
        wanted = (shape[dim] - 1) * spread + covered
        margins.append((pad, wanted - x.shape[dim] - pad))
    return lax.conv_general_dilated(
        x,
        grad,
        window_strides=dilation,
        padding=margins,
        rhs_dilation=stride,
        dimension_numbers=_dimension_numbers(_SWAPPED, _SWAPPED, _SWAPPED, x.ndim),
        batch_group_count=groups,
        precision=ctx.convolution_precision,
        preferred_element_type=dtype,
    )
