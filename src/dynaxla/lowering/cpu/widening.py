"""Operands of half types, for XLA's own dot on the CPU."""

from __future__ import annotations

import jax
from jax import lax

from .. import dtypes


def widened(x: jax.Array, y: jax.Array, platform: str, vectors: bool) -> tuple[jax.Array, jax.Array]:
    """The operands of a product; on the CPU, those of half types in float32. vectors: whether the product is one of vectors.

    XLA:CPU widens what none of its libraries takes. If it moves a transpose into a dot after that, it refuses to run the program:
    "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32".
    """
    if platform != "cpu" or vectors or not dtypes.is_float(x.dtype):
        return x, y
    wide = dtypes.accumulator(x.dtype)
    return lax.convert_element_type(x, wide), lax.convert_element_type(y, wide)
