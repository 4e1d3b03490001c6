"""Functions of the bits of floats: exponents, signs, neighbours, and bits as another dtype.

JAX's own functions read a float64 as a signed integer, which XLA's compiler for TPUs refuses: "Binary op and with different element types:
s32[8] and u32[8]" (libtpu 0.0.42). The functions here read a float64 as an unsigned integer.
"""

from __future__ import annotations

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from .. import dtypes
from ..dtypes import DType
from ..promotion import convert, full_like, number

_FLOAT64, _UINT64 = np.dtype(np.float64), np.dtype(np.uint64)
_MANTISSA_BITS, _EXPONENT_MASK, _BIAS = 52, 2047, 1023


def bitcast(x: Array, dtype: DType) -> Array:
    """Returns the bits of x as another dtype, as `lax.bitcast_convert_type` does."""
    if x.dtype == _FLOAT64 and dtype == np.int64:
        x = lax.bitcast_convert_type(x, _UINT64)
    return lax.bitcast_convert_type(x, dtype)


def signbit(x: Array) -> Array:
    """True where x is negative, including -0.0 and negative nans."""
    if dtypes.is_float(x.dtype):
        x = bitcast(x, np.dtype(f"int{x.dtype.itemsize * 8}"))
    elif dtypes.is_bool(x.dtype):
        return full_like(x, False)
    return lax.lt(x, number(0, x.dtype))


def frexp(x: Array) -> tuple[Array, Array]:
    """Returns the mantissas, with an absolute value in [0.5, 1), and the exponents of 2 of a float array.

    For 0, infinities and nan the mantissa is x and the exponent 0.

    Dtype:  that of x; int32.
    """
    if x.dtype != _FLOAT64:
        mantissa, exponent = jnp.frexp(x)
        return mantissa, convert(exponent, np.dtype(np.int32))
    is_subnormal = lax.lt(lax.abs(x), full_like(x, np.finfo(np.float64).smallest_normal))
    normal = lax.select(is_subnormal, lax.mul(x, full_like(x, 2.0**_MANTISSA_BITS)), x)
    bits = lax.bitcast_convert_type(normal, _UINT64)
    biased = lax.bitwise_and(lax.shift_right_logical(bits, full_like(bits, _MANTISSA_BITS)), full_like(bits, _EXPONENT_MASK))
    exponent = lax.sub(convert(biased, np.dtype(np.int32)), np.int32(_BIAS - 1))
    exponent = lax.select(is_subnormal, lax.sub(exponent, np.int32(_MANTISSA_BITS)), exponent)
    without_exponent = lax.bitwise_and(bits, full_like(bits, ~(_EXPONENT_MASK << _MANTISSA_BITS) & (2**64 - 1)))
    mantissa = lax.bitcast_convert_type(lax.bitwise_or(without_exponent, full_like(bits, (_BIAS - 1) << _MANTISSA_BITS)), _FLOAT64)
    is_special = lax.bitwise_or(lax.eq(x, number(0, x.dtype)), lax.bitwise_not(lax.is_finite(x)))
    return lax.select(is_special, x, mantissa), lax.select(is_special, full_like(exponent, 0), exponent)


def power_of_two(exponent: Array, dtype: DType) -> Array:
    """Returns 2 ** exponent.

    Args:
        exponent: integers for which the results are normal numbers.
        dtype: float32 or float64.
    """
    info = np.finfo(dtype)
    integer_dtype = np.dtype(f"int{info.bits}")
    biased = lax.add(convert(exponent, integer_dtype), np.array(info.maxexp - 1, integer_dtype))
    return lax.bitcast_convert_type(lax.shift_left(biased, full_like(biased, info.nmant)), dtype)


def copysign(x: Array, y: Array) -> Array:
    """Returns the absolute values of x with the signs of y; both are floats of one dtype and shape."""
    if x.dtype != _FLOAT64:
        return jnp.copysign(x, y)
    return lax.select(lax.eq(signbit(x), signbit(y)), x, lax.neg(x))


def nextafter(x: Array, y: Array) -> Array:
    """Returns the next floats after x in the direction of y; both are floats of one dtype and shape."""
    if x.dtype != _FLOAT64:
        return lax.nextafter(x, y)
    # As in XLA's expansion of its own operation. Bits are compared, because comparisons of floats might take subnormal numbers for zeros.
    x_bits, y_bits = (lax.bitcast_convert_type(value, _UINT64) for value in (x, y))
    one, sign = full_like(x_bits, 1), full_like(x_bits, 1 << 63)
    x_size, y_size = (lax.bitwise_and(bits, lax.bitwise_not(sign)) for bits in (x_bits, y_bits))
    y_sign = lax.bitwise_and(y_bits, sign)
    is_smaller = lax.bitwise_or(lax.gt(x_size, y_size), lax.ne(lax.bitwise_and(x_bits, sign), y_sign))
    moved = lax.select(is_smaller, lax.sub(x_bits, one), lax.add(x_bits, one))
    x_is_zero = lax.eq(x_size, full_like(x_size, 0))
    moved = lax.select(x_is_zero, lax.bitwise_or(y_sign, one), moved)
    is_equal = lax.bitwise_or(lax.eq(x_bits, y_bits), lax.bitwise_and(x_is_zero, lax.eq(y_size, full_like(y_size, 0))))
    result = lax.bitcast_convert_type(lax.select(is_equal, y_bits, moved), _FLOAT64)
    return lax.select(lax.bitwise_or(lax.ne(x, x), lax.ne(y, y)), lax.add(x, y), result)
