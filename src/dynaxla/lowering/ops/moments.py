"""Means and variances over dimensions, and what normalizations make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax import Array, lax

from ..cpu.folding import Reduction
from ..promotion import convert

Dims = Sequence[int]


def along(x: Array, shape: Dims, dims: Dims) -> Array:
    """Broadcast x to `shape`; its dimensions become those at `dims`."""
    return lax.broadcast_in_dim(x, shape, dims)


def mean_over(x: Array, dims: Dims, add: Reduction = lax.reduce_sum) -> Array:
    """The mean over `dims`, which disappear; NaN over nothing. add: how sums over dimensions are computed."""
    total = add(x, dims)
    return lax.div(total, lax.full_like(total, math.prod(x.shape[dim] for dim in dims)))


def moments_over(x: Array, dims: Dims, add: Reduction = lax.reduce_sum) -> tuple[Array, Array, Array]:
    """Mean and biased variance over `dims`, and x less its mean. add: as for `mean_over`."""
    kept = [dim for dim in range(x.ndim) if dim not in dims]
    mean = mean_over(x, dims, add)
    centered = lax.sub(x, along(mean, x.shape, kept))
    return mean, mean_over(lax.square(centered), dims, add), centered


def reciprocal_root(variance: Array, eps: float) -> Array:
    """1 / sqrt(variance + eps)."""
    return lax.rsqrt(lax.add(variance, lax.full_like(variance, eps)))


def affine(x: Array, weight: Array | None, bias: Array | None, dims: Dims) -> Array:
    """x * weight + bias, whose dimensions are x's at `dims`."""
    if weight is not None:
        x = lax.mul(x, along(convert(weight, x.dtype), x.shape, dims))
    if bias is not None:
        x = lax.add(x, along(convert(bias, x.dtype), x.shape, dims))
    return x


def but_channels(x: Array) -> list[int]:
    """The dimensions of x but its second one."""
    return [0, *range(2, x.ndim)]
