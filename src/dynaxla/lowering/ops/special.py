"""The functions of mathematical tables, and integer arithmetic that is not elementary: gamma, Bessel and error functions, gcd."""

from __future__ import annotations

import math

import jax
import numpy as np
import torch
from jax import lax

from .. import dtypes
from ..promotion import Promotion, convert, elementwise, full_like, number
from ..registry import lower_table, lowers

aten = torch.ops.aten
Array = jax.Array


def lgamma(x: Array) -> Array:
    """log |gamma(x)|; infinite at both infinities and at the whole numbers from 0 down."""
    return lax.lgamma(x)


def digamma(x: Array) -> Array:
    """Source: ATen native/Math.h, calc_digamma: at zero an infinity of the opposite sign, nan at the negative whole numbers."""
    is_zero = lax.eq(x, number(0, x.dtype))
    pole = lax.bitwise_and(lax.lt(x, number(0, x.dtype)), lax.eq(x, lax.floor(x)))
    at_zero = lax.neg(lax.div(full_like(x, 1), x))
    return lax.select(is_zero, at_zero, lax.select(pole, full_like(x, math.nan), lax.digamma(x)))


def _erf_inverse(x: Array) -> Array:
    outside = lax.gt(lax.abs(x), number(1, x.dtype))
    return lax.select(outside, full_like(x, math.nan), lax.erf_inv(x))


def _bessel_i0(x: Array) -> Array:
    return lax.mul(lax.exp(lax.abs(x)), lax.bessel_i0e(x))


def _bessel_i1(x: Array) -> Array:
    return lax.mul(lax.exp(lax.abs(x)), lax.bessel_i1e(x))


def _igamma(a: Array, x: Array) -> Array:
    """The lower regularised incomplete gamma function."""
    return lax.igamma(a, x)


def _igammac(a: Array, x: Array) -> Array:
    return lax.igammac(a, x)


def _heaviside(x: Array, at_zero: Array) -> Array:
    """0 below zero, 1 above, `at_zero` there; 0 for nan, as in ATen."""
    zero = number(0, x.dtype)
    above = convert(lax.gt(x, zero), np.dtype(x.dtype))
    return lax.select(lax.eq(x, zero), at_zero, above)


def gcd(x: Array, y: Array) -> Array:
    """The greatest common divisor, by Euclid's algorithm; that of 0 and 0 is 0."""
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
    """The least common multiple; 0 where either is 0. Source: ATen native/cpu/BinaryOpsKernel.cpp, lcm_kernel."""
    divisor = gcd(x, y)
    divisor = lax.select(lax.eq(divisor, number(0, x.dtype)), full_like(x, 1), divisor)
    out = lax.mul(lax.div(x, divisor), y)
    return out if np.issubdtype(x.dtype, np.unsignedinteger) else lax.abs(out)


lower_table(
    {
        aten.lgamma.default: lgamma,
        aten.digamma.default: digamma,
        aten.erfinv.default: _erf_inverse,
        aten.i0.default: _bessel_i0,
        aten.special_i0e.default: lax.bessel_i0e,
        aten.special_i1.default: _bessel_i1,
        aten.special_i1e.default: lax.bessel_i1e,
        aten.special_zeta.default: lax.zeta,
        aten.special_zeta.other_scalar: lax.zeta,
        aten.special_zeta.self_scalar: lax.zeta,
        aten.special_ndtri.default: jax.scipy.special.ndtri,
        aten.special_log_ndtr.default: jax.scipy.special.log_ndtr,
        aten.igamma.default: _igamma,
        aten.igammac.default: _igammac,
    },
    promote=Promotion.INT_TO_FLOAT,
)

lower_table(
    {
        aten.gcd.default: gcd,
        aten.lcm.default: lcm,
        aten.heaviside.default: _heaviside,
        aten.nextafter.default: lax.nextafter,
    },
    promote=Promotion.NO_OPMATH,
)


@lowers(aten.polygamma.default)
def polygamma(order: int, x: Array) -> Array:
    """The derivative of that order of digamma. Source: ATen native/cpu/UnaryOpsKernel.cpp, polygamma_kernel."""
    if order == 0:
        return elementwise(digamma, (x,), Promotion.INT_TO_FLOAT)

    def function(x: Array) -> Array:
        factor = (-1.0) ** (order + 1) * math.factorial(order)
        return lax.mul(lax.zeta(full_like(x, order + 1), x), number(factor, x.dtype))

    return elementwise(function, (x,), Promotion.INT_TO_FLOAT)


@lowers(aten.frexp.Tensor)
def frexp(x: Array) -> tuple[Array, Array]:
    """Mantissas in [0.5, 1) and int32 exponents; 0, infinities and nan keep their value, with exponent 0."""
    wide = convert(x, dtypes.accumulator(x.dtype))
    mantissa, exponent = jax.numpy.frexp(wide)
    special = lax.bitwise_or(lax.eq(wide, number(0, wide.dtype)), lax.bitwise_not(lax.is_finite(wide)))
    mantissa = lax.select(special, wide, mantissa)
    exponent = convert(exponent, np.dtype(np.int32))
    return convert(mantissa, np.dtype(x.dtype)), lax.select(special, full_like(exponent, 0), exponent)
