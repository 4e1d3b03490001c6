"""Lowerings of the p-norm distances between rows, and of their gradients.

Except in `pdist_backward`, which scatters, the pairwise differences are not materialized: XLA fuses the subtraction into the reduction.
"""

from __future__ import annotations

import math

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from ...torch_ops import aten
from ..context import Context
from ..promotion import broadcast_shapes, expand, expand_leading
from ..registry import lowers
from .indexing import take_along
from .reductions import linalg_vector_norm
from .scattering import write_slices


def _pairwise_differences(x1: Array, x2: Array) -> Array:
    """Returns the difference between each row of x1 and each row of x2.

    Shape:  x1 (*batch, P, M) and x2 (*batch, R, M) give (*batch, P, R, M), with broadcast batches.
    """
    batch = broadcast_shapes([x1.shape[:-2], x2.shape[:-2]])
    shape = (*batch, x1.shape[-2], x2.shape[-2], x1.shape[-1])
    x1_batch_rank, x2_batch_rank = x1.ndim - 2, x2.ndim - 2
    x1 = lax.reshape(x1, (*(1,) * (len(batch) - x1_batch_rank), *x1.shape[:-1], 1, x1.shape[-1]))
    x2 = lax.reshape(x2, (*(1,) * (len(batch) - x2_batch_rank), *x2.shape[:-2], 1, *x2.shape[-2:]))
    return lax.sub(expand(x1, shape), expand(x2, shape))


def _norm_derivative(difference: Array, distance: Array, p: float) -> Array:
    """Returns the derivative of `distance`, the p-norm of `difference` over the last dimension, by each element of `difference`.

    The derivative is zero where it is not defined, as in ATen's kernels.
    """
    zero = lax.full_like(difference, 0)
    distance = expand_leading(distance, difference.shape)
    if p == 0:
        return zero
    if p == 1:
        return lax.sign(difference)
    magnitude = lax.abs(difference)
    if math.isinf(p):
        return lax.select(lax.eq(magnitude, distance), lax.sign(difference), zero)
    if p == 2:
        derivative = lax.div(difference, distance)
    else:
        exponent = lax.full_like(magnitude, p - 1)
        derivative = lax.mul(lax.sign(difference), lax.div(lax.pow(magnitude, exponent), lax.pow(distance, exponent)))
    undefined = lax.eq(distance, zero)
    if p < 1:
        undefined = lax.bitwise_or(undefined, lax.eq(difference, zero))
    return lax.select(undefined, zero, derivative)


@lowers(aten._cdist_forward.default)
def cdist(x1: Array, x2: Array, p: float, compute_mode: int | None, *, ctx: Context) -> Array:
    """Returns the p-norm distance between each row of x1 and each row of x2.

    compute_mode, which lets ATen use a matmul, has no effect: a matmul has larger rounding errors.

    Shape:  x1 (*batch, P, M) and x2 (*batch, R, M) give (*batch, P, R), with broadcast batches.
    Dtype:  that of x1.
    """
    return linalg_vector_norm(_pairwise_differences(x1, x2), p, [-1], ctx=ctx)


@lowers(aten._cdist_backward.default)
def cdist_backward(grad: Array, x1: Array, x2: Array, p: float, distance: Array) -> Array:
    """Returns the gradient of x1.

    Shape:  (*batch, P, M), with the broadcast batches of x1 and x2. If the differences have no elements, the shape of x1, as in ATen's
            kernel, and all elements are zero.
    Dtype:  that of x1.
    """
    difference = _pairwise_differences(x1, x2)
    if difference.size == 0:
        return lax.full_like(x1, 0)
    derivative = _norm_derivative(difference, distance, p)
    return lax.reduce_sum(lax.mul(derivative, expand_leading(grad, derivative.shape)), (derivative.ndim - 2,))


@lowers(aten._pdist_forward.default)
def pdist(x: Array, p: float = 2, *, ctx: Context) -> Array:
    """Returns the p-norm distance between rows i and j of x, for all i < j.

    Shape:  x (N, M) gives (N * (N - 1) / 2).
    Dtype:  that of x.
    """
    first, second = (take_along(x, 0, jnp.asarray(rows)) for rows in np.triu_indices(x.shape[0], 1))
    return linalg_vector_norm(lax.sub(first, second), p, [-1], ctx=ctx)


@lowers(aten._pdist_backward.default)
def pdist_backward(grad: Array, x: Array, p: float, distance: Array) -> Array:
    """Returns the gradient of x.

    Shape:  that of x.
    Dtype:  that of x.
    """
    if grad.size == 0:
        return lax.full_like(x, 0)
    first, second = (jnp.asarray(rows) for rows in np.triu_indices(x.shape[0], 1))
    difference = lax.sub(take_along(x, 0, first), take_along(x, 0, second))
    derivative = lax.mul(_norm_derivative(difference, distance, p), lax.broadcast_in_dim(grad, difference.shape, (0,)))
    total = write_slices(lax.full_like(x, 0), 0, first, derivative, "sum")
    return write_slices(total, 0, second, lax.neg(derivative), "sum")
