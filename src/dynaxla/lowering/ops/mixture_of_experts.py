"""Matrix products of mixture-of-experts layers: each group of rows is multiplied by its own matrix."""

from __future__ import annotations

from jax import Array, lax
from jax import numpy as jnp

from ..context import Context
from ..registry import lowers


def group_sizes(ends: Array) -> Array:
    """Returns the number of rows of each group. ends: int[groups], the end (exclusive) of each group; the first group begins at row 0."""
    return jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype)).astype(jnp.int32)


def grouped_matmul(x: Array, weights: Array, ends: Array, precision: lax.Precision) -> Array:
    """Returns rows ends[g-1]:ends[g] of x times weights[g], for each group g. The result's rows after the last group are zero.

    Shape:  x [rows, k] and weights [groups, k, n] give [rows, n].
    Dtype:  that of x.
    """
    return lax.ragged_dot(x, weights, group_sizes(ends), precision=precision, preferred_element_type=x.dtype)


# The two ops below exist only after the transformers library has been imported.
@lowers("transformers::grouped_mm_fallback")
def grouped_mm(x: Array, weights: Array, ends: Array, *, ctx: Context) -> Array:
    """Each group of rows of x times its own matrix, as in `grouped_matmul`."""
    return grouped_matmul(x, weights, ends, ctx.settings.matmul_precision)


@lowers("transformers::grouped_mm_fallback_backward")
def grouped_mm_backward(x: Array, weights: Array, ends: Array, grad: Array, *, ctx: Context) -> tuple[Array, Array]:
    """The gradients of `grouped_mm` for x, [rows, k], and for the weights, [groups, k, n]. grad: [rows, n]."""
    grad_x = grouped_matmul(grad, lax.transpose(weights, (0, 2, 1)), ends, ctx.settings.matmul_precision)
    dimension_numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=())
    grad_weights = lax.ragged_dot_general(
        x, grad, group_sizes(ends), dimension_numbers, precision=ctx.settings.matmul_precision, preferred_element_type=weights.dtype
    )
    return grad_x, grad_weights
