"""Conversion of half-type operands to float32 for XLA's own dot on the CPU."""

from __future__ import annotations

import jax
from jax import lax

from .. import dtypes


def widened(x: jax.Array, y: jax.Array, platform: str, vectors: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the operands of a product, on the CPU with half types converted to float32, unless it is a product of vectors.

    XLA:CPU itself converts operands that none of its libraries accepts. But if it then folds a transpose into a dot, the program fails with
    "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32".

    Args:
        platform: JAX's name of the platform.
        vectors: True if the product is one of vectors.
    """
    if platform != "cpu" or vectors or not dtypes.is_float(x.dtype):
        return x, y
    wide = dtypes.accumulator(x.dtype)
    return lax.convert_element_type(x, wide), lax.convert_element_type(y, wide)
