"""Means and variances over dimensions, and other functions shared by the lowerings of normalizations."""

from __future__ import annotations

import math

from jax import Array, lax

from ..cpu.vectorized_reductions import Reduction
from ..dimensions import Dims
from ..promotion import broadcast_back, convert, number


def mean_over(x: Array, dims: Dims, add: Reduction = lax.reduce_sum) -> Array:
    """Returns the mean over `dims`, which are removed; NaN if there are no elements. add: the function that sums over dimensions."""
    total = add(x, dims)
    return lax.div(total, lax.full_like(total, math.prod(x.shape[dim] for dim in dims)))


def moments_over(x: Array, dims: Dims, add: Reduction = lax.reduce_sum) -> tuple[Array, Array, Array]:
    """Returns the mean and the biased variance over `dims`, which are removed, and x - mean. add: as for `mean_over`."""
    mean = mean_over(x, dims, add)
    centered = lax.sub(x, broadcast_back(mean, x.shape, dims))
    return mean, mean_over(lax.square(centered), dims, add), centered


def inverse_std(variance: Array, eps: float) -> Array:
    """Returns 1 / sqrt(variance + eps)."""
    return lax.rsqrt(lax.add(variance, number(eps, variance.dtype)))


def affine(x: Array, weight: Array | None, bias: Array | None, dims: Dims) -> Array:
    """Returns x * weight + bias, in the dtype of x. dims: the dimensions of x that correspond to the dimensions of weight and bias."""
    if weight is not None:
        x = lax.mul(x, lax.broadcast_in_dim(convert(weight, x.dtype), x.shape, dims))
    if bias is not None:
        x = lax.add(x, lax.broadcast_in_dim(convert(bias, x.dtype), x.shape, dims))
    return x


def dims_but_channels(x: Array) -> list[int]:
    """Returns all dimensions of x but the second one, the channels."""
    return [0, *range(2, x.ndim)]
