"""Comparisons, logical ops, and ops that select elements: maximum, clamp, where."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jax import Array, lax

from ...runtime import private
from ...torch_ops import aten
from .. import dtypes
from ..dtypes import DType
from ..dynamic_scalars import is_dynamic
from ..promotion import Promotion, broadcast, convert, elementwise, expand, full_like, number, result_type
from ..registry import lower_table, lowers
from .float_bits import signbit

Function = Callable[..., Array]


def is_infinite(x: Array) -> Array:
    """True where an element is infinite; for complex elements, where either part is infinite."""
    if dtypes.is_complex(x.dtype):
        return lax.bitwise_or(is_infinite(lax.real(x)), is_infinite(lax.imag(x)))
    return lax.eq(lax.abs(x), number(np.inf, x.dtype)) if dtypes.is_float(x.dtype) else lax.full(x.shape, False)


def is_nan(x: Array) -> Array:
    return lax.ne(x, x)


def is_finite(x: Array) -> Array:
    """True where an element is finite; for complex elements, where both parts are finite."""
    if dtypes.is_complex(x.dtype):
        return lax.bitwise_and(lax.is_finite(lax.real(x)), lax.is_finite(lax.imag(x)))
    return lax.is_finite(x) if dtypes.is_float(x.dtype) else lax.full(x.shape, True)


def equals_infinity(x: Array, infinity: float) -> Array:
    return lax.eq(x, number(infinity, x.dtype)) if dtypes.is_float(x.dtype) else lax.full(x.shape, False)


def _logical(function: Function) -> Function:
    """Returns a function that applies `function` to its operands, converted to bool and broadcast, without promotion."""
    return lambda *operands: function(*broadcast([convert(operand, np.dtype(np.bool_)) for operand in operands]))


def _maximum(x: Array, y: Array) -> Array:
    """Returns the larger element; nan where x or y is nan."""
    return lax.bitwise_or(x, y) if dtypes.is_bool(x.dtype) else lax.max(x, y)


def _minimum(x: Array, y: Array) -> Array:
    return lax.bitwise_and(x, y) if dtypes.is_bool(x.dtype) else lax.min(x, y)


def _preserves_signed_zeros(dtype: DType) -> bool:
    """True for dtypes whose clamp at zero is a select, which keeps the sign of zeros.

    For half types the clamp is a maximum or minimum, which needs fewer roundings (see passes/jaxpr/bfloat16_rounding.py).
    """
    return dtypes.is_float(dtype) and dtype.itemsize > 2


def at_least(x: Array, low: Any) -> Array:
    """max(x, low) for a number `low`.

    With low = 0, zeros keep their sign (see `_preserves_signed_zeros`), as in ATen; XLA's maximum of 0.0 and -0.0 is 0.0.
    """
    if _preserves_signed_zeros(x.dtype) and not is_dynamic(low) and low == 0:
        return lax.select(lax.lt(x, number(low, x.dtype)), full_like(x, low), x)
    return _maximum(x, expand(convert(low, x.dtype), x.shape))


def at_most(x: Array, high: Any) -> Array:
    """min(x, high) for a number `high`. With high = 0, zeros keep their sign (see `at_least`)."""
    if _preserves_signed_zeros(x.dtype) and not is_dynamic(high) and high == 0:
        return lax.select(lax.gt(x, number(high, x.dtype)), full_like(x, high), x)
    return _minimum(x, expand(convert(high, x.dtype), x.shape))


def _ignore_nan(function: Function) -> Function:
    """Returns a function of two arrays with the results of `function`, except where one array is nan: there, those of the other array."""

    def ignoring_nan(x: Array, y: Array) -> Array:
        if not dtypes.is_float(x.dtype):
            return function(x, y)
        return lax.select(is_nan(x), y, lax.select(is_nan(y), x, function(x, y)))

    return ignoring_nan


@functools.cache
def _saturates_bounds() -> bool:
    """True if the installed torch's clamp saturates a bound that x's integer dtype cannot hold.

    torch 2.15 saturates such a bound. In earlier versions -1 becomes 255 for uint8, and most other such bounds raise.
    """
    with private.without_modes():
        return torch.zeros(1, dtype=torch.uint8).clamp(min=-1).item() == 0


def saturate_bound(value: Any, dtype: DType) -> Any:
    """Returns a bound of clamp or hardtanh, saturated to the range of an integer dtype if the installed torch saturates bounds."""
    if type(value) is not int or not dtypes.is_integer(dtype) or not _saturates_bounds():
        return value
    limits = np.iinfo(dtype)
    return min(max(value, limits.min), limits.max)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    """min(max(x, low), high); nan where x, low or high is nan.

    Shape:  that of x, low and high, broadcast.
    Dtype:  promoted from x, low and high.
    """
    operands = [operand for operand in (x, low, high) if operand is not None]

    def bound(x: Array, *bounds: Array) -> Array:
        if low is not None:
            x = _maximum(x, bounds[0]) if isinstance(low, Array) else at_least(x, saturate_bound(low, x.dtype))
        if high is not None:
            x = _minimum(x, bounds[-1]) if isinstance(high, Array) else at_most(x, saturate_bound(high, x.dtype))
        return x

    return elementwise(bound, operands, Promotion.NO_OPMATH)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(x: Array, low: Any) -> Array:
    """max(x, low); nan where x or low is nan.

    Shape:  that of x and low, broadcast.
    Dtype:  promoted from x and low.
    """
    return clamp(x, low, None)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(x: Array, high: Any) -> Array:
    """min(x, high); nan where x or high is nan.

    Shape:  that of x and high, broadcast.
    Dtype:  promoted from x and high.
    """
    return clamp(x, None, high)


@lowers(aten.where.self)
def where(condition: Array, x: Any, y: Any) -> Array:
    """x where the condition is true, else y. The condition, x and y are broadcast.

    Dtype:  promoted from x and y.
    """
    common = result_type((x, y))
    selected, first, second = broadcast([convert(condition, np.dtype(np.bool_)), convert(x, common), convert(y, common)])
    return lax.select(selected, first, second)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(x: Array, mask: Array, value: Any) -> Array:
    """`value`, a number or a rank-0 tensor, where the mask is True, else x.

    Shape:  that of x and the mask, broadcast.
    Dtype:  that of x, whatever the dtype of `value`.
    """
    x, mask = broadcast([x, mask])
    return lax.select(mask, expand(convert(value, x.dtype), x.shape), x)


@lowers(aten.nan_to_num.default)
def nan_to_num(x: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Array:
    """x with nan and infinities replaced by numbers: by default, nan by 0, and infinities by the largest and lowest finite number.

    Shape:  that of x.
    Dtype:  that of x.
    """
    if dtypes.is_complex(x.dtype):
        return lax.complex(nan_to_num(lax.real(x), nan, posinf, neginf), nan_to_num(lax.imag(x), nan, posinf, neginf))
    if not dtypes.is_float(x.dtype):
        return x
    limits = torch.finfo(dtypes.to_torch(x.dtype))
    out = lax.select(is_nan(x), full_like(x, 0 if nan is None else nan), x)
    out = lax.select(lax.eq(x, number(np.inf, x.dtype)), full_like(x, limits.max if posinf is None else posinf), out)
    return lax.select(lax.eq(x, number(-np.inf, x.dtype)), full_like(x, limits.min if neginf is None else neginf), out)


lower_table(
    {
        aten.maximum.default: _maximum,
        aten.minimum.default: _minimum,
        aten.fmax.default: _ignore_nan(_maximum),
        aten.fmin.default: _ignore_nan(_minimum),
    },
    promote=Promotion.NO_OPMATH,
)

lower_table(
    {
        aten.eq.Tensor: lax.eq,
        aten.eq.Scalar: lax.eq,
        aten.ne.Tensor: lax.ne,
        aten.ne.Scalar: lax.ne,
        aten.lt.Tensor: lax.lt,
        aten.lt.Scalar: lax.lt,
        aten.le.Tensor: lax.le,
        aten.le.Scalar: lax.le,
        aten.gt.Tensor: lax.gt,
        aten.gt.Scalar: lax.gt,
        aten.ge.Tensor: lax.ge,
        aten.ge.Scalar: lax.ge,
        aten.isnan.default: is_nan,
        aten.isinf.default: is_infinite,
        aten.isfinite.default: is_finite,
        aten.isposinf.default: lambda x: equals_infinity(x, np.inf),
        aten.isneginf.default: lambda x: equals_infinity(x, -np.inf),
        aten.signbit.default: signbit,
    },
    promote=Promotion.ALWAYS_BOOL,
)

lower_table(
    {
        aten.logical_and.default: _logical(lax.bitwise_and),
        aten.logical_or.default: _logical(lax.bitwise_or),
        aten.logical_xor.default: _logical(lax.bitwise_xor),
        aten.logical_not.default: _logical(lax.bitwise_not),
    }
)
