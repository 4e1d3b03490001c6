"""Rounding towards zero; and of half types after every step, where ATen computes in the half type and results depend on the last bit."""

from __future__ import annotations

from jax import Array, lax
from jax import numpy as jnp

from ..dtypes import DType
from ..promotion import number


def rounded(x: Array, dtype: DType) -> Array:
    """x, which is of the accumulator of `dtype`, with the values that `dtype` has. XLA may drop a pair of conversions, but not this."""
    if x.dtype == dtype:
        return x
    limits = jnp.finfo(dtype)
    # reduce_precision would flush denormals
    small = lax.lt(lax.abs(x), number(float(limits.tiny), x.dtype))
    return lax.select(small, x, lax.reduce_precision(x, limits.nexp, limits.nmant))


def truncate(x: Array) -> Array:
    """x rounded towards zero."""
    return lax.select(lax.lt(x, number(0, x.dtype)), lax.ceil(x), lax.floor(x))
