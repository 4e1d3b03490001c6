"""Rounding to integers, and rounding to a half type after each step, for ops whose result depends on the last bit of ATen's arithmetic."""

from __future__ import annotations

from jax import Array, lax
from jax import numpy as jnp

from .. import dtypes
from ..dtypes import DType
from ..promotion import convert, number


def rounded(x: Array, dtype: DType) -> Array:
    """Rounds x, an array in the accumulator of `dtype`, to values that `dtype` can represent. Denormals of `dtype` are not rounded.

    XLA may simplify away a conversion to `dtype` and back, but not this rounding.
    """
    if x.dtype == dtype:
        return x
    limits = jnp.finfo(dtype)
    # For denormals of `dtype`, lax.reduce_precision would return zero.
    small = lax.lt(lax.abs(x), number(float(limits.tiny), x.dtype))
    return lax.select(small, x, lax.reduce_precision(x, limits.nexp, limits.nmant))


def in_accumulator(x: Array, dtype: DType) -> Array:
    """Returns x, rounded to `dtype`, in the accumulator of `dtype`. Eager mode casts the operand of a reduction in the same way."""
    accumulator = dtypes.accumulator(dtype)
    wide = convert(x, accumulator)
    return wide if x.dtype == dtype or not dtypes.is_float(dtype) else rounded(wide, dtype)


def round_half_to_even(x: Array) -> Array:
    """Rounds x to the nearest integers. Unlike `jnp.rint`, it adds no inner jaxpr, so passes see the rounding."""
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def truncate(x: Array) -> Array:
    """Rounds x towards zero."""
    return lax.select(lax.lt(x, number(0, x.dtype)), lax.ceil(x), lax.floor(x))
