"""A float32 exponential function for XLA:CPU. XLA's own is slower, and does not become faster with wider vectors.

Source: expf of S. L. Moshier's Cephes library (two-part range reduction, polynomial). The power of two is made of its exponent bits.
"""

from __future__ import annotations

import jax
import numpy as np
from jax import Array, lax

from ..promotion import full_like

# For x below _LOW, the result is denormal, and XLA's CPU programs flush it to zero. For x above _HIGH, the result is infinite.
_LOW, _HIGH = -87.33654, 89.0
# The addition of _ROUND rounds a float32 to an integer, which is then in the lowest bits of the sum. The integer is read from these bits,
# because XLA would remove an addition and a subtraction of the same number.
_ROUND = 1.5 * 2**23
_ROUND_BITS = int(np.array(_ROUND, np.float32).view(np.int32))
_INFINITY_BITS = int(np.array(np.inf, np.float32).view(np.int32))
_BIAS = 127
# ln(2) is the sum of two numbers. The first one has few bits, so that its product with an exponent is exact.
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(x: Array) -> Array:
    """Returns e to the power of x, elementwise."""
    return _exp_on_any_platform(x) if x.dtype == np.float32 else lax.exp(x)


def exp_nonpositive(x: Array) -> Array:
    """Returns e to the power of x, elementwise, with fewer instructions than `exp`. NaN gives NaN; results for x > 0 are undefined."""
    return _exp_nonpositive_on_any_platform(x) if x.dtype == np.float32 else lax.exp(x)


# Custom derivatives are needed because JAX's derivative of bit arithmetic is zero.


@jax.custom_jvp
def _exp_on_any_platform(x: Array) -> Array:
    return lax.platform_dependent(x, cpu=_exp, default=lax.exp)


@jax.custom_jvp
def _exp_nonpositive_on_any_platform(x: Array) -> Array:
    return lax.platform_dependent(x, cpu=_exp_nonpositive, default=lax.exp)


_exp_on_any_platform.defjvps(lambda tangent, result, x: lax.mul(tangent, result))
_exp_nonpositive_on_any_platform.defjvps(lambda tangent, result, x: lax.mul(tangent, result))


def _exp(x: Array) -> Array:
    fraction, integer = _split(lax.clamp(full_like(x, _LOW), x, full_like(x, _HIGH)))
    bits = lax.add(lax.bitcast_convert_type(fraction, np.int32), lax.shift_left(integer, full_like(integer, 23)))
    result = lax.bitcast_convert_type(lax.min(bits, full_like(bits, _INFINITY_BITS)), np.float32)
    result = lax.select(lax.lt(x, full_like(x, _LOW)), full_like(x, 0), result)
    return lax.select(lax.ne(x, x), x, result)


def _exp_nonpositive(x: Array) -> Array:
    is_below_range = lax.lt(x, full_like(x, _LOW))
    # Comparisons with NaN are false, so a NaN passes through the select, and its fraction is NaN.
    fraction, integer = _split(lax.select(is_below_range, full_like(x, _LOW), x))
    power = lax.shift_left(lax.sub(integer, full_like(integer, _ROUND_BITS - _BIAS)), full_like(integer, 23))
    return lax.select(is_below_range, full_like(x, 0), lax.mul(fraction, lax.bitcast_convert_type(power, np.float32)))


def _split(x: Array) -> tuple[Array, Array]:
    """Factors e to the power of x.

    Returns: A factor near 1, and an int32 whose lowest bits are the exponent of the other factor, a power of two. The higher bits come from
        _ROUND, and a shift by 23 drops them.
    """
    shifted = lax.add(lax.mul(x, full_like(x, _LOG2_E)), full_like(x, _ROUND))
    integer = lax.bitcast_convert_type(shifted, np.int32)
    power = lax.convert_element_type(lax.sub(integer, full_like(integer, _ROUND_BITS)), np.float32)
    remainder = lax.sub(lax.sub(x, lax.mul(power, full_like(x, _LN2_HIGH))), lax.mul(power, full_like(x, _LN2_LOW)))
    total = full_like(x, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        total = lax.add(lax.mul(total, remainder), full_like(x, coefficient))
    return lax.add(lax.add(lax.mul(total, lax.mul(remainder, remainder)), remainder), full_like(x, 1)), integer
