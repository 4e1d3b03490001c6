"""Distances between the rows of tensors, and their gradients. The differences of all pairs exist only inside a fused reduction."""

from __future__ import annotations

import math

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from ...torch_ops import aten
from ..context import Context
from ..promotion import broadcast_shapes
from ..registry import lowers
from .indexing import take_along
from .reductions import linalg_vector_norm
from .scattering import write_slices


def _pairs(x: Array, other: Array) -> Array:
    """The differences [..., P, R, M] of all rows of x [..., P, M] and other [..., R, M]."""
    batch = broadcast_shapes([x.shape[:-2], other.shape[:-2]])
    shape = (*batch, x.shape[-2], other.shape[-2], x.shape[-1])
    rank, first, second = len(shape), x.ndim - 2, other.ndim - 2
    x = lax.reshape(x, (*(1,) * (len(batch) - first), *x.shape[:-1], 1, x.shape[-1]))
    other = lax.reshape(other, (*(1,) * (len(batch) - second), *other.shape[:-2], 1, *other.shape[-2:]))
    dims = range(rank)
    return lax.sub(_spread(x, shape, dims), _spread(other, shape, dims))


def _spread(x: Array, shape: tuple[int, ...], dims: range) -> Array:
    kept = [dim for dim in dims if x.shape[dim] == shape[dim]]
    return lax.broadcast_in_dim(lax.reshape(x, [x.shape[dim] for dim in kept]), shape, kept)


def _slope(difference: Array, distance: Array, p: float) -> Array:
    """The derivative of the p-norm over the last dimension; zero where the distance is zero."""
    zero = lax.full_like(difference, 0)
    distance = lax.broadcast_in_dim(distance, difference.shape, range(difference.ndim - 1))
    if p == 0:
        return zero
    if p == 1:
        return lax.sign(difference)
    size = lax.abs(difference)
    if math.isinf(p):
        return lax.select(lax.eq(size, distance), lax.sign(difference), zero)
    if p == 2:
        slope = lax.div(difference, distance)
    else:
        power = lax.full_like(size, p - 1)
        slope = lax.mul(lax.sign(difference), lax.div(lax.pow(size, power), lax.pow(distance, power)))
    undefined = lax.eq(distance, zero)
    if p < 1:
        undefined = lax.bitwise_or(undefined, lax.eq(difference, zero))
    return lax.select(undefined, zero, slope)


@lowers(aten._cdist_forward.default)
def cdist(x: Array, other: Array, p: float, compute_mode: int | None, *, ctx: Context) -> Array:
    """The p-norm of the difference of every row of x and every row of other. No matmul is used, whatever compute_mode: it would round more.

    Shape:  x (*batch, P, M) and other (*batch, R, M) give (*batch, P, R), with broadcast batches.
    Dtype:  that of x.
    """
    return linalg_vector_norm(_pairs(x, other), p, [-1], ctx=ctx)


@lowers(aten._cdist_backward.default)
def cdist_backward(grad: Array, x: Array, other: Array, p: float, distance: Array) -> Array:
    """The gradient of x.

    Shape:  (*batch, P, M), with the broadcast batches of x and other. If there are no pairs, it is that of x, as in PyTorch's kernel, and
            all elements are zero.
    Dtype:  that of x.
    """
    difference = _pairs(x, other)
    if difference.size == 0:
        return lax.full_like(x, 0)
    slope = _slope(difference, distance, p)
    return lax.reduce_sum(lax.mul(slope, lax.broadcast_in_dim(grad, slope.shape, range(slope.ndim - 1))), (slope.ndim - 2,))


@lowers(aten._pdist_forward.default)
def pdist(x: Array, p: float = 2, *, ctx: Context) -> Array:
    """The p-norm of the difference of rows i and j of x, for all i < j.

    Shape:  x (N, M) gives (N * (N - 1) / 2).
    Dtype:  that of x.
    """
    first, second = (take_along(x, 0, jnp.asarray(rows)) for rows in np.triu_indices(x.shape[0], 1))
    return linalg_vector_norm(lax.sub(first, second), p, [-1], ctx=ctx)


@lowers(aten._pdist_backward.default)
def pdist_backward(grad: Array, x: Array, p: float, distance: Array) -> Array:
    """The gradient of x.

    Shape:  that of x.
    Dtype:  that of x.
    """
    if grad.size == 0:
        return lax.full_like(x, 0)
    first, second = (jnp.asarray(rows) for rows in np.triu_indices(x.shape[0], 1))
    difference = lax.sub(take_along(x, 0, first), take_along(x, 0, second))
    slope = lax.mul(_slope(difference, distance, p), lax.broadcast_in_dim(grad, difference.shape, (0,)))
    total = write_slices(lax.full_like(x, 0), 0, first, slope, "sum")
    return write_slices(total, 0, second, lax.neg(slope), "sum")
