"""Lowerings of layer, group and RMS normalization, forward and backward. Statistics of half types are computed in float32."""

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
from ..cpu.vectorized_reductions import Reduction, vectorized_sum
from ..dimensions import Dims
from ..dtypes import DType
from ..graphs import is_result_used
from ..implementations import Implementations, Operand
from ..promotion import broadcast_back, convert, expand_leading, to_accumulator
from ..registry import lowers
from .moments import affine, inverse_std, mean_over, moments_over

Gradients = tuple[Array | None, Array | None, Array | None]


# --- layer normalization


def normalize_last(
    x: Array, count: int, weight: Array | None, bias: Array | None, eps: float, add: Reduction = vectorized_sum
) -> tuple[Array, Array, Array]:
    """Normalizes x over its last `count` dimensions. add: the function that sums over dimensions.

    Returns the normalized x, the mean and 1 / standard deviation, all in the accumulator's dtype. The shape of the statistics is that of x
    without the normalized dimensions.
    """
    wide = to_accumulator(x)
    outer = x.ndim - count
    mean, variance, centered = moments_over(wide, range(outer, x.ndim), add)
    rstd = inverse_std(variance, eps)
    out = lax.mul(centered, expand_leading(rstd, x.shape))
    return affine(out, weight, bias, range(outer, x.ndim)), mean, rstd


@dataclass(frozen=True)
class LayerNorm:
    """The problem (see implementations.py) of a layer normalization whose statistics are not used: everything but the operands' values.

    Attributes:
        x: The shape of the input.
        count: The number of normalized dimensions, the last ones.
        eps: The number added to the variance.
        dtype: The dtype of the input.
        platform: JAX's name of the platform.
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


LAYER_NORM: Implementations[LayerNorm] = Implementations("layer_norm")

# For inputs with fewer elements, calling oneDNN costs more than it saves.
_MIN_ONEDNN_ELEMENTS = 1 << 15


def _supports_onednn(problem: LayerNorm) -> bool:
    return 0 not in problem.x and onednn_support.supports(problem.dtype)


@LAYER_NORM.implementation(
    "onednn", platforms=["cpu"], supports=_supports_onednn, preferred=lambda problem: math.prod(problem.x) >= _MIN_ONEDNN_ELEMENTS
)
def _layer_norm_by_onednn(problem: LayerNorm, x: Array, weight: Array | None, bias: Array | None) -> Array:
    size = math.prod(x.shape[x.ndim - problem.count :])
    scale, shift = (
        lax.full((size,), value, np.float32) if item is None else lax.reshape(convert(item, np.dtype(np.float32)), (size,))
        for item, value in ((weight, 1), (bias, 0))
    )
    rows = x if problem.count == 1 and 2 <= x.ndim <= 5 else lax.reshape(x, (x.size // size, size))
    return lax.reshape(onednn.layer_norm(rows, scale, shift, problem.eps), x.shape)


@LAYER_NORM.implementation("xla")
def _layer_norm_by_xla(problem: LayerNorm, x: Array, weight: Array | None, bias: Array | None) -> Array:
    return convert(normalize_last(x, problem.count, weight, bias, problem.eps)[0], x.dtype)


@lowers(aten.native_layer_norm.default)
def native_layer_norm(
    x: Array, normalized_shape: Dims, weight: Array | None, bias: Array | None, eps: float, *, ctx: Context
) -> tuple[Array, Array | None, Array | None]:
    """(x - mean) / standard deviation * weight + bias, over the last dimensions; the mean; and 1 / standard deviation.

    Mean and 1 / standard deviation are None if the graph uses neither of them.

    Shape:  that of x; the statistics keep the normalized dimensions with size 1.
    Dtype:  that of x; the statistics have the dtype of the node's outputs, and are computed in float32 for half types.
    """
    count = len(normalized_shape)
    if not is_result_used(ctx.node, 1) and not is_result_used(ctx.node, 2):
        problem = LayerNorm(x.shape, count, eps, x.dtype, ctx.platform)
        return ctx.choose(LAYER_NORM, problem).run(problem, x, weight, bias), None, None
    out, mean, rstd = normalize_last(x, count, weight, bias, eps, ctx.sum)
    return convert(out, x.dtype), _as_output(ctx, 1, mean), _as_output(ctx, 2, rstd)


def _as_output(ctx: Context, index: int, statistic: Array) -> Array:
    """Returns a statistic in the shape and dtype of the node's output `index`."""
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
) -> Gradients:
    """The gradients of input, weight and bias, None where `output_mask` is False.

    Shape:  each that of its operand.
    Dtype:  each that of its operand.
    """
    dtype = dtypes.accumulator(x.dtype)
    outer = x.ndim - len(normalized_shape)
    inner = range(outer, x.ndim)
    wide = convert(grad, dtype)
    wide_rstd = lax.reshape(convert(rstd, dtype), x.shape[:outer])
    normalized = lax.sub(convert(x, dtype), expand_leading(lax.reshape(convert(mean, dtype), x.shape[:outer]), x.shape))
    normalized = lax.mul(normalized, expand_leading(wide_rstd, x.shape))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = affine(wide, weight, None, inner)
        grad_input = convert(_normalization_input_grad(scaled, normalized, wide_rstd, inner, ctx.sum), x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = convert(ctx.sum(lax.mul(wide, normalized), range(outer)), weight.dtype)
    if output_mask[2] and bias is not None:
        grad_bias = convert(ctx.sum(wide, range(outer)), bias.dtype)
    return grad_input, grad_weight, grad_bias


def _normalization_input_grad(grad: Array, normalized: Array, rstd: Array, dims: Dims, add: Reduction) -> Array:
    """Returns the gradient of a normalization's input.

    It is (grad - mean(grad) - normalized * mean(grad * normalized)) / standard deviation.

    Args:
        grad: The gradient of the normalized input: the result's gradient times the weight.
        normalized: The normalized input.
        rstd: 1 / standard deviation, without the dimensions `dims`.
        dims: The normalized dimensions.
        add: The function that sums over dimensions.
    """
    grad_mean = broadcast_back(mean_over(grad, dims, add), grad.shape, dims)
    grad_projection = broadcast_back(mean_over(lax.mul(grad, normalized), dims, add), grad.shape, dims)
    return lax.mul(lax.sub(lax.sub(grad, grad_mean), lax.mul(normalized, grad_projection)), broadcast_back(rstd, grad.shape, dims))


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
    """(x - mean) / standard deviation * weight + bias, over each group of channels; the mean; and 1 / standard deviation.

    Shape:  that of x; the statistics are (batch, group).
    Dtype:  that of x; the statistics have the dtype of the node's outputs, and are computed in float32 for half types.
    """
    wide = to_accumulator(x)
    groups = _GroupMeans(batch, channels, group, x.shape, ctx)
    mean = groups.mean(groups.sums(wide))
    centered = lax.sub(wide, groups.expand(mean))
    rstd = inverse_std(groups.mean(groups.sums(lax.square(centered))), eps)
    out = affine(lax.mul(centered, groups.expand(rstd)), weight, bias, (1,))
    return convert(out, x.dtype), _as_output(ctx, 1, mean), _as_output(ctx, 2, rstd)


@dataclass(frozen=True)
class _GroupMeans:
    """Computes means over groups of channels, without a reshape of arrays of the size of x, so that their memory layout is kept.

    Attributes:
        batch: The batch size.
        channels: The number of channels.
        group: The number of groups.
        shape: The shape of x, (batch, channels, ...).
        ctx: The context of the current node.
    """

    batch: int
    channels: int
    group: int
    shape: tuple[int, ...]
    ctx: Context

    def sums(self, x: Array) -> Array:
        """Returns the sums over each channel: (batch, channels)."""
        return self.ctx.sum(x, range(2, len(self.shape)))

    def mean(self, sums: Array) -> Array:
        """Returns the mean over each group, from the sums over its channels: (batch, group)."""
        total = lax.reduce_sum(lax.reshape(sums, (self.batch, self.group, self.channels // self.group)), (2,))
        return lax.div(total, lax.full_like(total, math.prod(self.shape) // max(self.batch * self.group, 1)))

    def expand(self, group_values: Array) -> Array:
        """Broadcasts one value per group to all its elements, in the shape of x."""
        channel_values = lax.broadcast_in_dim(group_values, (self.batch, self.group, self.channels // self.group), (0, 1))
        return lax.broadcast_in_dim(lax.reshape(channel_values, (self.batch, self.channels)), self.shape, (0, 1))


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
) -> Gradients:
    """The gradients of input, weight and bias, None where `output_mask` is False.

    Shape:  that of x, (channels) and (channels).
    Dtype:  the input's gradient has the dtype that torch's fake kernel gives: that of x, or of the weight if that is wider. Autograd casts
            this gradient back. The other gradients have the dtype of the weight, or of x without a weight.
    """
    dtype = dtypes.accumulator(x.dtype)
    groups = _GroupMeans(batch, channels, group, x.shape, ctx)
    wide = convert(grad, dtype)
    expanded_rstd = groups.expand(convert(rstd, dtype))
    normalized = lax.mul(lax.sub(convert(x, dtype), groups.expand(convert(mean, dtype))), expanded_rstd)
    grad_sums, product_sums = groups.sums(wide), groups.sums(lax.mul(wide, normalized))
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_mean, grad_projection = (groups.expand(groups.mean(affine(sums, weight, None, (1,)))) for sums in (grad_sums, product_sums))
        centered_grad = lax.sub(lax.sub(affine(wide, weight, None, (1,)), grad_mean), lax.mul(normalized, grad_projection))
        grad_input = convert(lax.mul(centered_grad, expanded_rstd), ctx.output[0].jax_dtype)
    parameter_dtype = x.dtype if weight is None else weight.dtype
    if output_mask[1]:
        grad_weight = convert(lax.reduce_sum(product_sums, (0,)), parameter_dtype)
    if output_mask[2]:
        grad_bias = convert(lax.reduce_sum(grad_sums, (0,)), parameter_dtype)
    return grad_input, grad_weight, grad_bias


# --- root mean square normalization


def _default_eps(eps: float | None, dtype: DType) -> float:
    return torch.finfo(dtypes.to_torch(dtype)).eps if eps is None else eps


@lowers(aten._fused_rms_norm.default)
def fused_rms_norm(x: Array, normalized_shape: Dims, weight: Array | None, eps: float | None, *, ctx: Context) -> tuple[Array, Array]:
    """x / RMS * weight, where RMS is the root mean square over the last dimensions; and 1 / RMS.

    Shape:  that of x; 1 / RMS keeps the normalized dimensions with size 1.
    Dtype:  those of the node's outputs; half types are computed in float32.
    """
    dtype = dtypes.accumulator(x.dtype)
    wide = convert(x, dtype)
    outer = x.ndim - len(normalized_shape)
    rstd = inverse_std(mean_over(lax.square(wide), range(outer, x.ndim), ctx.sum), _default_eps(eps, dtype))
    out = affine(lax.mul(wide, expand_leading(rstd, x.shape)), weight, None, range(outer, x.ndim))
    return convert(out, ctx.output[0].jax_dtype), _as_output(ctx, 1, rstd)


@lowers(aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(
    grad: Array, x: Array, normalized_shape: Dims, rstd: Array, weight: Array | None, output_mask: Sequence[bool], *, ctx: Context
) -> tuple[Array | None, Array | None]:
    """The gradients of input and weight, None where `output_mask` is False.

    Shape:  each that of its operand.
    Dtype:  each that of its operand.
    """
    dtype = dtypes.accumulator(x.dtype)
    outer = x.ndim - len(normalized_shape)
    inner = range(outer, x.ndim)
    wide = convert(grad, dtype)
    expanded_rstd = expand_leading(lax.reshape(convert(rstd, dtype), x.shape[:outer]), x.shape)
    normalized = lax.mul(convert(x, dtype), expanded_rstd)
    grad_input = grad_weight = None
    if output_mask[0]:
        scaled = affine(wide, weight, None, inner)
        grad_projection = expand_leading(mean_over(lax.mul(scaled, normalized), inner, ctx.sum), x.shape)
        grad_input = convert(lax.mul(lax.sub(scaled, lax.mul(normalized, grad_projection)), expanded_rstd), x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = convert(ctx.sum(lax.mul(wide, normalized), range(outer)), weight.dtype)
    return grad_input, grad_weight
