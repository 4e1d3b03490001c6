"""Batch, layer, group and RMS normalization, forward and backward. Statistics of half types are computed in float32."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jax import Array, lax

from ...errors import UnsupportedOp
from .. import dtypes
from ..context import Context
from ..cpu import onednn
from ..dtypes import DType
from ..forms import Forms, Operand
from ..promotion import convert
from ..registry import lowers

aten = torch.ops.aten

Dims = Sequence[int]
Three = tuple[Array | None, Array | None, Array | None]


def _along(x: Array, shape: Dims, dims: Dims) -> Array:
    """Broadcast x to `shape`; its dimensions become those at `dims`."""
    return lax.broadcast_in_dim(x, shape, dims)


def _mean(x: Array, dims: Dims) -> Array:
    """The mean over `dims`, which disappear; NaN over nothing."""
    total = lax.reduce_sum(x, dims)
    return lax.div(total, lax.full_like(total, math.prod(x.shape[dim] for dim in dims)))


def _moments(x: Array, dims: Dims) -> tuple[Array, Array, Array]:
    """Mean and biased variance over `dims`, and x less its mean."""
    kept = [dim for dim in range(x.ndim) if dim not in dims]
    mean = _mean(x, dims)
    centered = lax.sub(x, _along(mean, x.shape, kept))
    return mean, _mean(lax.square(centered), dims), centered


def _reciprocal_root(variance: Array, eps: float) -> Array:
    return lax.rsqrt(lax.add(variance, lax.full_like(variance, eps)))


def _affine(x: Array, weight: Array | None, bias: Array | None, dims: Dims) -> Array:
    """x * weight + bias, whose dimensions are x's at `dims`."""
    if weight is not None:
        x = lax.mul(x, _along(convert(weight, x.dtype), x.shape, dims))
    if bias is not None:
        x = lax.add(x, _along(convert(bias, x.dtype), x.shape, dims))
    return x


def _but_channels(x: Array) -> list[int]:
    return [0, *range(2, x.ndim)]


# --- batch normalization


def _normalize_by_batch(x: Array, weight: Array | None, bias: Array | None, eps: float) -> tuple[Array, Array, Array, Array]:
    """x normalized by its own statistics, in the accumulator's dtype; mean, biased variance and 1 / standard deviation per channel."""
    wide = convert(x, dtypes.accumulator(x.dtype))
    mean, variance, centered = _moments(wide, _but_channels(x))
    inverse = _reciprocal_root(variance, eps)
    factor = inverse if weight is None else lax.mul(inverse, convert(weight, wide.dtype))
    return _affine(centered, factor, bias, (1,)), mean, variance, inverse


def _normalize_by_running(x: Array, weight: Array | None, bias: Array | None, running_mean: Array, running_var: Array, eps: float) -> Array:
    """x normalized by given statistics, in the accumulator's dtype."""
    dtype = dtypes.accumulator(x.dtype)
    factor = _reciprocal_root(convert(running_var, dtype), eps)
    if weight is not None:
        factor = lax.mul(factor, convert(weight, dtype))
    # As ATen does, everything per channel goes into one factor and one shift: a channel's work is one multiplication and one addition.
    shift = lax.neg(lax.mul(convert(running_mean, dtype), factor))
    if bias is not None:
        shift = lax.add(convert(bias, dtype), shift)
    return _affine(convert(x, dtype), factor, shift, (1,))


def _blend(running: Array, statistic: Array, momentum: float) -> Array:
    """(1 - momentum) * running + momentum * statistic"""
    wide = convert(running, statistic.dtype)
    blended = lax.add(lax.mul(wide, lax.full_like(wide, 1 - momentum)), lax.mul(statistic, lax.full_like(wide, momentum)))
    return blended


def _saved(ctx: Context, index: int, statistic: Array | None) -> Array:
    """A saved statistic in the dtype that ATen saves it in; without one, the empty tensor that ATen gives instead."""
    spec = ctx.output[index]
    return lax.full(spec.shape, 0, spec.jax_dtype) if statistic is None else convert(statistic, spec.jax_dtype)


def _batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
    ctx: Context,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """The normalized x, saved mean and 1 / standard deviation, and the new running statistics."""
    _require_vectors(running_mean, running_var)
    # ATen's forward kernels read as many numbers as there are channels, in whatever shape they come.
    weight, bias = (None if item is None else lax.reshape(item, (item.size,)) for item in (weight, bias))
    if not training:
        assert running_mean is not None
        assert running_var is not None
        out = _normalize_by_running(x, weight, bias, running_mean, running_var, eps)
        return convert(out, x.dtype), _saved(ctx, 1, None), _saved(ctx, 2, None), running_mean, running_var
    out, mean, variance, inverse = _normalize_by_batch(x, weight, bias, eps)
    count = math.prod(x.shape[dim] for dim in _but_channels(x))
    if running_mean is not None:
        running_mean = _blend(running_mean, mean, momentum)
    if running_var is not None:
        # The running variance is the unbiased one; of a single value that is 0 / 0.
        unbiased = lax.mul(variance, lax.full_like(variance, count / (count - 1) if count != 1 else math.nan))
        running_var = _blend(running_var, unbiased, momentum)
    return convert(out, x.dtype), _saved(ctx, 1, mean), _saved(ctx, 2, inverse), running_mean, running_var


def _require_vectors(*parameters: Array | None) -> None:
    """Refuse channels in another shape than a vector, as ATen's kernels do.

    Raises: UnsupportedOp.
    """
    if any(item is not None and item.ndim != 1 for item in parameters):
        raise UnsupportedOp("of batch norm, running statistics (and the weight, in the backward pass) have to be vectors")


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: float,
    eps: float,
    *,
    ctx: Context,
) -> tuple[Array | None, ...]:
    """Batch norm: the result, the saved mean and 1 / standard deviation, and the new running mean and variance.

    Shape:  that of x (batch, channel, *space); statistics (channel), and the saved ones empty without `training`.
    Dtype:  that of x; that in which PyTorch keeps each statistic.
    """
    *results, new_mean, new_var = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, ctx)
    return *results, _saved(ctx, 3, new_mean), _saved(ctx, 4, new_var)


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    x: Array, weight: Array | None, bias: Array | None, training: bool, momentum: float, eps: float, *, ctx: Context
) -> tuple[Array, Array, Array]:
    """Batch norm by x's own statistics: the result, mean and 1 / standard deviation.

    Shape:  that of x (batch, channel, *space); statistics (channel).
    Dtype:  that of x; that in which PyTorch keeps each statistic.
    """
    return _batch_norm(x, weight, bias, None, None, True, momentum, eps, ctx)[:3]


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
    *,
    ctx: Context,
) -> tuple[Array, Array, Array]:
    """Batch norm by running statistics: the result, and two empty vectors where others save statistics.

    Shape:  that of x.
    """
    return _batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps, ctx)[:3]


@lowers(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
    *,
    ctx: Context,
) -> tuple[Array | None, ...]:
    """Batch norm by x's own statistics: the result, mean, 1 / standard deviation, an empty reserve, and the new running mean and variance.

    Shape:  that of x (batch, channel, *space); statistics (channel).
    Dtype:  that of x; that in which PyTorch keeps each statistic.
    """
    out, mean, inverse, new_mean, new_var = _batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps, ctx)
    return out, mean, inverse, _saved(ctx, 3, None), _saved(ctx, 4, new_mean), _saved(ctx, 5, new_var)


@lowers(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    momentum: float,
    eps: float,
    *,
    ctx: Context,
) -> tuple[Array, ...]:
    """Batch norm by running statistics, or without such by x's own: the result, the saved mean and 1 / standard deviation, and an empty
    reserve.

    Shape:  that of x (batch, channel, *space); the saved ones are (channel), and empty with running statistics.
    """
    training = running_mean is None or running_var is None
    out, mean, inverse, *_ = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, ctx)
    return out, mean, inverse, _saved(ctx, 3, None)


@lowers(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad: Array,
    x: Array,
    weight: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    save_mean: Array | None,
    save_invstd: Array | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Three:
    """Gradients of input, weight and bias: those that output_mask asks for, None for the others.

    Shape:  that of x, and (channel) twice.
    """
    _require_vectors(weight, running_mean, running_var)
    dtype = dtypes.accumulator(x.dtype)
    dims = _but_channels(x)
    wide = convert(grad, dtype)
    if train:
        assert save_mean is not None
        assert save_invstd is not None
        mean, inverse = convert(save_mean, dtype), convert(save_invstd, dtype)
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, inverse = convert(running_mean, dtype), _reciprocal_root(convert(running_var, dtype), eps)
    centered = lax.sub(convert(x, dtype), _along(mean, x.shape, (1,)))
    grad_bias = lax.reduce_sum(wide, dims)
    grad_weight = lax.mul(lax.reduce_sum(lax.mul(wide, centered), dims), inverse)
    grad_input = None
    if output_mask[0]:
        factor = inverse if weight is None else lax.mul(inverse, convert(weight, dtype))
        if train:
            count = lax.full_like(inverse, math.prod(x.shape[dim] for dim in dims))
            # The parts of grad that move the mean and the variance do not reach the input.
            slope = lax.div(lax.mul(grad_weight, inverse), count)
            wide = lax.sub(wide, _along(lax.div(grad_bias, count), x.shape, (1,)))
            wide = lax.sub(wide, lax.mul(centered, _along(slope, x.shape, (1,))))
        grad_input = convert(lax.mul(wide, _along(factor, x.shape, (1,))), x.dtype)
    parameter_dtype = x.dtype if weight is None else weight.dtype
    return (
        grad_input,
        convert(grad_weight, parameter_dtype) if output_mask[1] else None,
        convert(grad_bias, parameter_dtype) if output_mask[2] else None,
    )


@lowers(aten.batch_norm_backward.default)
def batch_norm_backward(
    grad: Array,
    x: Array,
    weight: Array,
    running_mean: Array | None,
    running_var: Array | None,
    save_mean: Array | None,
    save_var: Array | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Array,
) -> Three:
    """As `native_batch_norm_backward`; the reserve, which cuDNN alone could read, is not needed."""
    return native_batch_norm_backward(grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask)


# --- layer normalization


def normalize_last(x: Array, count: int, weight: Array | None, bias: Array | None, eps: float) -> tuple[Array, Array, Array]:
    """x normalized over its last `count` dimensions, in the accumulator's dtype; mean and 1 / standard deviation without them."""
    wide = convert(x, dtypes.accumulator(x.dtype))
    outer = x.ndim - count
    mean, variance, centered = _moments(wide, range(outer, x.ndim))
    inverse = _reciprocal_root(variance, eps)
    out = lax.mul(centered, _along(inverse, x.shape, range(outer)))
    return _affine(out, weight, bias, range(outer, x.ndim)), mean, inverse


@dataclass(frozen=True)
class LayerNorm:
    """A layer normalization whose mean and standard deviation are not needed, apart from its operands' values.

    Attributes: x (shape); count (how many of its last dimensions are normalized); eps; dtype; platform.
    """

    x: tuple[int, ...]
    count: int
    eps: float
    dtype: DType
    platform: str

    @property
    def operands(self) -> tuple[Operand, ...]:
        inner = Operand(self.x[len(self.x) - self.count :], self.dtype)
        return Operand(self.x, self.dtype), inner, inner

    @property
    def result_order(self) -> None:
        return None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.x)} over {self.count}"


LAYER_NORM: Forms[LayerNorm] = Forms("layer_norm")

# Below so many numbers, what a call of oneDNN costs is more than what it saves.
_FEW_NUMBERS = 1 << 15


def _fits_onednn(problem: LayerNorm) -> bool:
    return 0 not in problem.x and onednn.takes(problem.dtype)


@LAYER_NORM.form("onednn", platforms=["cpu"], fits=_fits_onednn, suits=lambda problem: math.prod(problem.x) >= _FEW_NUMBERS)
def _layer_norm_by_onednn(problem: LayerNorm, x: Array, weight: Array | None, bias: Array | None) -> Array:
    size = math.prod(x.shape[x.ndim - problem.count :])
    scale, shift = (
        lax.full((size,), value, np.float32) if item is None else lax.reshape(convert(item, np.dtype(np.float32)), (size,))
        for item, value in ((weight, 1), (bias, 0))
    )
    rows = x if problem.count == 1 and 2 <= x.ndim <= 5 else lax.reshape(x, (x.size // size, size))
    return lax.reshape(onednn.layer_norm(rows, scale, shift, problem.eps), x.shape)


@LAYER_NORM.form("xla")
def _layer_norm_by_xla(problem: LayerNorm, x: Array, weight: Array | None, bias: Array | None) -> Array:
    return convert(normalize_last(x, problem.count, weight, bias, problem.eps)[0], x.dtype)


@lowers(aten.native_layer_norm.default)
def native_layer_norm(
    x: Array, normalized_shape: Dims, weight: Array | None, bias: Array | None, eps: float, *, ctx: Context
) -> tuple[Array, Array | None, Array | None]:
    """x less its mean over its last dimensions, over its standard deviation, times weight plus bias; mean and 1 / standard deviation, None
    where the graph does not use them.

    Shape:  that of x; mean and 1 / standard deviation keep the normalized dimensions with size 1.
    Dtype:  that of x; the others as PyTorch has them, computed in float32 for half types.
    """
    count = len(normalized_shape)
    if all(user.target is operator.getitem and user.args[1] == 0 for user in ctx.node.users):
        problem = LayerNorm(x.shape, count, eps, x.dtype, ctx.platform)
        return ctx.choose(LAYER_NORM, problem).run(problem, x, weight, bias), None, None
    out, mean, inverse = normalize_last(x, count, weight, bias, eps)
    return convert(out, x.dtype), _with_shape(ctx, 1, mean), _with_shape(ctx, 2, inverse)


def _with_shape(ctx: Context, index: int, statistic: Array) -> Array:
    spec = ctx.output[index]
    return convert(lax.reshape(statistic, spec.shape), spec.jax_dtype)


@lowers(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    grad: Array,
    x: Array,
    normalized_shape: Dims,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    bias: Array | None,
    output_mask: Sequence[bool],
    *,
    ctx: Context,
) -> Three:
    """Gradients of input, weight and bias: those that output_mask asks for, None for the others.

    Shape:  each that of its operand.
    Dtype:  each that of its operand.
    """
    dtype = dtypes.accumulator(x.dtype)
    outer = x.ndim - len(normalized_shape)
    inner = range(outer, x.ndim)
    wide = convert(grad, dtype)
    inverse = lax.reshape(convert(rstd, dtype), x.shape[:outer])
    normalized = lax.sub(convert(x, dtype), _along(lax.reshape(convert(mean, dtype), x.shape[:outer]), x.shape, range(outer)))
    normalized = lax.mul(normalized, _along(inverse, x.shape, range(outer)))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = _affine(wide, weight, None, inner)
        grad_input = convert(_through_normalization(scaled, normalized, inverse, inner, range(outer)), x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = convert(ctx.sum(lax.mul(wide, normalized), range(outer)), weight.dtype)
    if output_mask[2] and bias is not None:
        grad_bias = convert(ctx.sum(wide, range(outer)), bias.dtype)
    return grad_input, grad_weight, grad_bias


def _through_normalization(grad: Array, normalized: Array, inverse: Array, dims: Dims, kept: Dims) -> Array:
    """The gradient of the input: grad, without its parts that move the mean and the variance over `dims`, over the standard deviation."""
    grad_mean = _along(_mean(grad, dims), grad.shape, kept)
    slope = _along(_mean(lax.mul(grad, normalized), dims), grad.shape, kept)
    return lax.mul(lax.sub(lax.sub(grad, grad_mean), lax.mul(normalized, slope)), _along(inverse, grad.shape, kept))


# --- group normalization


@lowers(aten.native_group_norm.default)
def native_group_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    batch: int,
    channels: int,
    space: int,
    group: int,
    eps: float,
    *,
    ctx: Context,
) -> tuple[Array, Array, Array]:
    """x less its mean over each group of channels, over its standard deviation, times weight plus bias; mean and 1 / standard deviation.

    Shape:  that of x; mean and 1 / standard deviation are (batch, group).
    Dtype:  that of x; the others as PyTorch has them, computed in float32 for half types.
    """
    grouped = lax.reshape(convert(x, dtypes.accumulator(x.dtype)), (batch, group, channels // group, space))
    mean, variance, centered = _moments(grouped, (2, 3))
    inverse = _reciprocal_root(variance, eps)
    out = lax.reshape(lax.mul(centered, _along(inverse, grouped.shape, (0, 1))), x.shape)
    out = _affine(out, weight, bias, (1,))
    return convert(out, x.dtype), _with_shape(ctx, 1, mean), _with_shape(ctx, 2, inverse)


@lowers(aten.native_group_norm_backward.default)
def native_group_norm_backward(
    grad: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    batch: int,
    channels: int,
    space: int,
    group: int,
    output_mask: Sequence[bool],
) -> Three:
    """Gradients of input, weight and bias: those that output_mask asks for, None for the others.

    Shape:  that of x, and (channels) twice.
    Dtype:  that of x; the weight's, or without a weight that of x.
    """
    dtype = dtypes.accumulator(x.dtype)
    shape = (batch, group, channels // group, space)
    wide = convert(grad, dtype)
    inverse = convert(rstd, dtype)
    normalized = lax.sub(lax.reshape(convert(x, dtype), shape), _along(convert(mean, dtype), shape, (0, 1)))
    normalized = lax.mul(normalized, _along(inverse, shape, (0, 1)))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = lax.reshape(_affine(wide, weight, None, (1,)), shape)
        grad_input = lax.reshape(_through_normalization(scaled, normalized, inverse, (2, 3), (0, 1)), x.shape)
        grad_input = convert(grad_input, x.dtype)
    parameter_dtype = x.dtype if weight is None else weight.dtype
    if output_mask[1]:
        product = lax.reshape(lax.mul(lax.reshape(wide, shape), normalized), (batch, channels, space))
        grad_weight = convert(lax.reduce_sum(product, (0, 2)), parameter_dtype)
    if output_mask[2]:
        grad_bias = convert(lax.reduce_sum(wide, _but_channels(x)), parameter_dtype)
    return grad_input, grad_weight, grad_bias


# --- root mean square normalization


def _default_eps(eps: float | None, dtype: DType) -> float:
    return torch.finfo(dtypes.to_torch(dtype)).eps if eps is None else eps


@lowers(aten._fused_rms_norm.default)
def fused_rms_norm(x: Array, normalized_shape: Dims, weight: Array | None, eps: float | None, *, ctx: Context) -> tuple[Array, Array]:
    """x over its root mean square over the last dimensions, times weight; and 1 / root mean square.

    Shape:  that of x; 1 / root mean square keeps the normalized dimensions with size 1.
    Dtype:  as PyTorch has them; computed in float32 for half types.
    """
    dtype = dtypes.accumulator(x.dtype)
    wide = convert(x, dtype)
    outer = x.ndim - len(normalized_shape)
    inverse = _reciprocal_root(_mean(lax.square(wide), range(outer, x.ndim)), _default_eps(eps, dtype))
    out = _affine(lax.mul(wide, _along(inverse, x.shape, range(outer))), weight, None, range(outer, x.ndim))
    return convert(out, ctx.output[0].jax_dtype), _with_shape(ctx, 1, inverse)


@lowers(aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(
    grad: Array, x: Array, normalized_shape: Dims, rstd: Array, weight: Array | None, output_mask: Sequence[bool], *, ctx: Context
) -> tuple[Array | None, Array | None]:
    """Gradients of input and weight: those that output_mask asks for, None for the others; each of its operand's shape and dtype."""
    dtype = dtypes.accumulator(x.dtype)
    outer = x.ndim - len(normalized_shape)
    inner = range(outer, x.ndim)
    wide = convert(grad, dtype)
    inverse = _along(lax.reshape(convert(rstd, dtype), x.shape[:outer]), x.shape, range(outer))
    normalized = lax.mul(convert(x, dtype), inverse)
    grad_input = grad_weight = None
    if output_mask[0]:
        scaled = _affine(wide, weight, None, inner)
        slope = _along(_mean(lax.mul(scaled, normalized), inner), x.shape, range(outer))
        grad_input = convert(lax.mul(lax.sub(scaled, lax.mul(normalized, slope)), inverse), x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = convert(ctx.sum(lax.mul(wide, normalized), range(outer)), weight.dtype)
    return grad_input, grad_weight
