"""Lowerings of special functions (gamma, error and zeta functions) and of gcd and lcm.

Bessel functions are in bessel.py, orthogonal polynomials in polynomials.py. JAX's function is used wherever it agrees with ATen's. Comments
say where a function of JAX differs, as measured with JAX 0.10.2.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from ..promotion import Promotion, convert, elementwise, full_like, number, to_accumulator
from ..registry import lower_table, lowers
from . import float_bits
from .bessel import chebyshev_series


def digamma(x: Array) -> Array:
    """The derivative of log gamma(x): nan at negative integers, and at a zero the infinity of the opposite sign, where JAX returns nan.

    Source: ATen native/Math.h, calc_digamma
    """
    is_zero = lax.eq(x, number(0, x.dtype))
    return lax.select(is_zero, lax.neg(lax.div(full_like(x, 1), x)), lax.digamma(x))


# jax.scipy.special.erfcx is exp(x**2) * erfc(x), which is 0 in float32 for x from 9.2 to 9.4 (instead of 0.06), as erfc underflows there.
# Coefficients, highest order first, of the Chebyshev series of (1 + 2 x) erfcx(x) in (x - 3.75) / (x + 3.75), for x from 0 to infinity.
_ERFCX = (
    -2.18734294430301767e-18,
    -2.23705665943599960e-18,
    5.06814890479611132e-17,
    7.41823525662404346e-17,
    -1.25079505306886471e-15,
    -1.86456288041931310e-15,
    3.34781194828680539e-14,
    3.25254814814873984e-14,
    -9.65469674843343891e-13,
    1.94558685457773472e-13,
    2.86879501093066990e-11,
    -6.31808834088668449e-11,
    -7.75440020883135111e-10,
    4.52195981121828690e-9,
    1.07649994656709104e-8,
    -2.18864010492343957e-7,
    7.74038306619849067e-7,
    4.13902798607301017e-6,
    -6.91697330250120637e-5,
    4.90775836525808632e-4,
    -2.41316354041760819e-3,
    9.07499767070526509e-3,
    -2.66586684353057523e-2,
    5.92099399981918905e-2,
    -8.42491333665179156e-2,
    -4.59005458064647733e-3,
    2.35515786913480351e0,
)


def _erfcx(x: Array) -> Array:
    """Returns exp(x**2) times the complementary error function.

    Source: M. M. Shepherd, J. G. Laframboise, Chebyshev approximation of (1+2x)exp(x**2)erfc(x) in 0 <= x < infinity, Mathematics of
    Computation 36 (1981); the coefficients were recomputed with 60 digits.
    """
    absolute = lax.abs(x)
    argument = lax.sub(full_like(x, 2), lax.div(full_like(x, 15), lax.add(absolute, number(3.75, x.dtype))))
    for_positive = lax.div(chebyshev_series(argument, _ERFCX), lax.add(lax.add(absolute, absolute), number(1, x.dtype)))
    for_negative = lax.sub(lax.mul(full_like(x, 2), lax.exp(lax.mul(x, x))), for_positive)
    return lax.select(lax.lt(x, number(0, x.dtype)), for_negative, for_positive)


def _log_ndtr(x: Array) -> Array:
    """Returns the logarithm of the standard normal distribution's cumulative distribution function.

    Source: ATen native/Math.h, calc_log_ndtr
    """
    # jax.scipy.special.log_ndtr takes the logarithm of the rounded function: at 5 it is off by 4% in float32, at 8 by 7% in float64.
    scaled = lax.mul(x, number(math.sqrt(0.5), x.dtype))
    half = number(0.5, x.dtype)
    for_small = lax.sub(lax.log(lax.mul(_erfcx(lax.neg(scaled)), half)), lax.mul(scaled, scaled))
    for_large = lax.log1p(lax.neg(lax.mul(lax.erfc(scaled), half)))
    return lax.select(lax.lt(x, number(-1, x.dtype)), for_small, for_large)


def _heaviside(x: Array, at_zero: Array) -> Array:
    """Returns 0 for negative x, 1 for positive x, `at_zero` for zero, and 0 for nan, where jnp.heaviside returns nan."""
    zero = number(0, x.dtype)
    above = convert(lax.gt(x, zero), np.dtype(x.dtype))
    return lax.select(lax.eq(x, zero), at_zero, above)


def gcd(x: Array, y: Array) -> Array:
    """The greatest common divisor, by Euclid's algorithm; gcd(0, 0) is 0."""
    # jnp.gcd never returns if one of the numbers is the lowest of a signed dtype, such as -128, whose absolute value overflows.
    if not np.issubdtype(x.dtype, np.unsignedinteger):
        x, y = lax.abs(x), lax.abs(y)
    zero, one = number(0, x.dtype), full_like(x, 1)

    def unfinished(state: tuple[Array, Array]) -> Array:
        return lax.reduce_or(lax.ne(state[1], zero), range(x.ndim))

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        a, b = state
        done = lax.eq(b, zero)
        return lax.select(done, a, b), lax.select(done, b, lax.rem(a, lax.select(done, one, b)))

    return lax.while_loop(unfinished, step, (x, y))[0]


def lcm(x: Array, y: Array) -> Array:
    """The least common multiple, which is 0 where x or y is 0.

    Source: ATen native/cpu/BinaryOpsKernel.cpp, lcm_kernel
    """
    # jnp.lcm calls jnp.gcd; it also keeps the sign after an overflow, where ATen takes the absolute value.
    dtype = np.dtype(x.dtype)
    if dtype.itemsize < 4:
        # C's integer promotion widens to int.
        x, y = convert(x, np.dtype(np.int32)), convert(y, np.dtype(np.int32))
    divisor = gcd(x, y)
    divisor = lax.select(lax.eq(divisor, number(0, x.dtype)), full_like(x, 1), divisor)
    return convert(lax.abs(lax.mul(lax.div(x, divisor), y)), dtype)


lower_table(
    {
        aten.lgamma.default: lax.lgamma,
        aten.digamma.default: digamma,
        aten.erfinv.default: lax.erf_inv,
        aten.special_erfcx.default: _erfcx,
        aten.special_ndtri.default: jax.scipy.special.ndtri,
        aten.special_log_ndtr.default: _log_ndtr,
        aten.igamma.default: lax.igamma,
        aten.igammac.default: lax.igammac,
    },
    promote=Promotion.INT_TO_FLOAT,
)

lower_table(
    {
        aten.gcd.default: gcd,
        aten.lcm.default: lcm,
        aten.heaviside.default: _heaviside,
        aten.nextafter.default: float_bits.nextafter,
    },
    promote=Promotion.NO_OPMATH,
)


def zeta(x: Array, q: Array) -> Array:
    """The Hurwitz zeta function: the sum of (q + k) ** -x over all integers k >= 0. For q < 0 it is defined for integral x only."""
    one, zero = number(1, x.dtype), number(0, x.dtype)
    # lax.zeta needs q > 0: it is nan at q = -1, and wrong below -8. For q < 0, the terms with a positive base q + k sum to
    # zeta(x, q - floor(q)). Up to the sign (-1) ** x, the terms with a negative base are the terms of zeta(x, ceil(q) - q) without those of
    # zeta(x, 1 - q).
    positive_terms, negative_terms = lax.zeta(x, lax.sub(q, lax.floor(q))), lax.zeta(x, lax.sub(lax.ceil(q), q))
    extra_terms = lax.zeta(x, lax.sub(one, q))
    is_even = lax.eq(lax.rem(x, number(2, x.dtype)), zero)
    below = lax.select(
        is_even,
        lax.sub(lax.add(positive_terms, negative_terms), extra_terms),
        lax.add(lax.sub(positive_terms, negative_terms), extra_terms),
    )
    below = lax.select(lax.eq(x, lax.floor(x)), below, full_like(x, math.nan))
    below = lax.select(lax.eq(q, lax.floor(q)), full_like(x, math.inf), below)
    out = lax.select(lax.le(q, zero), below, lax.zeta(x, q))
    out = lax.select(lax.lt(x, one), full_like(x, math.nan), out)
    return lax.select(lax.eq(x, one), full_like(x, math.inf), out)


def _trigamma(x: Array) -> Array:
    """Returns the derivative of digamma.

    Source: ATen native/Math.h, trigamma
    """
    # jax.scipy.special.polygamma(1, x) is wrong below -8 (-0.01 instead of 15.07 at -100.3) and 0 from 1e19 on in float32; at the poles it
    # is infinite, where ATen gives a large finite number.
    one = number(1, x.dtype)
    is_small = lax.lt(x, number(0.5, x.dtype))
    sine = lax.sin(lax.mul(x, number(math.pi, x.dtype)))
    reflection = lax.div(full_like(x, math.pi**2), lax.square(sine))
    x = lax.select(is_small, lax.sub(one, x), x)
    out = full_like(x, 0)
    for _ in range(6):
        out = lax.add(out, lax.div(full_like(x, 1), lax.square(x)))
        x = lax.add(x, one)
    inverse = lax.div(full_like(x, 1), x)
    square = lax.square(inverse)
    series = full_like(x, 1 / 42)
    for coefficient in (1 / 30, 1 / 6):
        series = lax.sub(number(coefficient, x.dtype), lax.mul(square, series))
    tail = lax.add(lax.add(one, lax.mul(inverse, number(0.5, x.dtype))), lax.mul(square, series))
    out = lax.add(out, lax.mul(tail, inverse))
    return lax.select(is_small, lax.sub(reflection, out), out)


lower_table(
    {aten.special_zeta.default: zeta, aten.special_zeta.other_scalar: zeta, aten.special_zeta.self_scalar: zeta},
    promote=Promotion.INT_TO_FLOAT,
)


@lowers(aten.polygamma.default)
def polygamma(order: int, x: Array) -> Array:
    """The derivative of digamma of the given order.

    Shape:  that of x.
    Dtype:  that of x; the default float for bool and integers.
    Source: ATen native/cpu/UnaryOpsKernel.cpp, polygamma_kernel
    """

    def by_zeta(x: Array) -> Array:
        factor = (-1.0) ** (order + 1) * (math.factorial(order) if order <= 170 else math.inf)
        return lax.mul(zeta(full_like(x, order + 1), x), number(factor, x.dtype))

    function = {0: digamma, 1: _trigamma}.get(order, by_zeta)
    return elementwise(function, (x,), Promotion.INT_TO_FLOAT)


@lowers(aten.frexp.Tensor)
def frexp(x: Array) -> tuple[Array, Array]:
    """Mantissas with an absolute value in [0.5, 1), and exponents of 2. For 0, infinities and nan the mantissa is x and the exponent 0.

    Shape:  both: that of x.
    Dtype:  that of x; int32.
    """
    wide = to_accumulator(x)
    mantissa, exponent = float_bits.frexp(wide)
    is_special = lax.bitwise_or(lax.eq(wide, number(0, wide.dtype)), lax.bitwise_not(lax.is_finite(wide)))
    mantissa = lax.select(is_special, wide, mantissa)
    return convert(mantissa, np.dtype(x.dtype)), lax.select(is_special, full_like(exponent, 0), exponent)
