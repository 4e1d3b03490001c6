"""ATen's type promotion and casts, as operations on JAX arrays.

Tensors with dimensions have priority over rank-0 tensors, and rank-0 tensors over Python numbers. An operand of lower priority affects the
common dtype only if its category (bool < int < float < complex) is higher: int32[2] + 1.5 gives the default float, float16[2] + 1.5 gives
float16.

Source: c10/core/ScalarType (promoteTypes), ATen/native/TypeProperties.cpp (result_type)
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
from .dynamic_scalars import is_dynamic
from .eager import EagerBehavior
from .symbolic_numbers import as_array, is_symbolic


class Promotion(enum.Enum):
    """The dtypes in which an elementwise op computes and returns, as in `torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND`."""

    DEFAULT = enum.auto()  # computes in the common dtype (half types in float32), returns the common dtype
    NO_OPMATH = enum.auto()  # like DEFAULT, but half types are not computed in float32: for copies and comparisons, which are exact anyway
    INT_TO_FLOAT = enum.auto()  # like DEFAULT, but integers become the default float
    ALWAYS_BOOL = enum.auto()  # computes in the common dtype, returns bool
    COMPLEX_TO_FLOAT = enum.auto()  # like DEFAULT, but the result of complex operands has their real dtype (abs)
    BOOL_TO_LONG = enum.auto()  # computes in the common dtype, bool operands in int64


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """Returns the common dtype of operands of higher and of lower priority; None stands for no operands."""
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
    """Returns the dtype of a Python number in ATen's promotion."""
    if isinstance(number, (bool, np.bool_)):
        return torch.bool
    if isinstance(number, (int, np.integer)) or export.is_symbolic_dim(number):
        return torch.int64
    if isinstance(number, (float, np.floating)):
        return dtypes.default()
    return dtypes.default().to_complex()


def result_type(operands: Sequence[Any]) -> DType:
    """Returns the common dtype of arrays and Python numbers, as `torch.result_type` does."""
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
        raise UnsupportedOp(
            "float16 together with a complex number gives complex32, which JAX does not have", hint="convert to float32 first"
        )
    return dtypes.to_jax(common)


def computation_and_result_dtype(operands: Sequence[Any], kind: Promotion) -> tuple[DType, DType]:
    """Returns the dtype to compute in, and the dtype of the result."""
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
    """Casts an array or a Python number to an array of `dtype`, as ATen's copies do: complex to real drops the imaginary part."""
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
            # XLA would rewrite the product of x and a converted bool to a select of x or 0, but inf * 0 must be NaN.
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
    """True if this torch casts numbers above 448, the maximum of float8_e4m3fn, to 448, infinity included.

    Releases after 2.11 do. XLA's cast returns NaN.
    """
    with _disable_current_modes():
        return bool(torch.tensor([torch.inf]).to(torch.float8_e4m3fn).float() == 448)


def _to_power_of_two(x: jax.Array) -> jax.Array:
    """Casts float32 to float8_e8m0fnu, whose 8 bits are an exponent.

    The sign is lost, ties round up, and zero becomes the smallest power of two. XLA's own cast returns NaN for zero and for negative
    numbers.

    Source: c10/util/Float8_e8m0fnu.h, fp8e8m0fnu_from_fp32_value
    """
    bits = lax.bitcast_convert_type(x, np.uint32)

    def constant(value: int) -> jax.Array:
        return full_like(bits, value)

    exponent = lax.bitwise_and(lax.shift_right_logical(bits, constant(23)), constant(0xFF))
    mantissa = lax.bitwise_and(bits, constant(0x7FFFFF))
    half = constant(0x400000)
    rounds_up = lax.select(lax.eq(exponent, constant(0)), lax.gt(mantissa, half), lax.ge(mantissa, half))
    rounded = lax.min(lax.add(exponent, lax.convert_element_type(rounds_up, np.uint32)), constant(0xFF))
    return lax.bitcast_convert_type(lax.convert_element_type(rounded, np.uint8), _E8M0)


_thread = threading.local()


@contextlib.contextmanager
def casting_as(eager: EagerBehavior) -> Iterator[None]:
    """Makes the casts in this thread behave as those of a platform's ATen kernels while the context is open."""
    outer = getattr(_thread, "casts_like_x86", False), getattr(_thread, "rounds_operands", False)
    _thread.casts_like_x86, _thread.rounds_operands = eager.casts_like_x86, eager.rounds_operands
    try:
        yield
    finally:
        _thread.casts_like_x86, _thread.rounds_operands = outer


def _float_to_integer(x: jax.Array, dtype: DType) -> jax.Array:
    """Casts a float to an integer, rounding towards zero.

    In C++ the result is undefined for NaN and for numbers out of range, so ATen's result depends on the processor. XLA saturates, as CUDA
    and ARM do. The instructions of x86 return the lowest integer in all these cases.

    Casts to narrow dtypes go through int32 and wrap: -1.0 becomes 255 as uint8. Casts to uint32, and from float64 to uint8, go through
    int64. For numbers below the range of int32 or above that of uint32, ATen's vectorized loops and scalar loops return different uint32
    (the scalar loops run over the remainder, and over strided memory). This function returns the result of the scalar loops.

    Source: the instructions CVTTSS2SI and CVTTPS2DQ; c10/util/TypeCast.h, static_cast_with_inter_type
    """
    if not getattr(_thread, "casts_like_x86", False):
        return lax.convert_element_type(lax.convert_element_type(x, np.int32) if dtype.itemsize < 4 else x, dtype)
    if x.dtype.itemsize < 4:
        x = lax.convert_element_type(
            x, np.float32
        )  # once: XLA:CPU would convert in each operation below; also, some float8 dtypes have no infinity
    if dtype == np.uint64:
        half = number(2.0**63, x.dtype)
        is_upper_half = lax.ge(x, half)
        low_bits = _to_signed(lax.select(is_upper_half, lax.sub(x, half), x), np.dtype(np.int64))
        high_bit = lax.select(is_upper_half, full_like(low_bits, -(2**63)), full_like(low_bits, 0))
        return lax.convert_element_type(lax.bitwise_xor(low_bits, high_bit), dtype)
    # A float32 outside the range of int32 is a multiple of 256 and wraps to 0 as uint8. So does the lowest integer.
    is_wide = dtype in (np.int64, np.uint32) or (dtype == np.uint8 and x.dtype == np.float64)
    return lax.convert_element_type(_to_signed(x, np.dtype(np.int64 if is_wide else np.int32)), dtype)


def _to_signed(x: jax.Array, dtype: DType) -> jax.Array:
    """Casts floats to int32 or int64 as x86 does: to the lowest integer where a number is NaN or out of range.

    The comparison |x| < 2**31 (or 2**63) is false for the lowest integer, too, but there the result is the lowest integer in any case.
    """
    limits = np.iinfo(dtype)
    is_in_range = lax.lt(lax.abs(x), number(-float(limits.min), x.dtype))
    return lax.select(is_in_range, lax.convert_element_type(x, dtype), full_like(x, limits.min, dtype))


def number(value: Any, dtype: DType) -> Any:
    """Returns a Python number as a NumPy scalar of `dtype`, cast as ATen casts it: integers wrap, floats overflow to infinity.

    JAX's elementwise primitives accept the scalar as an operand next to an array of that dtype, and broadcast it. A dynamic scalar (see
    dynamic_scalars.py), or a number that depends on symbolic sizes, becomes an array of rank 0, which the primitives accept as well.
    """
    if is_dynamic(value):
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
    """Returns an array filled with one number, with the shape of `array`. Cheaper to trace than `lax.full_like`."""
    return lax.broadcast_in_dim(number(value, dtype or array.dtype), array.shape, ())


def times(x: jax.Array, factor: Any) -> jax.Array:
    """Returns x * factor, in the dtype of x. The factor is a number."""
    return lax.mul(x, number(factor, x.dtype))


def plus(x: jax.Array, term: Any) -> jax.Array:
    """Returns x + term, in the dtype of x. The term is a number."""
    return lax.add(x, number(term, x.dtype))


def to_accumulator(array: jax.Array) -> jax.Array:
    """Casts an array to the dtype in which ATen accumulates its elements."""
    return convert(array, dtypes.accumulator(array.dtype))


def broadcast_like(value: Any, x: jax.Array, axis: int | None = None) -> jax.Array:
    """Broadcasts `value` to the shape and dtype of x.

    `value` is a number or a tensor with one element. With an `axis`, it is a number, or a vector with one value for each index of `axis`.
    """
    if not isinstance(value, jax.Array):
        return full_like(x, value)
    value = convert(value, x.dtype)
    return lax.broadcast_in_dim(lax.reshape(value, ()) if axis is None else value, x.shape, () if axis is None else (axis,))


def broadcast_shapes(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the shape to which all shapes broadcast.

    Raises:
        ValueError: The shapes cannot be broadcast together.
    """
    if not any(export.is_symbolic_dim(size) for shape in shapes for size in shape):
        return np.broadcast_shapes(*map(tuple, shapes))
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True)
    # Torch has compared these sizes: a symbolic size is not 1, and equals all other sizes of its dimension that are not 1.
    return tuple(next((size for size in column if export.is_symbolic_dim(size) or size != 1), 1) for column in columns)


def broadcast(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Broadcasts all arrays to their common shape (NumPy's rules, which are ATen's)."""
    shape = broadcast_shapes([array.shape for array in arrays])
    return [expand(array, shape) for array in arrays]


def expand(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Broadcasts an array to `shape`; the trailing dimensions are aligned.

    Raises:
        ValueError: The array does not broadcast to `shape`.
    """
    if array.shape == tuple(shape):
        return array
    offset = len(shape) - array.ndim
    kept = [dim for dim in range(array.ndim) if array.shape[dim] == shape[dim + offset]]
    if len(kept) < array.ndim:
        if any(type(size) is int and size != 1 for dim, size in enumerate(array.shape) if dim not in kept):
            raise ValueError(f"{array.shape} does not broadcast to {tuple(shape)}")
        array = lax.reshape(array, [array.shape[dim] for dim in kept])
    return lax.broadcast_in_dim(array, tuple(shape), [dim + offset for dim in kept])


def expand_leading(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Broadcasts an array to `shape`; the leading dimensions are aligned."""
    return lax.broadcast_in_dim(array, tuple(shape), range(array.ndim))


def broadcast_back(result: jax.Array, shape: Sequence[int], dims: Sequence[int]) -> jax.Array:
    """Broadcasts the result of a reduction over dims back to `shape`."""
    return lax.broadcast_in_dim(result, tuple(shape), [dim for dim in range(len(shape)) if dim not in dims])


def elementwise(function: Any, operands: Sequence[Any], kind: Promotion, *, wide_second: bool = False) -> jax.Array:
    """Applies `function` to promoted and broadcast operands, and casts its result.

    On the CPU, ATen casts operands to the common dtype before it computes in a wider one. So if the other operand is a half-precision
    tensor, a number or a rank-0 float32 is first rounded to half precision.

    Args:
        function: A function of arrays of one dtype and one shape.
        operands: Arrays and Python numbers.
        kind: The kind of promotion.
        wide_second: If True, a second operand that is a number or has one element is not rounded, as in ATen's products and quotients.
    """
    computation, result = computation_and_result_dtype(operands, kind)
    common = result_type(operands) if getattr(_thread, "rounds_operands", False) else computation

    def cast(position: int, operand: Any) -> jax.Array:
        is_array = isinstance(operand, jax.Array)
        is_exact = common.itemsize >= computation.itemsize or not dtypes.is_float(common) or (is_array and dtypes.is_bool(operand.dtype))
        if is_exact or (wide_second and position == 1 and (not is_array or all(size == 1 for size in operand.shape))):
            return convert(operand, computation)
        return convert(convert(operand, common), computation)

    out = function(*broadcast([cast(position, operand) for position, operand in enumerate(operands)]))
    return convert(out, result)
