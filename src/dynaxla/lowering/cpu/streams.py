"""Products of a few vectors with many, which take as long as it takes to read the many."""

from __future__ import annotations

from jax import Array, lax

from .. import dtypes


def product(x: Array, y: Array, is_over_last: bool, precision: lax.Precision) -> Array:
    """x times y for each batch. Half types are added in float32.

    Shape:  x (batch, rows, n) and y (batch, columns, n), or (batch, n, columns) if not `is_over_last`, give (batch, rows, columns).
    Dtype:  the accumulator's.
    """
    dims = ((2,), (2 if is_over_last else 1,)), ((0,), (0,))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=dtypes.accumulator(y.dtype))
