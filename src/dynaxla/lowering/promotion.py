"""ATen's type promotion.

Source: c10/core/ScalarType (promoteTypes) and ATen/native/TypeProperties.cpp (result_type): tensors with dimensions outrank rank-0
tensors, which outrank Python numbers; a lower rank only counts where its category (bool < int < float < complex) is higher.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import export, lax
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import UnsupportedOp
from . import dtypes
from .dtypes import DType
from .eager import Eager
from .open_numbers import is_open
from .symbolic_numbers import as_array, is_symbolic


class Promotion(enum.Enum):
    """How an elementwise op computes and what it returns, as in `torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND`."""

    DEFAULT = enum.auto()  # compute in the common dtype (half types in float32), return the common dtype
    NO_OPMATH = enum.auto()  # the same, but half types are computed as they are (moves and comparisons: exact anyway)
    INT_TO_FLOAT = enum.auto()  # integers become the default float
    ALWAYS_BOOL = enum.auto()  # compute in the common dtype, return bool
    COMPLEX_TO_FLOAT = enum.auto()  # complex operands give their real dtype (abs)
    BOOL_TO_LONG = enum.auto()  # bool operands become int64


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return higher or lower
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return higher.to_complex() if lower.is_complex else higher
    if higher == torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher


def _number_dtype(number: Any) -> torch.dtype:
    if isinstance(number, (bool, np.bool_)):
        return torch.bool
    if isinstance(number, (int, np.integer)) or export.is_symbolic_dim(number):
        return torch.int64
    if isinstance(number, (float, np.floating)):
        return dtypes.default()
    return dtypes.default().to_complex()


def result_type(operands: Sequence[Any]) -> DType:
    """The common dtype of arrays and Python numbers, as `torch.result_type` gives it."""
    dimensioned: torch.dtype | None = None
    rank_zero: torch.dtype | None = None
    number: torch.dtype | None = None
    for operand in operands:
        if isinstance(operand, (jax.Array, np.ndarray)):
            dtype = dtypes.to_torch(operand.dtype)
            if operand.ndim:
                dimensioned = dtype if dimensioned is None else torch.promote_types(dimensioned, dtype)
            else:
                rank_zero = dtype if rank_zero is None else torch.promote_types(rank_zero, dtype)
        else:
            dtype = _number_dtype(operand)
            number = dtype if number is None else torch.promote_types(number, dtype)
    common = _combine(dimensioned, _combine(rank_zero, number))
    assert common is not None, "result_type needs an operand"
    if common == torch.complex32:
        raise UnsupportedOp("float16 beside a complex number gives complex32, which JAX does not have", hint="convert to float32 before")
    return dtypes.to_jax(common)


def computation_and_result_dtype(operands: Sequence[Any], kind: Promotion) -> tuple[DType, DType]:
    """The dtype to compute in, and the dtype of the result."""
    common = result_type(operands)
    if kind is Promotion.INT_TO_FLOAT and not dtypes.is_inexact(common):
        common = dtypes.default_float()
    if kind is Promotion.BOOL_TO_LONG and dtypes.is_bool(common):
        common = np.dtype(np.int64)
    result = common
    if kind is Promotion.ALWAYS_BOOL:
        result = np.dtype(np.bool_)
    elif kind is Promotion.COMPLEX_TO_FLOAT:
        result = dtypes.real(common)
    if kind in (Promotion.DEFAULT, Promotion.INT_TO_FLOAT, Promotion.COMPLEX_TO_FLOAT):
        return dtypes.accumulator(common), result
    return common, result


def convert(operand: Any, dtype: DType) -> jax.Array:
    """An array of `dtype` from an array or a Python number; complex to real drops the imaginary part, as ATen's copies do."""
    if isinstance(operand, jax.Array):
        if operand.dtype == dtype:
            return operand
        if dtypes.is_complex(operand.dtype) and not dtypes.is_complex(dtype):
            if dtypes.is_bool(dtype):
                return lax.ne(operand, lax.full_like(operand, 0))
            operand = lax.real(operand)
        if dtypes.is_float(operand.dtype) and dtypes.is_integer(dtype):
            return _float_to_integer(operand, np.dtype(dtype))
        if dtype == _E8M0:
            return _to_power_of_two(lax.convert_element_type(operand, np.float32))
        if dtypes.is_bool(operand.dtype) and dtypes.is_inexact(dtype):
            # XLA would make a selection of x times a converted bool, and inf * 0 must be nan.
            return lax.select(operand, full_like(operand, 1, dtype), full_like(operand, 0, dtype))
        if dtype == _E4M3 and _saturates():
            if not dtypes.is_float(operand.dtype) or operand.dtype.itemsize == 1:
                operand = lax.convert_element_type(operand, np.float32)
            limit = number(448.0, operand.dtype)
            operand = lax.clamp(lax.neg(limit), operand, limit)
        return lax.convert_element_type(operand, dtype)
    return lax.full((), number(operand, dtype))


_E4M3, _E8M0 = (dtypes.to_jax(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu))


@functools.cache
def _saturates() -> bool:
    """True if this torch casts what is above float8_e4m3fn's largest number, infinity too, to that number, 448: releases after 2.11 do. XLA
    makes NaN of it."""
    with _disable_current_modes():
        return bool(torch.tensor([torch.inf]).to(torch.float8_e4m3fn).float() == 448)


def _to_power_of_two(x: jax.Array) -> jax.Array:
    """A float32 as float8_e8m0fnu: the bits of its exponent. The sign is lost, ties go up, and zero becomes the smallest power of two. XLA
    makes NaN of zero and of negative numbers.

    Source: c10/util/Float8_e8m0fnu.h, fp8e8m0fnu_from_fp32_value
    """
    bits = lax.bitcast_convert_type(x, np.uint32)

    def constant(value: int) -> jax.Array:
        return full_like(bits, value)

    exponent = lax.bitwise_and(lax.shift_right_logical(bits, constant(23)), constant(0xFF))
    mantissa = lax.bitwise_and(bits, constant(0x7FFFFF))
    half = constant(0x400000)
    up = lax.select(lax.eq(exponent, constant(0)), lax.gt(mantissa, half), lax.ge(mantissa, half))
    rounded = lax.min(lax.add(exponent, lax.convert_element_type(up, np.uint32)), constant(0xFF))
    return lax.bitcast_convert_type(lax.convert_element_type(rounded, np.uint8), _E8M0)


_here = threading.local()


@contextlib.contextmanager
def casting_as(eager: Eager) -> Iterator[None]:
    """Inside, in this thread, operands are cast as these kernels cast them."""
    before = getattr(_here, "like_x86", False), getattr(_here, "rounds_operands", False)
    _here.like_x86, _here.rounds_operands = eager.casts_like_x86, eager.rounds_operands
    try:
        yield
    finally:
        _here.like_x86, _here.rounds_operands = before


def _float_to_integer(x: jax.Array, dtype: DType) -> jax.Array:
    """Towards zero. C++ leaves open what nan and numbers out of range become, and ATen what its processor makes of them: XLA saturates, as
    CUDA and ARM do; x86's instructions give the lowest integer for all of them.

    Narrow dtypes wrap (-1.0 is 255 as uint8), through int32; uint8 and uint32 do so through int64. (ATen's vectorized loops give for what
    is below int32 or beyond uint32 another uint32 than its loops over the rest and over strided memory, whose results these are.)
    Source: the instructions CVTTSS2SI and CVTTPS2DQ; c10/util/TypeCast.h, static_cast_with_inter_type
    """
    if not getattr(_here, "like_x86", False):
        return lax.convert_element_type(lax.convert_element_type(x, np.int32) if dtype.itemsize < 4 else x, dtype)
    if x.dtype.itemsize < 4:
        x = lax.convert_element_type(x, np.float32)  # which is what XLA:CPU would do for each of the steps, and has an infinity
    if dtype == np.uint64:
        half = number(2.0**63, x.dtype)
        upper = lax.ge(x, half)
        low = _to_signed(lax.select(upper, lax.sub(x, half), x), np.dtype(np.int64))
        return lax.convert_element_type(lax.bitwise_xor(low, lax.select(upper, full_like(low, -(2**63)), full_like(low, 0))), dtype)
    # Whole float32 numbers that int32 does not hold are multiples of 256: as uint8 they are 0, as is the lowest integer.
    is_wide = dtype in (np.int64, np.uint32) or (dtype == np.uint8 and x.dtype == np.float64)
    return lax.convert_element_type(_to_signed(x, np.dtype(np.int64 if is_wide else np.int32)), dtype)


def _to_signed(x: jax.Array, dtype: DType) -> jax.Array:
    """As x86 makes int32 and int64 of floats. One comparison is enough: the lowest integer is what also becomes of itself."""
    limits = np.iinfo(dtype)
    fits = lax.lt(lax.abs(x), number(-float(limits.min), x.dtype))
    return lax.select(fits, lax.convert_element_type(x, dtype), full_like(x, limits.min, dtype))


def number(value: Any, dtype: DType) -> Any:
    """A Python number as a NumPy scalar of `dtype`, as ATen casts them: integers wrap, floats overflow to infinity.

    JAX's elementwise primitives take it beside an array of that dtype and broadcast it. An open number is an array of rank 0, which they
    take as well, and so is one that follows from symbolic sizes.
    """
    if is_open(value):
        return value.cast(dtype)
    if is_symbolic(value):
        array = as_array(value)
        return convert(convert(array, np.dtype(np.float32)) if np.dtype(dtype).itemsize < 4 and dtypes.is_float(dtype) else array, dtype)
    if isinstance(value, complex) and not dtypes.is_complex(dtype):
        value = value.real
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.asarray(value)
        if np.dtype(dtype).itemsize < 4 and dtypes.is_float(dtype):
            array = array.astype(np.float32)
        return array.astype(dtype)[()]


def full_like(array: jax.Array, value: Any, dtype: DType | None = None) -> jax.Array:
    """An array like `array` that holds one number everywhere; cheaper to trace than `lax.full_like`."""
    return lax.broadcast_in_dim(number(value, dtype or array.dtype), array.shape, ())


def broadcast_shapes(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The common shape. Raises: ValueError if there is none."""
    if not any(export.is_symbolic_dim(size) for shape in shapes for size in shape):
        return np.broadcast_shapes(*map(tuple, shapes))
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True)
    # torch has compared these sizes: a symbolic one is not 1, and equal to others beside it that are not.
    return tuple(next((size for size in column if export.is_symbolic_dim(size) or size != 1), 1) for column in columns)


def broadcast(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """All arrays at their common shape (NumPy's rules, which are ATen's)."""
    shape = broadcast_shapes([array.shape for array in arrays])
    return [expand(array, shape) for array in arrays]


def expand(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Broadcast to `shape`, aligning the trailing dimensions. Raises: ValueError if the array cannot have that shape."""
    if array.shape == tuple(shape):
        return array
    offset = len(shape) - array.ndim
    kept = [dim for dim in range(array.ndim) if array.shape[dim] == shape[dim + offset]]
    if len(kept) < array.ndim:
        if any(type(size) is int and size != 1 for dim, size in enumerate(array.shape) if dim not in kept):
            raise ValueError(f"{array.shape} does not broadcast to {tuple(shape)}")
        array = lax.reshape(array, [array.shape[dim] for dim in kept])
    return lax.broadcast_in_dim(array, tuple(shape), [dim + offset for dim in kept])


def elementwise(function: Any, operands: Sequence[Any], kind: Promotion, *, wide_second: bool = False) -> jax.Array:
    """Apply `function` to promoted, broadcast operands and cast its result.

    On the CPU, ATen casts operands to the common dtype before it computes in a wider one: beside a tensor of a half type, a number or a
    rank-0 float32 is rounded to that type first. wide_second: but not a second operand of one element, as in products and quotients.
    """
    computation, result = computation_and_result_dtype(operands, kind)
    common = result_type(operands) if getattr(_here, "rounds_operands", False) else computation

    def cast(position: int, operand: Any) -> jax.Array:
        is_array = isinstance(operand, jax.Array)
        is_exact = common.itemsize >= computation.itemsize or not dtypes.is_float(common) or (is_array and dtypes.is_bool(operand.dtype))
        if is_exact or (wide_second and position == 1 and (not is_array or all(size == 1 for size in operand.shape))):
            return convert(operand, computation)
        return convert(convert(operand, common), computation)

    out = function(*broadcast([cast(position, operand) for position, operand in enumerate(operands)]))
    return convert(out, result)
