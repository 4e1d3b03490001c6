"""Running sums, products and extrema along one dimension."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jax import Array, lax

from ...errors import UnsupportedOp
from .. import dtypes
from ..dimensions import wrap
from ..dtypes import DType
from ..promotion import convert
from ..registry import lowers

aten = torch.ops.aten


def _scan(x: Array, dim: int, out: DType, run: Callable[[Array, int], Array]) -> Array:
    """`run` in the accumulating dtype (half types in float32); a rank-0 x is returned as it is."""
    if x.ndim == 0 or x.size == 0:
        return convert(x, out)
    return convert(run(convert(x, dtypes.accumulator(out)), wrap(dim, x.ndim)), out)


@lowers(aten.cumsum.default)
def cumsum(x: Array, dim: int, *, dtype: DType | None = None) -> Array:
    """Dtype: `dtype` if given, int64 for bool and integers, else that of x."""
    return _scan(x, dim, dtype or dtypes.widen_integers(x.dtype), lax.cumsum)


@lowers(aten.cumprod.default)
def cumprod(x: Array, dim: int, *, dtype: DType | None = None) -> Array:
    return _scan(x, dim, dtype or dtypes.widen_integers(x.dtype), lax.cumprod)


@lowers(aten.logcumsumexp.default)
def logcumsumexp(x: Array, dim: int) -> Array:
    """Raises: UnsupportedOp for complex numbers: the branch of each logarithm depends on the order of additions."""
    if dtypes.is_complex(x.dtype):
        raise UnsupportedOp("logcumsumexp of complex numbers")
    return _scan(x, dim, x.dtype, lax.cumlogsumexp)


def _running(x: Array, dim: int, run: Callable[[Array, int], Array]) -> tuple[Array, Array]:
    """The running extremum and where it is: the last of equal ones, and from the first NaN on the last NaN."""
    if x.ndim == 0 or x.size == 0:
        return x, lax.full(x.shape, 0, np.dtype(np.int64))
    dim = wrap(dim, x.ndim)
    # XLA has no scans of bools.
    best = convert(run(convert(x, np.dtype(np.uint8)) if dtypes.is_bool(x.dtype) else x, dim), x.dtype)
    renewed = lax.eq(x, best)
    if dtypes.is_float(x.dtype):
        renewed = lax.bitwise_or(renewed, lax.ne(x, x))
    places = lax.broadcasted_iota("int64", x.shape, dim)
    return best, lax.cummax(lax.select(renewed, places, lax.full_like(places, 0)), dim)


@lowers(aten.cummax.default)
def cummax(x: Array, dim: int) -> tuple[Array, Array]:
    return _running(x, dim, lax.cummax)


@lowers(aten.cummin.default)
def cummin(x: Array, dim: int) -> tuple[Array, Array]:
    return _running(x, dim, lax.cummin)
