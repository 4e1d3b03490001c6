"""Rounding to half types, including denormals, and rounding toward zero."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from dynaxla.lowering.ops.rounding import rounded, truncate


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_rounded_has_the_values_of_the_dtype(dtype: type) -> None:
    """In a program. XLA would remove a conversion and its inverse."""
    limits = jnp.finfo(dtype)
    ends = [0.0, -0.0, float(limits.max), -float(limits.tiny), np.inf, -np.inf, np.nan]
    x = np.concatenate([np.random.default_rng(0).standard_normal(1000) * 100, np.logspace(-3, 3, 1000), ends]).astype(np.float32)
    result = jax.jit(lambda x: rounded(x, jnp.dtype(dtype)))(x)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, x.astype(dtype).astype(np.float32))
    np.testing.assert_array_equal(np.signbit(result), np.signbit(x))


def test_rounded_keeps_denormals_and_its_own_dtype() -> None:
    small = np.array([2.0**-24, -(2.0**-20), 2.0**-15], dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: rounded(x, jnp.dtype(jnp.float16)))(small), small)
    x = np.array([1 / 3], dtype=np.float32)
    assert rounded(lax.convert_element_type(x, jnp.float32), jnp.dtype(jnp.float32))[0] == x[0]


def test_truncate() -> None:
    x = np.array([1.5, -1.5, 0.4, -0.4, 3.0, -3.0, np.inf, -np.inf, np.nan], dtype=np.float32)
    np.testing.assert_array_equal(truncate(jnp.asarray(x)), np.trunc(x))
