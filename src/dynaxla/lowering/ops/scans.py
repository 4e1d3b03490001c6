"""Lowerings of running sums, products and extrema along one dimension."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..dimensions import move, wrap
from ..dtypes import DType
from ..promotion import convert, full_like
from ..registry import lowers
from .rounding import in_accumulator


def _scan(x: Array, dim: int, out: DType, scan: Callable[[Array, int], Array]) -> Array:
    """Returns scan(x, dim), computed in the accumulator's dtype (float32 for half types). A rank-0 or empty x is only cast to `out`."""
    if x.ndim == 0 or x.size == 0:
        return convert(x, out)
    return convert(scan(in_accumulator(x, out), wrap(dim, x.ndim)), out)


def running_sum(x: Array, dim: int) -> Array:
    """Returns the running sum of x along `dim`.

    The barrier hides x from XLA's algebraic simplifier, which aborts the process for some x: a dtype conversion of one element of a
    constant, gathered several times.
    """
    return lax.cumsum(lax.optimization_barrier(x), dim)


@lowers(aten.cumsum.default)
def cumsum(x: Array, dim: int, *, dtype: DType | None = None) -> Array:
    """Running sum along one dimension. Half types are added in float32.

    Shape:  that of x.
    Dtype:  `dtype` if given, int64 for bool and integers, else that of x.
    """
    return _scan(x, dim, dtype or dtypes.widen_integers(x.dtype), running_sum)


@lowers(aten.cumprod.default)
def cumprod(x: Array, dim: int, *, dtype: DType | None = None) -> Array:
    """Running product along one dimension. Half types are multiplied in float32.

    Shape:  that of x.
    Dtype:  `dtype` if given, int64 for bool and integers, else that of x.
    """
    return _scan(x, dim, dtype or dtypes.widen_integers(x.dtype), lax.cumprod)


def _log_add_exp(x: Array, y: Array) -> Array:
    """Returns log(exp(x) + exp(y)) of complex numbers; the operand with the larger real part determines the branch.

    Source: ATen native/cpu/LogAddExp.h
    """
    is_less = lax.lt(lax.real(x), lax.real(y))
    low, high = lax.select(is_less, x, y), lax.select(is_less, y, x)
    total = lax.add(lax.log1p(lax.exp(lax.sub(low, high))), high)
    is_infinite = lax.bitwise_and(lax.eq(lax.real(x), lax.real(y)), lax.bitwise_not(lax.is_finite(lax.real(x))))
    result_at_infinity = lax.select(lax.lt(lax.real(x), full_like(lax.real(x), 0)), low, lax.log(lax.add(lax.exp(low), lax.exp(high))))
    total = lax.select(is_infinite, result_at_infinity, total)
    return lax.select(lax.bitwise_or(lax.ne(x, x), lax.ne(y, y)), full_like(x, complex(np.nan, np.nan)), total)


def _running_log_add_exp(x: Array, dim: int) -> Array:
    """Returns the running log(sum(exp(x))) of complex numbers, in order: the branch of a logarithm depends on the order of additions."""

    def step(total: Array, item: Array) -> tuple[Array, Array]:
        total = _log_add_exp(item, total)
        return total, total

    items = move(x, dim, 0)
    return move(lax.scan(step, full_like(items[0], -np.inf), items)[1], 0, dim)


@lowers(aten.logcumsumexp.default)
def logcumsumexp(x: Array, dim: int) -> Array:
    """The logarithm of the running sum of exp(x) along one dimension, without intermediate overflow.

    Shape:  that of x.
    Dtype:  that of x.
    """
    return _scan(x, dim, x.dtype, _running_log_add_exp if dtypes.is_complex(x.dtype) else lax.cumlogsumexp)


def _running_extremum(x: Array, dim: int, scan: Callable[[Array, int], Array]) -> tuple[Array, Array]:
    """Returns the running extremum along `dim`, and the index of its last occurrence so far.

    From the first NaN on, the extremum is NaN, and the index is that of the last NaN so far.
    """
    if x.ndim == 0 or x.size == 0:
        return x, lax.full(x.shape, 0, np.dtype(np.int64))
    dim = wrap(dim, x.ndim)
    # XLA has no running maximum or minimum of bools.
    extremum = convert(scan(convert(x, np.dtype(np.uint8)) if dtypes.is_bool(x.dtype) else x, dim), x.dtype)
    is_extremum = lax.eq(x, extremum)
    if dtypes.is_float(x.dtype):
        is_extremum = lax.bitwise_or(is_extremum, lax.ne(x, x))
    indices = lax.broadcasted_iota("int64", x.shape, dim)
    return extremum, lax.cummax(lax.select(is_extremum, indices, lax.full_like(indices, 0)), dim)


@lowers(aten.cummax.default)
def cummax(x: Array, dim: int) -> tuple[Array, Array]:
    """The largest element so far along one dimension, and the index of its last occurrence so far. NaN counts as the largest.

    Shape:  both: that of x.
    Dtype:  that of x, and int64 for the indices.
    """
    return _running_extremum(x, dim, lax.cummax)


@lowers(aten.cummin.default)
def cummin(x: Array, dim: int) -> tuple[Array, Array]:
    """The smallest element so far along one dimension, and the index of its last occurrence so far. NaN counts as the smallest.

    Shape:  both: that of x.
    Dtype:  that of x, and int64 for the indices.
    """
    return _running_extremum(x, dim, lax.cummin)
