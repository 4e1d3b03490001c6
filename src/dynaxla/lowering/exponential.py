"""The exponential function in float32 for the CPU. XLA's own takes longer, and no less with wider vectors.

Source: the expf of S. L. Moshier's Cephes library (reduction in two parts, polynomial); the power of two is added to the exponent's bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import Array, lax

from .promotion import full_like

# Below, results are denormal, which XLA's programs for the CPU flush to zero; above, they are infinite.
_LOW, _HIGH = -87.33654, 89.0
# Adding it rounds a float32 to an integer, which then stands in the lowest bits. (XLA takes it for nothing to subtract it again.)
_ROUND = 1.5 * 2**23
_ROUND_BITS = int(np.array(_ROUND, np.float32).view(np.int32))
_INFINITY_BITS = int(np.array(np.inf, np.float32).view(np.int32))
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def exp(x: Array) -> Array:
    """e to the power of x, elementwise."""
    return lax.platform_dependent(x, cpu=_exp, default=lax.exp) if x.dtype == np.float32 else lax.exp(x)


def _exp(x: Array) -> Array:
    def number(value: float) -> Any:
        return full_like(x, value)

    inside = lax.clamp(number(_LOW), x, number(_HIGH))
    shifted = lax.add(lax.mul(inside, number(_LOG2_E)), number(_ROUND))
    integer = lax.bitcast_convert_type(shifted, np.int32)
    power = lax.convert_element_type(lax.sub(integer, full_like(integer, _ROUND_BITS)), np.float32)
    rest = lax.sub(lax.sub(inside, lax.mul(power, number(_LN2_HIGH))), lax.mul(power, number(_LN2_LOW)))
    total = number(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        total = lax.add(lax.mul(total, rest), number(coefficient))
    total = lax.add(lax.add(lax.mul(total, lax.mul(rest, rest)), rest), number(1))
    bits = lax.add(lax.bitcast_convert_type(total, np.int32), lax.shift_left(integer, full_like(integer, 23)))
    result = lax.bitcast_convert_type(lax.min(bits, full_like(bits, _INFINITY_BITS)), np.float32)
    result = lax.select(lax.lt(x, number(_LOW)), number(0), result)
    return lax.select(lax.ne(x, x), x, result)
