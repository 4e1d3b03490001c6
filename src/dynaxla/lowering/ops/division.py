"""True division, floor division, truncating division, and remainders."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array, lax
from torch.fx import Node

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dimensions import definitely
from ..dynamic_scalars import is_dynamic
from ..promotion import Promotion, broadcast_shapes, elementwise, full_like, number, result_type
from ..registry import lowers
from ..symbolic_numbers import as_array, is_symbolic
from .bounds import require_static
from .elementwise import producer
from .float_bits import copysign
from .rounding import rounded, truncate

Function = Callable[..., Array]
Rounding = Callable[[Array], Array]


@lowers(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(x: Any, y: Any, ctx: Context) -> Array:
    """True division.

    Dtype:  promoted from x and y; the default float for bool and integers.
    """
    divide = exact_division(ctx) if _is_divisor_shared(x, y) else lax.div
    return elementwise(_unmerged_division(divide, ctx), (x, y), Promotion.INT_TO_FLOAT, wide_second=True)


@lowers(aten.reciprocal.default)
def reciprocal(x: Array, ctx: Context) -> Array:
    """1 / x.

    Dtype:  that of x; the default float for bool and integers.
    """
    return elementwise(_unmerged_division(lambda a: lax.div(full_like(a, 1), a), ctx), (x,), Promotion.INT_TO_FLOAT)


_QUOTIENTS = frozenset([aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.reciprocal.default])


def _unmerged_division(function: Function, ctx: Context) -> Function:
    """Returns `function` with, if necessary, barriers that keep XLA from merging its division with divisions that compute its operands."""
    # XLA replaces (a / b) / c by a / (b * c), and a / (b / c) by a * c / b: the product may overflow where eager mode is finite. The
    # barrier prevents this. XLA:CPU still fuses the ops before the barrier with those after it.
    producers = map(producer, ctx.node.args)
    quotients = {index for index, item in enumerate(producers) if isinstance(item, Node) and item.target in _QUOTIENTS}
    if not ctx.eager.prevents_merging or not quotients:
        return function
    return lambda *operands: function(
        *(lax.optimization_barrier(operand) if index in quotients else operand for index, operand in enumerate(operands))
    )


def _is_divisor_shared(x: Any, y: Any) -> bool:
    """True if several elements of x share a divisor that is not known to be a power of two."""
    if isinstance(y, Array):
        return isinstance(x, Array) and y.shape != broadcast_shapes([x.shape, y.shape])
    return is_dynamic(y) or is_symbolic(y) or isinstance(y, complex) or math.frexp(abs(y))[0] != 0.5


def exact_division(ctx: Context) -> Function:
    """Returns a function that divides floats with the rounding of eager mode."""
    # XLA replaces a division by a broadcast divisor with a multiplication by the divisor's reciprocal: 49 / 7 may then differ from 7 in the
    # last bit, which can change the floor of the quotient. The barrier prevents this, but not fusion on XLA:CPU.
    return (lambda x, y: lax.div(x, lax.optimization_barrier(y))) if ctx.eager.prevents_merging else lax.div


def _floor_divide(x: Array, y: Array, divide: Function, round_to_dtype: Rounding) -> Array:
    """Returns the quotient rounded down, as Python's //, also for infinities and signed zeros.

    Args:
        x: the dividend.
        y: the divisor, of the same shape and dtype.
        divide: divides two floats; see `exact_division`.
        round_to_dtype: rounds each intermediate result to the dtype in which eager mode keeps it.

    Source: c10/util/generic_math.h, div_floor_floating and div_floor_integer
    """
    if dtypes.is_integer(x.dtype):
        quotient = lax.div(x, y)
        if np.issubdtype(x.dtype, np.unsignedinteger):
            return quotient
        is_rounded_up = _differs_in_sign(lax.rem(x, y), y)
        return lax.select(is_rounded_up, lax.sub(quotient, number(1, x.dtype)), quotient)
    one, half = number(1, x.dtype), number(0.5, x.dtype)
    remainder = lax.rem(x, y)
    quotient = round_to_dtype(divide(round_to_dtype(lax.sub(x, remainder)), y))
    quotient = lax.select(_differs_in_sign(remainder, y), round_to_dtype(lax.sub(quotient, one)), quotient)
    floored = lax.floor(quotient)
    floored = lax.select(lax.gt(lax.sub(quotient, floored), half), round_to_dtype(lax.add(floored, one)), floored)
    true_quotient = lax.div(x, y)
    floored = lax.select(lax.eq(quotient, number(0, x.dtype)), copysign(full_like(x, 0), true_quotient), floored)
    return lax.select(lax.eq(y, number(0, x.dtype)), true_quotient, floored)


def _differs_in_sign(remainder: Array, divisor: Array) -> Array:
    """True where a remainder is not zero and its sign differs from the divisor's."""
    zero = number(0, remainder.dtype)
    return lax.bitwise_and(lax.ne(remainder, zero), lax.ne(lax.lt(remainder, zero), lax.lt(divisor, zero)))


def _truncating_divide(x: Array, y: Array, divide: Function, round_to_dtype: Rounding) -> Array:
    """Returns the quotient rounded towards zero. The arguments are those of `_floor_divide`."""
    return lax.div(x, y) if dtypes.is_integer(x.dtype) else truncate(round_to_dtype(divide(x, y)))


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(x: Any, y: Any, *, rounding_mode: str | None, ctx: Context) -> Array:
    """Division rounded towards zero ("trunc") or down ("floor"); true division if the mode is None.

    Dtype:  promoted from x and y; as for `div` if the mode is None.
    Raises: on the CPU, RuntimeError at run time if an integer is divided by zero.
    """
    if rounding_mode is None:
        return div(x, y, ctx)
    _require_nonzero(ctx, x, y)
    divide = _floor_divide if rounding_mode == "floor" else _truncating_divide
    # If the common dtype is a half type, ATen rounds every intermediate result to it. If y is a number or has rank 0, ATen rounds only the
    # result.
    common = result_type((x, y))
    is_half = dtypes.is_float(common) and common.itemsize < 4 and isinstance(y, Array) and y.ndim > 0
    round_to_dtype: Rounding = (lambda value: rounded(value, common)) if is_half else (lambda value: value)
    return elementwise(lambda a, b: divide(a, b, exact_division(ctx), round_to_dtype), (x, y), Promotion.DEFAULT, wide_second=True)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(x: Any, y: Any, ctx: Context) -> Array:
    """Division rounded down.

    Raises: on the CPU, RuntimeError at run time if an integer is divided by zero.
    """
    return div_mode(x, y, rounding_mode="floor", ctx=ctx)


def _require_nonzero(ctx: Context, x: Any, y: Any) -> None:
    """Makes the compiled call raise if an integer is divided by zero, on platforms where eager mode raises."""
    if not ctx.eager.refuses_zero_divisors or dtypes.is_inexact(result_type((x, y))) or 0 in ctx.output.shape:
        return
    if is_symbolic(y):
        if definitely(lambda: y > 0):
            return
        y = as_array(y)
    if isinstance(y, Array):
        ctx.require(lax.ne(y, number(0, y.dtype)), RuntimeError, "ZeroDivisionError")
    else:
        require_static(ctx, y != 0, RuntimeError, "ZeroDivisionError")


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(x: Any, y: Any, ctx: Context) -> Array:
    """The remainder with the divisor's sign, as Python's %. If x has a half type and y is a number, y is rounded to x's dtype, as in ATen.

    Raises: on the CPU, RuntimeError at run time if an integer is divided by zero.
    """
    _require_nonzero(ctx, x, y)
    return elementwise(_remainder, (x, y), Promotion.NO_OPMATH)


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(x: Any, y: Any, ctx: Context) -> Array:
    """The remainder with the dividend's sign, as C's %.

    Raises: on the CPU, RuntimeError at run time if an integer is divided by zero.
    """
    _require_nonzero(ctx, x, y)
    return elementwise(lax.rem, (x, y), Promotion.NO_OPMATH)


def _remainder(x: Array, y: Array) -> Array:
    """The remainder with the divisor's sign, as Python's %."""
    remainder = lax.rem(x, y)
    if np.issubdtype(x.dtype, np.unsignedinteger):
        return remainder
    return lax.select(_differs_in_sign(remainder, y), lax.add(remainder, y), remainder)
