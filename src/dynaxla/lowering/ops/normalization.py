"""Layer, group and RMS normalization, forward and backward. Statistics of half types are computed in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu import onednn, onednn_support
from ..cpu.folding import Reduction, sum_neighbours
from ..dtypes import DType
from ..forms import Forms, Operand
from ..graphs import is_wanted
from ..promotion import convert
from ..registry import lowers
from .moments import affine, along, mean_over, moments_over, reciprocal_root

Dims = Sequence[int]
Three = tuple[Array | None, Array | None, Array | None]


# --- layer normalization


def normalize_last(
    x: Array, count: int, weight: Array | None, bias: Array | None, eps: float, add: Reduction = sum_neighbours
) -> tuple[Array, Array, Array]:
    """x normalized over its last `count` dimensions, in the accumulator's dtype; mean and 1 / standard deviation without them."""
    wide = convert(x, dtypes.accumulator(x.dtype))
    outer = x.ndim - count
    mean, variance, centered = moments_over(wide, range(outer, x.ndim), add)
    inverse = reciprocal_root(variance, eps)
    out = lax.mul(centered, along(inverse, x.shape, range(outer)))
    return affine(out, weight, bias, range(outer, x.ndim)), mean, inverse


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
    return 0 not in problem.x and onednn_support.takes(problem.dtype)


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
    if not is_wanted(ctx.node, 1) and not is_wanted(ctx.node, 2):
        problem = LayerNorm(x.shape, count, eps, x.dtype, ctx.platform)
        return ctx.choose(LAYER_NORM, problem).run(problem, x, weight, bias), None, None
    out, mean, inverse = normalize_last(x, count, weight, bias, eps, ctx.sum)
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
    normalized = lax.sub(convert(x, dtype), along(lax.reshape(convert(mean, dtype), x.shape[:outer]), x.shape, range(outer)))
    normalized = lax.mul(normalized, along(inverse, x.shape, range(outer)))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = affine(wide, weight, None, inner)
        grad_input = convert(_through_normalization(scaled, normalized, inverse, inner, range(outer), ctx.sum), x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = convert(ctx.sum(lax.mul(wide, normalized), range(outer)), weight.dtype)
    if output_mask[2] and bias is not None:
        grad_bias = convert(ctx.sum(wide, range(outer)), bias.dtype)
    return grad_input, grad_weight, grad_bias


def _through_normalization(grad: Array, normalized: Array, inverse: Array, dims: Dims, kept: Dims, add: Reduction) -> Array:
    """The gradient of the input: grad, without its parts that move the mean and the variance over `dims`, over the standard deviation."""
    grad_mean = along(mean_over(grad, dims, add), grad.shape, kept)
    slope = along(mean_over(lax.mul(grad, normalized), dims, add), grad.shape, kept)
    return lax.mul(lax.sub(lax.sub(grad, grad_mean), lax.mul(normalized, slope)), along(inverse, grad.shape, kept))


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
    wide = convert(x, dtypes.accumulator(x.dtype))
    groups = _Groups(batch, channels, group, x.shape, ctx)
    mean = groups.mean(groups.sums(wide))
    centered = lax.sub(wide, groups.spread(mean))
    inverse = reciprocal_root(groups.mean(groups.sums(lax.square(centered))), eps)
    out = affine(lax.mul(centered, groups.spread(inverse)), weight, bias, (1,))
    return convert(out, x.dtype), _with_shape(ctx, 1, mean), _with_shape(ctx, 2, inverse)


@dataclass(frozen=True)
class _Groups:
    """Channels in groups. What is as large as x keeps its dimensions: then it may lie in memory in whatever order it has."""

    batch: int
    channels: int
    group: int
    shape: tuple[int, ...]
    ctx: Context

    def sums(self, x: Array) -> Array:
        """Of each channel, over its places."""
        return self.ctx.sum(x, range(2, len(self.shape)))

    def mean(self, sums: Array) -> Array:
        """Of each group's elements, of their sums by channel."""
        total = lax.reduce_sum(lax.reshape(sums, (self.batch, self.group, self.channels // self.group)), (2,))
        return lax.div(total, lax.full_like(total, math.prod(self.shape) // max(self.batch * self.group, 1)))

    def spread(self, of_groups: Array) -> Array:
        """One number for each group, in the places of all its elements."""
        by_channel = along(of_groups, (self.batch, self.group, self.channels // self.group), (0, 1))
        return along(lax.reshape(by_channel, (self.batch, self.channels)), self.shape, (0, 1))


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
    *,
    ctx: Context,
) -> Three:
    """Gradients of input, weight and bias: those that output_mask asks for, None for the others.

    Shape:  that of x, and (channels) twice.
    Dtype:  that of x, or a wider weight's, as torch's fake kernel has it (autograd rounds); the weight's, or without a weight that of x.
    """
    dtype = dtypes.accumulator(x.dtype)
    groups = _Groups(batch, channels, group, x.shape, ctx)
    wide = convert(grad, dtype)
    inverse = groups.spread(convert(rstd, dtype))
    normalized = lax.mul(lax.sub(convert(x, dtype), groups.spread(convert(mean, dtype))), inverse)
    of_grad, of_product = groups.sums(wide), groups.sums(lax.mul(wide, normalized))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_mean, slope = (groups.spread(groups.mean(affine(sums, weight, None, (1,)))) for sums in (of_grad, of_product))
        away = lax.sub(lax.sub(affine(wide, weight, None, (1,)), grad_mean), lax.mul(normalized, slope))
        grad_input = convert(lax.mul(away, inverse), ctx.output[0].jax_dtype)
    parameter_dtype = x.dtype if weight is None else weight.dtype
    if output_mask[1]:
        grad_weight = convert(lax.reduce_sum(of_product, (0,)), parameter_dtype)
    if output_mask[2]:
        grad_bias = convert(lax.reduce_sum(of_grad, (0,)), parameter_dtype)
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
    inverse = reciprocal_root(mean_over(lax.square(wide), range(outer, x.ndim), ctx.sum), _default_eps(eps, dtype))
    out = affine(lax.mul(wide, along(inverse, x.shape, range(outer))), weight, None, range(outer, x.ndim))
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
    inverse = along(lax.reshape(convert(rstd, dtype), x.shape[:outer]), x.shape, range(outer))
    normalized = lax.mul(convert(x, dtype), inverse)
    grad_input = grad_weight = None
    if output_mask[0]:
        scaled = affine(wide, weight, None, inner)
        slope = along(mean_over(lax.mul(scaled, normalized), inner, ctx.sum), x.shape, range(outer))
        grad_input = convert(lax.mul(lax.sub(scaled, lax.mul(normalized, slope)), inverse), x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = convert(ctx.sum(lax.mul(wide, normalized), range(outer)), weight.dtype)
    return grad_input, grad_weight
