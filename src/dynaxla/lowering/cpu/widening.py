"""Conversion of half-type operands to float32 for XLA's own dot on the CPU."""

from __future__ import annotations

import jax
from jax import lax

from .. import dtypes


def widened(x: jax.Array, y: jax.Array, platform: str, has_vector: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the operands of a product. On the CPU, half types are converted to float32, unless one operand is a vector.

    XLA:CPU itself converts operands that none of its libraries accepts. But if XLA then folds a transpose into a dot, the program fails:
    "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32".

    Args:
        platform: JAX's name of the platform.
        has_vector: True if one operand is a vector: the product has one row or one column.
    """
    if platform != "cpu" or has_vector or not dtypes.is_float(x.dtype):
        return x, y
    wide = dtypes.accumulator(x.dtype)
    return lax.convert_element_type(x, wide), lax.convert_element_type(y, wide)
