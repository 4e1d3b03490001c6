"""Elementwise arithmetic, powers, bitwise ops, rounding, exponentials, logarithms and trigonometry. Rarer functions are in special.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Set
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax
from jax import numpy as jnp
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu.exponential import exp
from ..dynamic_scalars import is_dynamic
from ..promotion import Promotion, broadcast, convert, elementwise, full_like, number, result_type, to_accumulator
from ..registry import lower_table, lowers
from ..symbolic_numbers import is_symbolic
from .comparison import is_nan
from .float_bits import copysign, frexp, power_of_two
from .gradients_of_slices import ZEROS, sum_of_slice_gradients
from .rounding import round_half_to_even, truncate

Function = Callable[..., Array]


# Arithmetic


def _add(x: Array, y: Array) -> Array:
    return lax.bitwise_or(x, y) if dtypes.is_bool(x.dtype) else lax.add(x, y)


def _multiply(x: Array, y: Array) -> Array:
    return lax.bitwise_and(x, y) if dtypes.is_bool(x.dtype) else lax.mul(x, y)


def _scale(x: Array, factor: Any) -> Array:
    return x if factor == 1 else _multiply(x, number(factor, x.dtype))


# XLA merges an op with the op that computes its operand if both are in the same set and have a constant operand: (x + 1e8) - 1e8 becomes x,
# and x * 0.1 * 10 becomes x.
_SUMS = frozenset([aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar])
_PRODUCTS = frozenset([aten.mul.Tensor, aten.mul.Scalar])


def producer(item: Any) -> Any:
    """Returns the node that computes the values of an argument: skips views and copies. Other arguments are returned unchanged."""
    while isinstance(item, Node) and item.op == "call_function" and (item.target in _COPIES or getattr(item.target, "is_view", False)):
        item = item.args[0]
    return item


def _unmerged(function: Function, ctx: Context, ops: Set[Any]) -> Function:
    """Returns `function`, of two operands. Adds a barrier if XLA would merge its op with one of `ops` that computes an operand."""
    operands = [producer(item) for item in ctx.node.args[:2]]
    if not ctx.eager.prevents_merging or not any(map(_is_constant, operands)):
        return function
    if not any(isinstance(item, Node) and item.target in ops and any(map(_is_constant, map(producer, item.args[:2]))) for item in operands):
        return function
    if not dtypes.is_inexact(ctx.output.jax_dtype):
        return function
    # The barrier hides the number from XLA's simplification. XLA:CPU still fuses the ops before the barrier with those after it.
    is_first = _is_constant(operands[0])
    return lambda a, b: function(lax.optimization_barrier(a), b) if is_first else function(a, lax.optimization_barrier(b))


def _is_constant(value: Any) -> bool:
    """True for a number, a filled tensor or a constant of the graph, but not for a dynamic scalar."""
    if isinstance(value, Node):
        return value.op == "get_attr" or value.target in _FILL_VALUE_POSITION
    return isinstance(value, (int, float, complex)) and not is_dynamic(value) and not is_symbolic(value)


def plus_zero(x: Array) -> Array:
    """Returns x + 0.0, which turns -0.0 into 0.0. The function uses a select, because XLA would remove the addition of a constant zero."""
    if dtypes.is_complex(x.dtype):
        return lax.complex(plus_zero(lax.real(x)), plus_zero(lax.imag(x)))
    if not dtypes.is_float(x.dtype):
        return x
    return lax.select(lax.eq(x, number(0, x.dtype)), full_like(x, 0), x)


def _is_zero(value: Any, sign: int = 1) -> bool:
    """True for a Python number that is a zero of this sign. False for dynamic scalars and symbolic numbers: they are no constants."""
    is_number = isinstance(value, (int, float)) and not is_dynamic(value) and not is_symbolic(value)
    return is_number and value == 0 and math.copysign(1, value) == sign


# By op that fills a tensor with one number: the position of the number among the op's arguments.
_FILL_VALUE_POSITION = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2, aten.scalar_tensor.default: 0}


def _is_tensor_of_zeros(node: Any) -> bool:
    """True for a node whose value XLA knows to be 0.0: a filled tensor or a constant of the graph, possibly viewed, copied or cast."""
    while isinstance(node, Node) and node.op == "call_function":
        op: Any = node.target
        if op in _FILL_VALUE_POSITION:
            return _is_zero(node.args[_FILL_VALUE_POSITION[op]])
        if op in ZEROS:
            return True
        if not (op in _COPIES or (getattr(op, "is_view", False) and op is not aten._neg_view.default)):
            return False
        node = node.args[0]
    if not isinstance(node, Node) or node.op != "get_attr" or node.graph.owning_module is None:
        return False
    constant = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(constant, torch.Tensor) or constant.numel() > _MAX_INSPECTED_ELEMENTS or not constant.is_floating_point():
        return False
    with _disable_current_modes():
        return not bool(constant.ne(0).any()) and not bool(constant.signbit().any())


_COPIES = frozenset([aten._to_copy.default, aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default])
# Constants with more elements are not inspected.
_MAX_INSPECTED_ELEMENTS = 1000


@lowers(aten.add.Tensor)
def add_tensor(x: Any, y: Any, *, alpha: Any = 1, ctx: Context) -> Array:
    fused_sum = sum_of_slice_gradients(ctx)
    if fused_sum is not None:
        return fused_sum
    first, second = ctx.node.args[:2] if len(ctx.node.args) > 1 else (None, None)
    zeros = _is_tensor_of_zeros(first), _is_tensor_of_zeros(second)
    return add(x, y, alpha=alpha, zeros=zeros, function=_unmerged(_add, ctx, _SUMS))


def add(x: Any, y: Any, *, alpha: Any = 1, zeros: tuple[bool, bool] = (False, False), function: Function = _add) -> Array:
    """Returns x + alpha * y.

    Args:
        x: the first summand, a tensor or a number.
        y: the second summand, a tensor or a number.
        alpha: the factor of y.
        zeros: for x and for y, True if the summand is a tensor of constant zeros.
        function: adds two arrays.
    """
    is_nonnegative_finite = isinstance(alpha, (int, float)) and not is_dynamic(alpha) and 0 <= alpha < math.inf  # inf * 0 is NaN
    if is_nonnegative_finite and (zeros[1] or _is_zero(y)):
        return elementwise(lambda a, b: plus_zero(a), (x, y), Promotion.DEFAULT)
    if zeros[0] or _is_zero(x):
        return elementwise(lambda a, b: plus_zero(_scale(b, alpha)), (x, y), Promotion.DEFAULT)
    return elementwise(lambda a, b: function(a, _scale(b, alpha)), (x, y), Promotion.DEFAULT)


@lowers(aten.add.Scalar)
def add_scalar(x: Array, y: Any, alpha: Any = 1, *, ctx: Context) -> Array:
    return add(x, y, alpha=alpha, function=_unmerged(_add, ctx, _SUMS))


def sub(x: Any, y: Any, *, alpha: Any = 1, function: Function = lax.sub) -> Array:
    """Returns x - alpha * y. `function` subtracts two arrays."""
    # x - (-0.0) is x + 0.0.
    if _is_zero(y, -1) and _is_zero(alpha - 1):
        return elementwise(lambda a, b: plus_zero(a), (x, y), Promotion.DEFAULT)
    return elementwise(lambda a, b: function(a, _scale(b, alpha)), (x, y), Promotion.DEFAULT)


@lowers(aten.sub.Tensor)
def sub_tensor(x: Any, y: Any, *, alpha: Any = 1, ctx: Context) -> Array:
    return sub(x, y, alpha=alpha, function=_unmerged(lax.sub, ctx, _SUMS))


@lowers(aten.sub.Scalar)
def sub_scalar(x: Array, y: Any, alpha: Any = 1, *, ctx: Context) -> Array:
    return sub_tensor(x, y, alpha=alpha, ctx=ctx)


@lowers(aten.rsub.Scalar)
def rsub_scalar(x: Array, y: Any, alpha: Any = 1, *, ctx: Context) -> Array:
    return rsub(x, y, alpha=alpha, ctx=ctx)


@lowers(aten.rsub.Tensor)
def rsub(x: Any, y: Any, *, alpha: Any = 1, ctx: Context) -> Array:
    subtract = _unmerged(lambda a, b: lax.sub(b, a), ctx, _SUMS)
    return sub(y, x, alpha=alpha, function=lambda a, b: subtract(b, a))


@lowers(aten.addcmul.default)
def addcmul(x: Array, y: Array, z: Array, *, value: Any = 1) -> Array:
    """x + value * y * z.

    Shape:  that of x, y and z, broadcast.
    """
    return elementwise(lambda a, b, c: lax.add(a, lax.mul(_scale(b, value), c)), (x, y, z), Promotion.DEFAULT)


@lowers(aten.addr.default)
def addr(x: Array, y: Array, z: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    """beta * x + alpha * the outer product of the vectors y and z.

    Shape:  y (n), z (m) give (n, m), to which x is broadcast.
    Source: ATen native/cpu/LinearAlgebraKernel.cpp, addr_kernel: with beta = 0, x is not read, so that NaNs in x do not propagate.
    """

    def outer_product(x: Array, y: Array, z: Array) -> Array:
        product = _multiply(_scale(y, alpha), z)
        return product if beta == 0 else _add(_scale(x, beta), product)

    return elementwise(outer_product, (x, y[:, None], z), Promotion.DEFAULT)


@lowers(aten.addcdiv.default)
def addcdiv(x: Array, y: Array, z: Array, *, value: Any = 1) -> Array:
    """x + value * y / z.

    Shape:  that of x, y and z, broadcast.
    """
    return elementwise(lambda a, b, c: lax.add(a, lax.div(_scale(b, value), c)), (x, y, z), Promotion.DEFAULT)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(start: Array, end: Array, weight: Any) -> Array:
    """start + weight * (end - start), computed from the nearer end, so that weights 0 and 1 give start and end exactly.

    Shape:  that of all tensors, broadcast.
    Source: ATen native/Lerp.h
    """

    def from_nearer(a: Array, b: Array, w: Array) -> Array:
        span = lax.sub(b, a)
        is_near_start = lax.lt(lax.abs(w), number(0.5, dtypes.real(w.dtype)))
        from_end = lax.sub(b, lax.mul(span, lax.sub(number(1, w.dtype), w)))
        return lax.select(is_near_start, lax.add(a, lax.mul(w, span)), from_end)

    if isinstance(weight, Array):
        return elementwise(from_nearer, (start, end, weight), Promotion.DEFAULT)
    if abs(weight) < 0.5:
        return elementwise(lambda a, b: lax.add(a, lax.mul(number(weight, a.dtype), lax.sub(b, a))), (start, end), Promotion.DEFAULT)
    return elementwise(lambda a, b: lax.sub(b, lax.mul(lax.sub(b, a), number(1 - weight, a.dtype))), (start, end), Promotion.DEFAULT)


# Powers


def _integer_power(base: Array, exponent: Array) -> Array:
    """Returns base ** exponent by squaring; overflow wraps around. Negative exponents give 0 unless base is 1 or -1.

    Source: ATen native/Pow.h, powi
    """
    zero, one = number(0, base.dtype), number(1, base.dtype)

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        power, square, bits = state
        is_odd = lax.eq(lax.bitwise_and(bits, one), one)
        return lax.select(is_odd, lax.mul(power, square), power), lax.mul(square, square), lax.shift_right_logical(bits, one)

    def has_bits_left(state: tuple[Array, Array, Array]) -> Array:
        return lax.gt(lax.reduce_max(state[2], range(base.ndim)), zero)

    magnitude = exponent if np.issubdtype(base.dtype, np.unsignedinteger) else lax.abs(exponent)
    power = lax.while_loop(has_bits_left, step, (full_like(base, 1), base, magnitude))[0] if base.size else base
    if magnitude is exponent:
        return power
    # 1 and -1 are their own inverses: (-1) ** -3 equals (-1) ** 3.
    is_unit = lax.eq(lax.abs(base), one)
    return lax.select(lax.bitwise_and(lax.lt(exponent, zero), lax.bitwise_not(is_unit)), full_like(base, 0), power)


def _power(base: Array, exponent: Array) -> Array:
    if dtypes.is_bool(base.dtype):
        return lax.bitwise_or(base, lax.bitwise_not(exponent))
    return _integer_power(base, exponent) if dtypes.is_integer(base.dtype) else lax.pow(base, exponent)


# Exponents for which ATen multiplies or takes roots instead of calling pow: (-inf) ** 0.5 is nan, not inf.
# Source: ATen native/cpu/PowKernel.cpp, pow_tensor_optimized_scalar_kernel
_POWERS: dict[float, Function] = {
    1: lambda x: x,
    2: lax.square,
    3: lambda x: lax.mul(lax.square(x), x),
    0.5: lax.sqrt,
    -0.5: lax.rsqrt,
    -1: lambda x: _reciprocal(x),
    -2: lambda x: _reciprocal(lax.square(x)),
}


@lowers(aten.pow.Tensor_Scalar)
def pow_tensor_scalar(base: Array, exponent: Any) -> Array:
    """base ** exponent.

    Dtype:  promoted from base and exponent; an integer base with a float exponent gives the default float.
    """
    common = result_type((base, exponent))
    if exponent == 0:
        return lax.full(base.shape, number(1, common))
    if dtypes.is_integer(common) and exponent > 0:
        return lax.integer_pow(convert(base, common), exponent)
    power = next((function for special_exponent, function in _POWERS.items() if exponent == special_exponent), None)
    if power is not None and dtypes.is_inexact(common):
        return elementwise(power, (convert(base, common),), Promotion.DEFAULT)
    return elementwise(_power, (base, exponent), Promotion.DEFAULT)


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(base: Any, exponent: Array) -> Array:
    return elementwise(_power, (base, exponent), Promotion.DEFAULT)


@functools.cache
def _ldexp_is_exact() -> bool:
    """True if the installed torch's ldexp changes the exponent (2.13 and later) instead of multiplying by a power that may overflow."""
    return bool(torch.ldexp(torch.tensor([2.0**-100]), torch.tensor([200])).isfinite())


def _move_exponent(x: Array, exponent: Array) -> Array:
    """Returns x * 2 ** exponent, multiplied in steps so that no factor overflows.

    Args:
        x: float32 or float64.
        exponent: integers, of x's shape. They are cast to int32, C's int.
    """
    info = np.finfo(x.dtype)
    limit = np.int32(2 * (info.maxexp + info.nmant))
    remaining = lax.clamp(-limit, convert(exponent, np.dtype(np.int32)), limit)
    for steps_left in (4, 3, 2, 1):
        step = lax.div(remaining, full_like(remaining, steps_left))
        x, remaining = lax.mul(x, power_of_two(step, np.dtype(x.dtype))), lax.sub(remaining, step)
    return x


@lowers(aten.ldexp.Tensor)
def ldexp(x: Array, exponent: Array) -> Array:
    """x * 2 ** exponent.

    Shape:  that of x and the exponent, broadcast.
    Dtype:  that of a float x with integer exponents; else promoted with the default float.
    """
    if dtypes.is_float(x.dtype) and dtypes.is_integer(exponent.dtype) and _ldexp_is_exact():
        return convert(_move_exponent(*broadcast([to_accumulator(x), exponent])), x.dtype)
    return mul(x, pow_tensor(2.0, exponent))


@lowers(aten.float_power.Tensor_Tensor, aten.float_power.Tensor_Scalar, aten.float_power.Scalar)
def float_power(base: Any, exponent: Any) -> Array:
    """base ** exponent, computed in float64 or complex128.

    Dtype:  float64, or complex128 if base or exponent is complex.
    """
    compute_dtype = np.complex128 if dtypes.is_complex(result_type((base, exponent))) else np.float64
    return _power(*broadcast([convert(base, np.dtype(compute_dtype)), convert(exponent, np.dtype(compute_dtype))]))


def _reciprocal(x: Array) -> Array:
    return lax.div(full_like(x, 1), x)


def _shift_right(x: Array, bits: Array) -> Array:
    """Returns x shifted right: arithmetically, or logically if unsigned. A negative or too large shift leaves copies of the sign, or 0."""
    return (lax.shift_right_logical if np.issubdtype(x.dtype, np.unsignedinteger) else lax.shift_right_arithmetic)(x, bits)


# Signs and rounding


def _absolute(x: Array) -> Array:
    return x if dtypes.is_bool(x.dtype) or np.issubdtype(x.dtype, np.unsignedinteger) else lax.abs(x)


def sign(x: Array) -> Array:
    """-1, 0 or 1; x / |x| for complex x. The sign of nan is 0, the sign of -0.0 is 0.0."""
    if dtypes.is_bool(x.dtype):
        return x
    if dtypes.is_complex(x.dtype):
        return lax.sign(x)
    if dtypes.is_float(x.dtype):  # XLA's sign of -0.0 is -0.0
        return lax.select(lax.gt(lax.abs(x), number(0, x.dtype)), lax.sign(x), full_like(x, 0))
    return lax.sign(x)


def _floats_only(function: Function) -> Function:
    """Returns `function` for floats; integers are returned unchanged."""
    return lambda x: function(x) if dtypes.is_float(x.dtype) else x


@lowers(aten.round.decimals)
def round_decimals(x: Array, *, decimals: int, ctx: Context) -> Array:
    """x rounded to `decimals` decimal places; if `decimals` is negative, to tens, hundreds and so on.

    Shape:  that of x.
    Dtype:  that of x.
    Source: ATen native/cpu/UnaryOpsKernel.cpp, round_decimals_kernel
    """
    if decimals == 0 or not dtypes.is_float(x.dtype):
        return _floats_only(round_half_to_even)(x)

    def function(x: Array) -> Array:
        ten = full_like(x, 10 ** abs(decimals))
        if ctx.eager.prevents_merging:
            ten = lax.optimization_barrier(ten)  # else XLA merges `ten` with a constant factor of x
        if decimals < 0:
            return lax.mul(round_half_to_even(lax.div(x, ten)), ten)
        return lax.div(round_half_to_even(lax.mul(x, ten)), ten)

    return elementwise(function, (x,), Promotion.DEFAULT)


# Exponentials, logarithms and angles


def _exp2(x: Array) -> Array:
    if dtypes.is_complex(x.dtype):
        return lax.exp(_scale(x, math.log(2)))
    # XLA computes exp2 as exp(x log 2), which is not exact for integer x.
    return lax.pow(full_like(x, 2), x)


def _log2(x: Array) -> Array:
    """Returns the binary logarithm. It is exact for powers of two, because the exponent is read from the bits of x."""
    if dtypes.is_complex(x.dtype):
        return _scale(lax.log(x), 1 / math.log(2))
    mantissa, exponent = frexp(x)
    is_small = lax.lt(mantissa, number(math.sqrt(0.5), x.dtype))
    mantissa = lax.select(is_small, lax.add(mantissa, mantissa), mantissa)
    integer_part = lax.sub(convert(exponent, np.dtype(x.dtype)), convert(is_small, np.dtype(x.dtype)))
    out = lax.add(integer_part, _scale(lax.log(mantissa), 1 / math.log(2)))
    is_positive_finite = lax.bitwise_and(lax.gt(x, number(0, x.dtype)), lax.lt(x, number(np.inf, x.dtype)))
    return lax.select(is_positive_finite, out, lax.log(x))


# The exponents of the powers of ten that are normal numbers of float64.
_POWERS_OF_TEN = range(-307, 309)


def _log10(x: Array) -> Array:
    if np.dtype(x.dtype) == np.float32:
        # The float64 result is exact for powers of ten (below), and so is its cast.
        return convert(_log10(convert(x, np.dtype(np.float64))), np.dtype(np.float32))
    out = _scale(lax.log(x), 1 / math.log(10))
    if dtypes.is_complex(x.dtype):
        return out
    # The product `out` is not exact for powers of ten, so the nearest integer replaces it there.
    nearest = lax.clamp(np.float64(_POWERS_OF_TEN[0]), lax.round(out), np.float64(_POWERS_OF_TEN[-1]))
    index = convert(lax.sub(nearest, full_like(nearest, _POWERS_OF_TEN[0])), np.dtype(np.int32))
    power = jnp.take(np.array([float(f"1e{exponent}") for exponent in _POWERS_OF_TEN]), index, mode="clip")
    return lax.select(lax.eq(x, power), nearest, out)


def _log_add_exp(x: Array, y: Array) -> Array:
    """Returns log(exp(x) + exp(y)) without overflow of intermediate results.

    Source: for complex numbers, ATen native/cpu/LogAddExp.h, _log_add_exp_helper
    """
    if not dtypes.is_complex(x.dtype):
        return jnp.logaddexp(x, y)
    # jnp.logaddexp wraps the imaginary part of complex numbers to [-pi, pi]; ATen does not.
    swapped = lax.lt(lax.real(x), lax.real(y))
    larger, smaller = lax.select(swapped, y, x), lax.select(swapped, x, y)
    real = lax.real(smaller)
    is_equal_nonfinite = lax.bitwise_and(lax.bitwise_not(lax.is_finite(real)), lax.eq(real, lax.real(larger)))
    nonfinite = lax.select(lax.lt(real, number(0, real.dtype)), smaller, lax.log(lax.add(lax.exp(smaller), lax.exp(larger))))
    return lax.select(is_equal_nonfinite, nonfinite, lax.add(larger, lax.log1p(lax.exp(lax.sub(smaller, larger)))))


@lowers(aten.angle.default)
def angle(x: Array) -> Array:
    """The angle of complex numbers; 0 or pi for real numbers, nan for nan.

    Shape:  that of x.
    Dtype:  that of x; the real dtype for complex x, the default float for bool and integers.
    """

    def function(x: Array) -> Array:
        if dtypes.is_complex(x.dtype):
            return lax.atan2(lax.imag(x), lax.real(x))
        out = lax.select(lax.lt(x, number(0, x.dtype)), full_like(x, math.pi), full_like(x, 0))
        return lax.select(is_nan(x), x, out)

    inexact = x if dtypes.is_inexact(x.dtype) else convert(x, dtypes.default_float())
    return elementwise(function, (inexact,), Promotion.COMPLEX_TO_FLOAT)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul_tensor(x: Any, y: Any, *, ctx: Context) -> Array:
    return elementwise(_unmerged(_multiply, ctx, _PRODUCTS), (x, y), Promotion.DEFAULT, wide_second=True)


def mul(x: Any, y: Any) -> Array:
    return elementwise(_multiply, (x, y), Promotion.DEFAULT, wide_second=True)


# These ops are exact in every dtype, so they do not compute half types in float32.
lower_table(
    {
        aten.neg.default: lax.neg,
        aten.positive.default: lambda x: x,
        aten.sign.default: sign,
        aten.sgn.default: sign,
        aten.floor.default: _floats_only(lax.floor),
        aten.ceil.default: _floats_only(lax.ceil),
        aten.trunc.default: _floats_only(truncate),
        aten.round.default: _floats_only(round_half_to_even),
        aten.frac.default: lambda x: lax.sub(x, truncate(x)),
        aten.bitwise_and.Tensor: lax.bitwise_and,
        aten.bitwise_and.Scalar: lax.bitwise_and,
        aten.bitwise_and.Scalar_Tensor: lax.bitwise_and,
        aten.bitwise_or.Tensor: lax.bitwise_or,
        aten.bitwise_or.Scalar: lax.bitwise_or,
        aten.bitwise_or.Scalar_Tensor: lax.bitwise_or,
        aten.bitwise_xor.Tensor: lax.bitwise_xor,
        aten.bitwise_xor.Scalar: lax.bitwise_xor,
        aten.bitwise_xor.Scalar_Tensor: lax.bitwise_xor,
        aten.bitwise_not.default: lax.bitwise_not,
        aten.bitwise_left_shift.Tensor: lax.shift_left,
        aten.bitwise_left_shift.Tensor_Scalar: lax.shift_left,
        aten.bitwise_left_shift.Scalar_Tensor: lax.shift_left,
        aten.__lshift__.Tensor: lax.shift_left,
        aten.__lshift__.Scalar: lax.shift_left,
        aten.bitwise_right_shift.Tensor: _shift_right,
        aten.bitwise_right_shift.Tensor_Scalar: _shift_right,
        aten.bitwise_right_shift.Scalar_Tensor: _shift_right,
        aten.__rshift__.Tensor: _shift_right,
        aten.__rshift__.Scalar: _shift_right,
    },
    promote=Promotion.NO_OPMATH,
)

lower_table({aten.abs.default: _absolute}, promote=Promotion.COMPLEX_TO_FLOAT)

# XLA replaces sqrt(x * x) by |x| and log(x ** y) by y * log|x|: overflows, underflows and NaNs of the operand would be lost.
_POWERS_AND_PRODUCTS = frozenset(
    [aten.mul.Tensor, aten.square.default, aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar, aten.float_power.Tensor_Scalar]
)


def _of_exact_operand(function: Function, ctx: Context) -> Function:
    """Returns `function` with a barrier, if necessary, that keeps XLA from simplifying it together with the op of its operand."""
    item = producer(ctx.node.args[0])
    is_power = isinstance(item, Node) and item.target in _POWERS_AND_PRODUCTS
    return (lambda x: function(lax.optimization_barrier(x))) if ctx.eager.prevents_merging and is_power else function


@lowers(aten.sqrt.default)
def sqrt(x: Array, *, ctx: Context) -> Array:
    """The square root; NaN for negative numbers.

    Dtype:  that of x; the default float for bool and integers.
    """
    return elementwise(_of_exact_operand(lax.sqrt, ctx), (x,), Promotion.INT_TO_FLOAT)


@lowers(aten.log.default)
def log(x: Array, *, ctx: Context) -> Array:
    """The natural logarithm; NaN for negative numbers.

    Dtype:  that of x; the default float for bool and integers.
    """
    return elementwise(_of_exact_operand(lax.log, ctx), (x,), Promotion.INT_TO_FLOAT)


lower_table(
    {
        aten.rsqrt.default: lax.rsqrt,
        aten.exp.default: exp,
        aten.exp2.default: _exp2,
        aten.expm1.default: lax.expm1,
        aten.log1p.default: lax.log1p,
        aten.log2.default: _log2,
        aten.log10.default: _log10,
        aten.sin.default: lax.sin,
        aten.cos.default: lax.cos,
        aten.tan.default: lax.tan,
        aten.asin.default: lax.asin,
        aten.acos.default: lax.acos,
        aten.atan.default: lax.atan,
        aten.sinh.default: lax.sinh,
        aten.cosh.default: lax.cosh,
        aten.asinh.default: lax.asinh,
        aten.acosh.default: lax.acosh,
        aten.atanh.default: lax.atanh,
        aten.atan2.default: lax.atan2,
        aten.hypot.default: jnp.hypot,
        aten.copysign.Tensor: copysign,
        aten.copysign.Scalar: copysign,
        aten.logaddexp.default: _log_add_exp,
        aten.logaddexp2.default: jnp.logaddexp2,
        aten.xlogy.Tensor: jax.scipy.special.xlogy,
        aten.xlogy.Scalar_Other: jax.scipy.special.xlogy,
        aten.xlogy.Scalar_Self: jax.scipy.special.xlogy,
        aten.sinc.default: jnp.sinc,
        aten.erf.default: lax.erf,
        aten.erfc.default: lax.erfc,
    },
    promote=Promotion.INT_TO_FLOAT,
)
