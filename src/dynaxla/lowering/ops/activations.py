"""Activation functions and their gradients.

Ops whose results need rounding compute float16 and bfloat16 (the half types) in float32, as in ATen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu.exponential import exp_nonpositive
from ..dynamic_scalars import is_dynamic
from ..promotion import Promotion, elementwise, full_like, number, plus, times
from ..registry import lower_table, lowers
from ..symbolic_numbers import is_symbolic
from .comparison import at_least, at_most, saturate_bound


def _apply(function: Callable[..., Array], *operands: Any) -> Array:
    return elementwise(function, operands, Promotion.DEFAULT)


def _clamp(x: Array, low: Any, high: Any) -> Array:
    """Returns x clamped to [low, high]; nan stays nan."""
    return at_most(at_least(x, low), high)


def _zeros_where(condition: Array, x: Array) -> Array:
    return lax.select(condition, full_like(x, 0), x)


lower_table({aten.relu.default: lambda x: lax.max(x, number(0, x.dtype))}, promote=Promotion.NO_OPMATH)


@lowers(aten.relu.default, platforms=["cpu"], promote=Promotion.NO_OPMATH)
def relu(x: Array) -> Array:
    """max(x, 0); in float32 and float64 -0.0 stays -0.0, as in ATen.

    The lowering for other platforms, above, is a `lax.max`, because XLA fuses a maximum with 0 into cuDNN's convolutions.
    """
    return at_least(x, 0)


def _tanh_backward(grad: Array, out: Array) -> Array:
    return lax.mul(grad, lax.sub(number(1, out.dtype), lax.square(jnp.conj(out))))


def _sigmoid_backward(grad: Array, out: Array) -> Array:
    out = jnp.conj(out)
    return lax.mul(grad, lax.mul(lax.sub(number(1, out.dtype), out), out))


def _silu(x: Array) -> Array:
    return lax.mul(x, lax.logistic(x))


def _silu_backward(grad: Array, x: Array) -> Array:
    sigmoid = lax.logistic(x)
    derivative = lax.mul(sigmoid, plus(lax.mul(x, lax.sub(number(1, x.dtype), sigmoid)), 1))
    return lax.mul(grad, derivative)


def _mish_tanh(x: Array) -> Array:
    return lax.tanh(lax.log1p(lax.exp(x)))


def _mish_backward(grad: Array, x: Array) -> Array:
    tanh = _mish_tanh(x)
    derivative = lax.add(tanh, lax.mul(lax.mul(x, lax.logistic(x)), lax.sub(number(1, x.dtype), lax.square(tanh))))
    return lax.mul(grad, derivative)


def _hardsigmoid(x: Array) -> Array:
    return times(_clamp(plus(x, 3), 0, 6), 1 / 6)


def _hardsigmoid_backward(grad: Array, x: Array) -> Array:
    inside = lax.bitwise_and(lax.gt(x, number(-3, x.dtype)), lax.lt(x, number(3, x.dtype)))
    return lax.select(inside, times(grad, 1 / 6), full_like(grad, 0))


def _hardswish_backward(grad: Array, x: Array) -> Array:
    """Returns the gradient of hardswish's input.

    Source: ATen native/cpu/Activation.cpp, hardswish_backward_kernel
    """
    inside = lax.mul(grad, plus(times(x, 1 / 3), 0.5))
    out = lax.select(lax.lt(x, number(3, x.dtype)), inside, grad)
    return _zeros_where(lax.le(x, number(-3, x.dtype)), out)


lower_table(
    {
        aten.silu.default: _silu,
        aten.silu_backward.default: _silu_backward,
        aten.mish.default: lambda x: lax.mul(x, _mish_tanh(x)),
        aten.mish_backward.default: _mish_backward,
        aten.hardsigmoid.default: _hardsigmoid,
        aten.hardsigmoid_backward.default: _hardsigmoid_backward,
        aten.hardswish.default: lambda x: lax.mul(x, _hardsigmoid(x)),
        aten.hardswish_backward.default: _hardswish_backward,
        aten.tanh_backward.default: _tanh_backward,
        aten.sigmoid_backward.default: _sigmoid_backward,
        aten._prelu_kernel.default: lambda x, weight: lax.select(lax.gt(x, number(0, x.dtype)), x, lax.mul(weight, x)),
    },
    promote=Promotion.DEFAULT,
)

lower_table({aten.sigmoid.default: lax.logistic, aten.tanh.default: lax.tanh}, promote=Promotion.INT_TO_FLOAT)


@lowers(aten._prelu_kernel_backward.default)
def prelu_kernel_backward(grad: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    """Gradients of x and of the weight. Autograd sums the second result, which has the shape of x, to the weight's shape.

    Shape:  that of x for both results.
    """

    def grad_input(grad: Array, x: Array, weight: Array) -> Array:
        return lax.select(lax.gt(x, number(0, x.dtype)), grad, lax.mul(weight, grad))

    def grad_weight(grad: Array, x: Array, weight: Array) -> Array:
        return _zeros_where(lax.gt(x, number(0, x.dtype)), lax.mul(x, grad))

    return _apply(grad_input, grad, x, weight), _apply(grad_weight, grad, x, weight)


# The constants of GELU and of its approximation by tanh.
_SQRT_HALF = math.sqrt(0.5)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


def _tanh_argument(x: Array) -> Array:
    return times(lax.add(x, times(lax.mul(lax.square(x), x), _TANH_CUBIC)), _TANH_SCALE)


@lowers(aten.gelu.default)
def gelu(x: Array, *, approximate: str = "none") -> Array:
    """x times the standard normal's cumulative distribution function at x; approximated with tanh if `approximate="tanh"`."""

    def exact(x: Array) -> Array:
        return lax.mul(times(x, 0.5), plus(lax.erf(times(x, _SQRT_HALF)), 1))

    def tanh_approximation(x: Array) -> Array:
        return lax.mul(times(x, 0.5), plus(lax.tanh(_tanh_argument(x)), 1))

    return _apply(tanh_approximation if approximate == "tanh" else exact, x)


@lowers(aten.gelu_backward.default)
def gelu_backward(grad: Array, x: Array, *, approximate: str = "none") -> Array:
    def exact(grad: Array, x: Array) -> Array:
        cdf = times(plus(lax.erf(times(x, _SQRT_HALF)), 1), 0.5)
        pdf = times(exp_nonpositive(times(lax.square(x), -0.5)), 1 / math.sqrt(2 * math.pi))
        return lax.mul(grad, lax.add(cdf, lax.mul(x, pdf)))

    def tanh_approximation(grad: Array, x: Array) -> Array:
        tanh = lax.tanh(_tanh_argument(x))
        argument_derivative = times(plus(times(lax.square(x), 3 * _TANH_CUBIC), 1), _TANH_SCALE)
        cdf = times(plus(tanh, 1), 0.5)
        x_times_pdf = lax.mul(lax.mul(times(x, 0.5), lax.sub(number(1, x.dtype), lax.square(tanh))), argument_derivative)
        return lax.mul(grad, lax.add(cdf, x_times_pdf))

    return _apply(tanh_approximation if approximate == "tanh" else exact, grad, x)


@lowers(aten.hardtanh.default)
def hardtanh(x: Array, low: Any = -1, high: Any = 1) -> Array:
    """x clamped to [low, high]; nan stays nan."""
    return _clamp(x, saturate_bound(low, x.dtype), saturate_bound(high, x.dtype))


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(grad: Array, x: Array, low: Any, high: Any) -> Array:
    def function(grad: Array, x: Array) -> Array:
        return _zeros_where(lax.bitwise_or(lax.le(x, number(low, x.dtype)), lax.ge(x, number(high, x.dtype))), grad)

    return _apply(function, grad, x)


@lowers(aten.threshold.default)
def threshold(x: Array, limit: Any, value: Any) -> Array:
    """x where x > limit or x is nan, else `value`."""
    return lax.select(lax.le(x, number(limit, x.dtype)), full_like(x, value), x)


@lowers(aten.threshold.default, platforms=["cpu"])
def threshold_on_cpu(x: Array, limit: Any, value: Any) -> Array:
    """Same as `threshold`, except that `limit` is not rounded to a half type."""
    return lax.select(_is_at_most(x, limit), full_like(x, value), x)


@lowers(aten.threshold_backward.default)
def threshold_backward(grad: Array, x: Array, limit: Any) -> Array:
    """grad where x > limit or x is nan, else 0."""
    return elementwise(lambda grad, x: _zeros_where(lax.le(x, number(limit, x.dtype)), grad), (grad, x), Promotion.NO_OPMATH)


@lowers(aten.threshold_backward.default, platforms=["cpu"])
def threshold_backward_on_cpu(grad: Array, x: Array, limit: Any) -> Array:
    """Same as `threshold_backward`, except that `limit` is not rounded to a half type."""
    return elementwise(lambda grad, x: _zeros_where(_is_at_most(x, limit), grad), (grad, x), Promotion.NO_OPMATH)


def _is_at_most(x: Array, limit: Any) -> Array:
    """True where x <= limit. If x has a half type that may not hold the limit exactly, they are compared in float32, as in ATen's kernel.

    Source: ATen native/cpu/Activation.cpp
    """
    is_exact = not is_dynamic(limit) and not is_symbolic(limit) and float(x.dtype.type(limit)) == limit
    upcast = x if is_exact else lax.convert_element_type(x, dtypes.accumulator(x.dtype))
    return lax.le(upcast, number(limit, upcast.dtype))


@lowers(aten.leaky_relu.default)
def leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    return _apply(lambda x: lax.select(lax.gt(x, number(0, x.dtype)), x, times(x, negative_slope)), x)


def _require_sign_of_input(is_lost: bool) -> None:
    if is_lost:
        raise UnsupportedOp("the sign of the input cannot be derived from the result")


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(grad: Array, x: Array, negative_slope: float, self_is_result: bool) -> Array:
    """grad where x > 0, else grad * negative_slope. x is leaky_relu's result if `self_is_result`, else its input: the signs agree.

    Raises: UnsupportedOp for a result and a negative slope: the signs differ, and torch's kernel raises RuntimeError.
    """
    _require_sign_of_input(self_is_result and not is_dynamic(negative_slope) and not negative_slope >= 0)
    return _apply(lambda grad, x: lax.select(lax.gt(x, number(0, x.dtype)), grad, times(grad, negative_slope)), grad, x)


@lowers(aten.elu.default)
def elu(x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    """scale * alpha * (exp(input_scale * x) - 1) where x < 0, else scale * x."""

    def function(x: Array) -> Array:
        negative = times(lax.expm1(times(x, input_scale)), alpha * scale)
        # For a large x, `negative` overflows to infinity, and the select discards it.
        return lax.select(lax.lt(x, number(0, x.dtype)), negative, times(x, scale))

    return _apply(function, x)


@lowers(aten.elu_backward.default)
def elu_backward(grad: Array, alpha: float, scale: float, input_scale: float, is_result: bool, x: Array) -> Array:
    """The gradient of elu's input. x is elu's result if `is_result`, else elu's input.

    Raises: UnsupportedOp for a result and a negative alpha: torch's kernel raises RuntimeError.
    """
    _require_sign_of_input(is_result and not is_dynamic(alpha) and not alpha >= 0)

    def function(grad: Array, x: Array) -> Array:
        if is_result:
            derivative = times(plus(x, alpha * scale), input_scale)
        else:
            derivative = times(lax.exp(times(x, input_scale)), alpha * scale * input_scale)
        return lax.mul(grad, lax.select(lax.le(x, number(0, x.dtype)), derivative, full_like(x, scale)))

    return _apply(function, grad, x)


@lowers(aten.softplus.default)
def softplus(x: Array, beta: float = 1, limit: float = 20) -> Array:
    """log(1 + exp(beta x)) / beta; x itself where beta x > limit."""

    def function(x: Array) -> Array:
        scaled = times(x, beta)
        soft = lax.div(lax.log1p(lax.exp(scaled)), full_like(x, beta))
        return lax.select(lax.gt(scaled, number(limit, x.dtype)), x, soft)

    return _apply(function, x)


@lowers(aten.softplus_backward.default)
def softplus_backward(grad: Array, x: Array, beta: float, limit: float) -> Array:
    def function(grad: Array, x: Array) -> Array:
        scaled = times(x, beta)
        return lax.select(lax.gt(scaled, number(limit, x.dtype)), grad, lax.mul(grad, lax.logistic(scaled)))

    return _apply(function, grad, x)


@lowers(aten.glu.default)
def glu(x: Array, dim: int = -1) -> Array:
    """The first half of x along `dim`, times the sigmoid of the second half.

    Shape:  x (..., 2 n, ...) gives (..., n, ...).
    """
    first, second = jnp.split(x, 2, dim)
    return _apply(lambda first, second: lax.mul(first, lax.logistic(second)), first, second)


@lowers(aten.glu_backward.default)
def glu_backward(grad: Array, x: Array, dim: int) -> Array:
    """The gradient of glu's input.

    Shape:  grad (..., n, ...), x (..., 2 n, ...) give (..., 2 n, ...).
    """

    def grad_first(grad: Array, second: Array) -> Array:
        return lax.mul(grad, lax.logistic(second))

    def grad_second(grad: Array, first: Array, second: Array) -> Array:
        return lax.mul(_sigmoid_backward(grad, lax.logistic(second)), first)

    first, second = jnp.split(x, 2, dim)
    return jnp.concatenate([_apply(grad_first, grad, second), _apply(grad_second, grad, first, second)], dim)


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(x: Array, ctx: Context) -> tuple[Array, Array]:
    """log(1 / (1 + exp(-x))), and the buffer that eager mode's backward reads: exp(-|x|) on the CPU, empty on a GPU.

    Shape:  that of x for both results; an empty buffer has shape [0].
    Dtype:  that of x for both results.
    """

    def function(x: Array) -> Array:
        return lax.sub(lax.min(x, number(0, x.dtype)), lax.log1p(lax.exp(lax.neg(lax.abs(x)))))

    buffer = ctx.output[1]
    if buffer.shape != x.shape:
        return _apply(function, x), lax.full(buffer.shape, 0, buffer.jax_dtype)
    return _apply(function, x), _apply(lambda x: lax.exp(lax.neg(lax.abs(x))), x)


@lowers(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(grad: Array, x: Array, buffer: Array) -> Array:
    """The gradient of x, computed from x and grad alone. `buffer` is not read."""
    return _apply(lambda grad, x: lax.mul(grad, lax.logistic(lax.neg(x))), grad, x)


@lowers(aten.hardshrink.default)
def hardshrink(x: Array, lambd: float = 0.5) -> Array:
    """0 where -lambd <= x <= lambd, else x."""
    return _zeros_where(_is_within(x, lambd), x)


def _is_within(x: Array, lambd: float) -> Array:
    return lax.bitwise_and(lax.ge(x, number(-lambd, x.dtype)), lax.le(x, number(lambd, x.dtype)))


@lowers(aten.hardshrink_backward.default)
def hardshrink_backward(grad: Array, x: Array, lambd: float) -> Array:
    return elementwise(lambda grad, x: _zeros_where(_is_within(x, lambd), grad), (grad, x), Promotion.NO_OPMATH)


@lowers(aten.softshrink.default)
def softshrink(x: Array, lambd: float = 0.5) -> Array:
    """x - lambd above lambd, x + lambd below -lambd, and a zero with the sign of x between them; nan stays nan."""

    def function(x: Array) -> Array:
        is_below = lax.lt(x, number(-lambd, x.dtype))
        shrunk = lax.select(is_below, plus(x, lambd), lax.sub(x, number(lambd, x.dtype)))
        return lax.select(_is_within(x, lambd), times(x, 0), shrunk)

    return _apply(function, x)


@lowers(aten.softshrink_backward.default)
def softshrink_backward(grad: Array, x: Array, lambd: float) -> Array:
    return hardshrink_backward(grad, x, lambd)
