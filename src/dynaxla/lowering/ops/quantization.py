"""Fake quantization, as in quantization-aware training, and products of quantized matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dimensions import Dims
from ..dtypes import DType
from ..implementations import Implementations
from ..promotion import broadcast_like, convert, full_like, number, to_accumulator
from ..registry import lowers
from .matmul import contract
from .quantized_weights import quantized_product
from .rounding import round_half_to_even

Scales = Sequence[Array]

_FLOAT32, _FLOAT64, _INT32 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int32)


def _inverse(scale: Any) -> Any:
    """Returns 1 / scale, computed in float32 for every dtype of scale."""
    if not isinstance(scale, Array):
        return np.float32(1) / np.float32(scale)
    return lax.div(number(1, _FLOAT32), convert(scale, _FLOAT32))


def _clamped(values: Array, quant_min: int, quant_max: int) -> tuple[Array, Array]:
    """Returns `values` clamped to the bounds (NaN becomes `quant_min`), and the mask of elements that were within the bounds."""
    low, high = number(quant_min, values.dtype), number(quant_max, values.dtype)
    in_bounds = lax.bitwise_and(lax.ge(values, low), lax.le(values, high))
    clamped = lax.min(lax.max(values, low), high)
    return lax.select(lax.ne(values, values), full_like(values, quant_min), clamped), in_bounds


def _fake_quantized(
    x: Array, scale: Any, zero_point: Any, quant_min: int, quant_max: int, axis: int | None = None, zero_point_first: bool = False
) -> tuple[Array, Array]:
    """Returns x quantized and dequantized again, and the mask of elements whose quantized value was within the bounds before the clamp.

    The quantized value is round(x / scale) + zero_point, clamped to the bounds. NaN becomes `quant_min`.

    Args:
        x: The array.
        scale: A number or an array that `broadcast_like` accepts.
        zero_point: A number or an array that `broadcast_like` accepts.
        quant_min: The lower bound of the quantized values.
        quant_max: The upper bound of the quantized values.
        axis: The dimension with a scale and a zero point for each index, or None for one scale and zero point.
        zero_point_first: True to add the zero point before rounding, not after.
    """
    wide = to_accumulator(x)
    zero = broadcast_like(zero_point, wide, axis)
    quantized = lax.mul(wide, broadcast_like(_inverse(scale), wide, axis))
    quantized = round_half_to_even(lax.add(zero, quantized)) if zero_point_first else lax.add(zero, round_half_to_even(quantized))
    clamped, in_bounds = _clamped(quantized, quant_min, quant_max)
    # ATen's per-tensor kernel multiplies in float32, its per-channel kernel in the dtype of x.
    centered = lax.sub(clamped, zero) if axis is not None else convert(lax.sub(clamped, zero), _FLOAT32)
    return convert(lax.mul(centered, broadcast_like(scale, centered, axis)), x.dtype), in_bounds


@lowers(aten.fake_quantize_per_tensor_affine_cachemask.default)
def fake_quantize_per_tensor(x: Array, scale: float, zero_point: int, quant_min: int, quant_max: int) -> tuple[Array, Array]:
    """x quantized and dequantized again, and the mask of elements within the bounds: see `_fake_quantized`.

    Shape:  both: that of x.
    Dtype:  that of x; bool.
    """
    return _fake_quantized(x, scale, zero_point, quant_min, quant_max)


@lowers(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantize_per_tensor_qparams(
    x: Array, scale: Array, zero_point: Array, fake_quant_enabled: Array, quant_min: int, quant_max: int
) -> tuple[Array, Array]:
    """As `fake_quantize_per_tensor`, with scale and zero point as tensors of one element; returns x unchanged unless `fake_quant_enabled`.

    Shape:  both: that of x.
    Dtype:  that of x; bool. The zero point may have any dtype and is converted to int32.
    """
    out, in_bounds = _fake_quantized(x, scale, convert(zero_point, _INT32), quant_min, quant_max)
    return _select_if_enabled(fake_quant_enabled, out, in_bounds, x)


def _select_if_enabled(enabled: Array, out: Array, in_bounds: Array, x: Array) -> tuple[Array, Array]:
    """Returns `out` and `in_bounds` if `enabled` is nonzero, else x and True for all elements."""
    enabled = lax.reshape(lax.ne(convert(enabled, _INT32), np.int32(0)), ())
    return lax.select(enabled, out, x), lax.bitwise_or(in_bounds, lax.broadcast_in_dim(lax.bitwise_not(enabled), x.shape, ()))


@lowers(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantize_per_channel(
    x: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int, *, ctx: Context
) -> tuple[Array, Array]:
    """As `fake_quantize_per_tensor`, with scale and zero point for each index of `axis`.

    Shape:  both: that of x; scale and zero point are vectors.
    Dtype:  that of x; bool.
    Raises: RuntimeError at run time, for an integer zero point out of bounds.
    """
    zero_point_first = dtypes.is_float(zero_point.dtype)
    if not zero_point_first:
        in_bounds = lax.bitwise_and(
            lax.ge(zero_point, full_like(zero_point, quant_min)), lax.le(zero_point, full_like(zero_point, quant_max))
        )
        ctx.require(in_bounds, RuntimeError, "`zero_point` must be between `quant_min` and `quant_max`.")
    return _fake_quantized(x, scale, zero_point, quant_min, quant_max, axis, zero_point_first)


def _integral_zero_point(zero_point: Array, quant_min: int, quant_max: int) -> Array:
    """Returns the zero point, rounded to the nearest integer (half to even) and clamped to the bounds, in float32."""
    return lax.min(lax.max(round_half_to_even(convert(zero_point, _FLOAT32)), np.float32(quant_min)), np.float32(quant_max))


@lowers(aten._fake_quantize_learnable_per_tensor_affine.default)
def fake_quantize_learnable_per_tensor(
    x: Array, scale: Array, zero_point: Array, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Array:
    """x quantized and dequantized again. The zero point is rounded and clamped to the bounds first.

    Shape:  that of x.
    Dtype:  that of x.
    """
    return _fake_quantized(x, scale, _integral_zero_point(zero_point, quant_min, quant_max), quant_min, quant_max)[0]


@lowers(aten._fake_quantize_learnable_per_channel_affine.default)
def fake_quantize_learnable_per_channel(
    x: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Array:
    """As `fake_quantize_learnable_per_tensor`, with scale and zero point for each index of `axis`."""
    return _fake_quantized(x, scale, _integral_zero_point(zero_point, quant_min, quant_max), quant_min, quant_max, axis)[0]


def _learnable_gradients(
    grad: Array, x: Array, scale: Array, zero_point: Array, quant_min: int, quant_max: int, grad_factor: float, axis: int | None
) -> tuple[Array, Array, Array]:
    """Returns the gradients of x, scale and zero point, all float32 and of the shape of x.

    The caller sums the gradients of scale and zero point over the elements that share them. `zero_point` is integral, in float32.
    """
    grad, x = convert(grad, _FLOAT32), convert(x, _FLOAT32)
    zero, wide_scale, inverse = (broadcast_like(value, x, axis) for value in (zero_point, scale, _inverse(scale)))
    quantized = round_half_to_even(lax.add(zero, lax.mul(x, inverse)))
    clamped, in_bounds = _clamped(quantized, quant_min, quant_max)
    zeros, factor = full_like(x, 0), full_like(x, grad_factor)
    error = lax.mul(lax.sub(lax.mul(lax.sub(clamped, zero), wide_scale), x), inverse)
    grad_scale = lax.mul(lax.mul(grad, lax.select(in_bounds, error, lax.sub(clamped, zero))), factor)
    grad_zero_point = lax.select(in_bounds, zeros, lax.mul(lax.mul(lax.neg(grad), wide_scale), factor))
    return lax.mul(grad, convert(in_bounds, _FLOAT32)), grad_scale, grad_zero_point


@lowers(aten._fake_quantize_learnable_per_tensor_affine_backward.default)
def fake_quantize_learnable_per_tensor_backward(
    grad: Array, x: Array, scale: Array, zero_point: Array, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> tuple[Array, Array, Array]:
    """Gradients of x, scale and zero point. For an empty x, returns x, scale and zero point themselves, as ATen does.

    Shape:  that of x, and [1] twice.
    Dtype:  float32.
    """
    if x.size == 0:
        return x, scale, zero_point
    # Unlike the forward op, which rounds to even, ATen adds 0.5 and truncates here.
    plus_half = lax.add(convert(zero_point, _FLOAT32), np.float32(0.5))
    clamped = lax.min(lax.max(plus_half, np.float32(quant_min)), np.float32(quant_max))
    rounded_zero_point = convert(convert(clamped, _INT32), _FLOAT32)
    grad_x, *parameter_grads = _learnable_gradients(grad, x, scale, rounded_zero_point, quant_min, quant_max, grad_factor, None)
    grad_scale, grad_zero_point = (lax.reshape(lax.reduce_sum(value, range(x.ndim)), (1,)) for value in parameter_grads)
    return grad_x, grad_scale, grad_zero_point


@lowers(aten._fake_quantize_learnable_per_channel_affine_backward.default)
def fake_quantize_learnable_per_channel_backward(
    grad: Array, x: Array, scale: Array, zero_point: Array, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> tuple[Array, Array, Array]:
    """Gradients of x, scale and zero point. For an empty x, returns x, scale and zero point themselves, as ATen does.

    Shape:  that of x, and twice a vector with one element for each index of `axis`.
    Dtype:  float32.
    """
    if x.size == 0:
        return x, scale, zero_point
    rounded_zero_point = _integral_zero_point(zero_point, quant_min, quant_max)
    grad_x, *parameter_grads = _learnable_gradients(grad, x, scale, rounded_zero_point, quant_min, quant_max, grad_factor, axis)
    grad_scale, grad_zero_point = (lax.reduce_sum(value, [dim for dim in range(x.ndim) if dim != axis]) for value in parameter_grads)
    return grad_x, grad_scale, grad_zero_point


# Fused observer and fake quantization

# The smallest scale, on platforms where ATen replaces smaller scales (`ctx.eager.widens_small_scales`).
# Source: ATen native/quantized/cpu/QuantUtils.h
_SMALL_SCALE_THRESHOLD = 6.1e-5


def _qparams(low: Array, high: Array, quant_min: int, quant_max: int, symmetric: bool, ctx: Context) -> tuple[Array, Array]:
    """Returns the scale (float32) and zero point (int32) that cover the range from low to high and represent 0 exactly.

    With `symmetric`, a range that contains numbers of both signs is first widened to be symmetric around 0.

    Source: ATen native/quantized/cpu/QuantUtils.h, ChooseQuantizationParams
    """
    zero = full_like(low, 0)
    has_both_signs = lax.bitwise_and(lax.lt(low, zero), lax.gt(high, zero))
    span = quant_max - quant_min
    if symmetric:
        lowest_step, highest_step = -(span // 2 + 1), span // 2
        ratio = lax.max(lax.abs(lax.div(low, full_like(low, lowest_step))), lax.abs(lax.div(high, full_like(high, highest_step))))
        ratio = convert(ratio, _FLOAT64)
        low = lax.select(has_both_signs, convert(lax.mul(ratio, number(lowest_step, _FLOAT64)), _FLOAT32), low)
        high = lax.select(has_both_signs, convert(lax.mul(ratio, number(highest_step, _FLOAT64)), _FLOAT32), high)
    low, high = lax.min(low, zero), lax.max(high, zero)
    scale = lax.div(lax.sub(convert(high, _FLOAT64), convert(low, _FLOAT64)), full_like(convert(low, _FLOAT64), span))
    scale_float32 = convert(scale, _FLOAT32)
    is_unusable = lax.bitwise_or(
        lax.eq(scale_float32, zero), lax.eq(lax.div(full_like(scale_float32, 1), scale_float32), full_like(scale_float32, math.inf))
    )
    scale = lax.select(is_unusable, full_like(scale, 0.1), scale)
    if ctx.eager.widens_small_scales:
        is_small = lax.lt(scale, full_like(scale, _SMALL_SCALE_THRESHOLD))
        amplifier = lax.div(full_like(scale_float32, _SMALL_SCALE_THRESHOLD), convert(scale, _FLOAT32))
        widened_low = lax.select(lax.eq(high, zero), full_like(low, -_SMALL_SCALE_THRESHOLD * span), lax.mul(low, amplifier))
        widened_high = lax.select(lax.eq(low, zero), full_like(high, _SMALL_SCALE_THRESHOLD * span), lax.mul(high, amplifier))
        low, high = lax.select(is_small, widened_low, low), lax.select(is_small, widened_high, high)
        scale = lax.max(scale, full_like(scale, _SMALL_SCALE_THRESHOLD))
    else:
        scale = convert(convert(scale, _FLOAT32), _FLOAT64)
    low_steps, high_steps = lax.div(convert(low, _FLOAT64), scale), lax.div(convert(high, _FLOAT64), scale)
    low_error = lax.sub(full_like(scale, abs(quant_min)), lax.abs(low_steps))
    high_error = lax.sub(full_like(scale, abs(quant_max)), lax.abs(high_steps))
    zero_point_from_low = lax.sub(full_like(scale, quant_min), low_steps)
    zero_point_from_high = lax.sub(full_like(scale, quant_max), high_steps)
    zero_point = lax.select(lax.lt(low_error, high_error), zero_point_from_low, zero_point_from_high)
    if symmetric:
        has_both_signs = lax.bitwise_and(lax.lt(low, zero), lax.gt(high, zero))
        zero_point = lax.select(has_both_signs, full_like(zero_point, (quant_min + quant_max) / 2), zero_point)
    zero_point = round_half_to_even(lax.min(lax.max(zero_point, full_like(zero_point, quant_min)), full_like(zero_point, quant_max)))
    return convert(scale, _FLOAT32), convert(zero_point, _INT32)


@lowers(aten._fused_moving_avg_obs_fq_helper_functional.default)
def fused_moving_average_observer(
    x: Array,
    observer_on: Array,
    fake_quant_on: Array,
    running_min: Array,
    running_max: Array,
    scale: Array,
    zero_point: Array,
    averaging_const: float,
    quant_min: int,
    quant_max: int,
    ch_axis: int,
    per_row_fake_quant: bool = False,
    symmetric_quant: bool = False,
    *,
    ctx: Context,
) -> tuple[Array, ...]:
    """Updates the moving averages of the extrema of x if `observer_on`, and fake-quantizes x with them if `fake_quant_on`.

    With `per_row_fake_quant`, each index of the first dimension has its own extrema. Returns x (fake-quantized or unchanged), the mask of
    elements within the bounds, and the new running_min, running_max, scale and zero_point.

    Shape:  that of x twice; the other results have the shapes of their arguments.
    Dtype:  float32, bool; the other results have the dtypes of their arguments.
    Raises: UnsupportedOp for an empty x, for dtypes other than float32, and for channels that are not the first dimension; RuntimeError
            when the program runs, if a running minimum exceeds its maximum.
    """
    if per_row_fake_quant and (ch_axis != 0 or running_min.shape != x.shape[:1]):
        raise UnsupportedOp(
            "a fused observer per channel whose channels are not the first dimension, or whose running_min has another size"
        )
    if x.size == 0 or x.dtype != _FLOAT32:
        raise UnsupportedOp(f"a fused observer of {x.dtype}{list(x.shape)}")
    rows = lax.reshape(x, (x.shape[0], x.size // x.shape[0]) if per_row_fake_quant else (1, x.size))
    observing, quantizing = (lax.reshape(lax.ne(convert(flag, _INT32), np.int32(0)), ()) for flag in (observer_on, fake_quant_on))

    def updated(running: Array, current: Array) -> Array:
        current = lax.reshape(current, running.shape)
        step = lax.mul(full_like(running, averaging_const), lax.sub(current, running))
        new = lax.select(lax.eq(lax.abs(running), full_like(running, math.inf)), current, lax.add(running, step))
        return lax.select(observing, new, running)

    running_min, running_max = updated(running_min, lax.reduce_min(rows, (1,))), updated(running_max, lax.reduce_max(rows, (1,)))
    is_ordered = lax.bitwise_or(lax.le(running_min, running_max), lax.broadcast_in_dim(lax.bitwise_not(quantizing), running_min.shape, ()))
    ctx.require(is_ordered, RuntimeError, "In ChooseQuantizationParams, min should be less than or equal to max")
    new_scale, new_zero = _qparams(running_min, running_max, quant_min, quant_max, symmetric_quant, ctx)
    scale = lax.select(quantizing, convert(lax.reshape(new_scale, scale.shape), scale.dtype), scale)
    zero_point = lax.select(quantizing, convert(lax.reshape(new_zero, zero_point.shape), zero_point.dtype), zero_point)
    out, in_bounds = _fake_quantized(x, scale, zero_point, quant_min, quant_max, 0 if per_row_fake_quant else None)
    out, in_bounds = _select_if_enabled(fake_quant_on, out, in_bounds, x)
    return out, in_bounds, running_min, running_max, scale, zero_point


# Products


@lowers(aten._weight_int8pack_mm.default)
def weight_int8pack_mm(x: Array, weight: Array, scales: Array, *, ctx: Context) -> Array:
    """x @ weight.T, with each column multiplied by its scale.

    Shape:  x (rows, k), weight (columns, k) of int8 and scales (columns) give (rows, columns).
    Dtype:  that of x.
    """
    out = quantized_product(ctx, x, weight.shape, lambda start, size: lax.dynamic_slice_in_dim(weight, start, size), weight.size)
    if out is None:
        out = contract(x, convert(weight, x.dtype), ((1,), (1,)), ctx)
    return convert(lax.mul(out, lax.broadcast_in_dim(convert(scales, out.dtype), out.shape, (1,))), x.dtype)


def _broadcast_scale(scale: Array, shape: Sequence[int], dim: int) -> Array:
    """Broadcasts a scale (one number, or one for each index of `dim`) to the shape of the product.

    Raises: UnsupportedOp for blockwise scales.
    """
    if scale.dtype == _FLOAT32 and scale.size == 1:
        return lax.broadcast_in_dim(lax.reshape(scale, ()), shape, ())
    if scale.dtype == _FLOAT32 and scale.ndim == 2 and scale.shape[dim] == shape[dim] and scale.size == shape[dim]:
        return lax.broadcast_in_dim(lax.reshape(scale, (scale.size,)), shape, (dim,))
    vectors = f"{shape[dim]} {'rows' if dim == 0 else 'columns'}"
    raise UnsupportedOp(
        f"_scaled_mm with a scale {scale.dtype}{list(scale.shape)}: the lowering supports one float32 number, or one for each of the "
        f"{vectors} of the result, but not one for each block"
    )


@dataclass(frozen=True)
class Float8Product:
    """A matrix product of float8 operands, computed in float32. The problem has no `operands`, so `tune` does not measure it.

    Attributes:
        is_fast: True if accumulation may be less precise.
        platform: JAX's name of the platform.
    """

    is_fast: bool
    platform: str


FLOAT8_PRODUCT: Implementations[Float8Product] = Implementations("float8_product")


@FLOAT8_PRODUCT.implementation("tensor_cores", platforms=["cuda"])
def _by_tensor_cores(problem: Float8Product, x: Array, y: Array, ctx: Context) -> Array:
    """Multiplies float8 operands on tensor cores. With precision HIGHEST, XLA accumulates the products in full float32 precision."""
    precision = lax.Precision.DEFAULT if problem.is_fast else lax.Precision.HIGHEST
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=_FLOAT32)


@FLOAT8_PRODUCT.implementation("float32")
def _by_float32(problem: Float8Product, x: Array, y: Array, ctx: Context) -> Array:
    return contract(convert(x, _FLOAT32), convert(y, _FLOAT32), ((1,), (0,)), ctx)


@lowers(aten._scaled_mm.default)
def scaled_mm(
    x: Array,
    y: Array,
    scale_a: Array,
    scale_b: Array,
    bias: Array | None = None,
    scale_result: Array | None = None,
    out_dtype: DType | None = None,
    use_fast_accum: bool = False,
    *,
    ctx: Context,
) -> Array:
    """x @ y for float8 matrices, times their scales, plus bias.

    Shape:  x (m, k) and y (k, n) give (m, n). scale_a: one number or (m, 1); scale_b: one number or (1, n), both float32.
    Dtype:  `out_dtype`.
    Raises: UnsupportedOp for a float8 result (the only one that `scale_result` scales), and for blockwise scales.
    """
    out = ctx.output
    if out.jax_dtype.itemsize == 1:
        raise UnsupportedOp(f"_scaled_mm with a result of {out.dtype}")
    problem = Float8Product(use_fast_accum, ctx.platform)
    product = ctx.choose(FLOAT8_PRODUCT, problem).run(problem, x, y, ctx)
    product = lax.mul(lax.mul(product, _broadcast_scale(scale_a, out.shape, 0)), _broadcast_scale(scale_b, out.shape, 1))
    if bias is not None:
        product = lax.add(product, lax.broadcast_in_dim(convert(bias, _FLOAT32), out.shape, (1,)))
    return convert(product, out.jax_dtype)


# Recipes (values of torch.nn.functional.ScalingType) with one scale for all elements, or one for each row of x and each column of y. All
# other recipes have blockwise scales.
_RECIPES_WITHOUT_BLOCKS = ([0], [1])


def _scales_v2(scale_a: Scales, recipe_a: Dims, swizzle_a: Dims, scale_b: Scales, recipe_b: Dims, swizzle_b: Dims) -> tuple[Array, Array]:
    """Returns the two scales.

    Raises: UnsupportedOp for blockwise scales, and for swizzled ones.
    """
    for recipe, swizzle in ((recipe_a, swizzle_a), (recipe_b, swizzle_b)):
        if list(recipe) not in _RECIPES_WITHOUT_BLOCKS or any(swizzle):
            raise UnsupportedOp(f"_scaled_mm_v2 with blockwise or swizzled scales: recipe {list(recipe)}, swizzle {list(swizzle)}")
    return scale_a[0], scale_b[0]


@lowers(aten._scaled_mm_v2.default)
def scaled_mm_v2(
    x: Array,
    y: Array,
    scale_a: Scales,
    recipe_a: Dims,
    swizzle_a: Dims,
    scale_b: Scales,
    recipe_b: Dims,
    swizzle_b: Dims,
    bias: Array | None,
    out_dtype: DType | None,
    contraction_dim: Dims = (),
    use_fast_accum: bool = False,
    *,
    ctx: Context,
) -> Array:
    """As `scaled_mm`, with recipes for the scales. `contraction_dim` is ignored: ATen only validates it.

    Raises: UnsupportedOp for a float8 result, and for blockwise or swizzled scales.
    """
    scales = _scales_v2(scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b)
    return scaled_mm(x, y, *scales, bias, None, out_dtype, use_fast_accum, ctx=ctx)
