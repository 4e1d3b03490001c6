"""Creation of tensors, copies, casts, complex numbers, and views as another dtype.

Most of these lowerings take shape and dtype from PyTorch's own metadata of the result (`ctx.output`), in which every default is resolved.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dtypes import DType
from ..promotion import broadcast, convert, expand, full_like, number
from ..registry import lower_table, lowers
from .float_bits import bitcast


def _filled(value: Any, ctx: Context) -> Array:
    """Returns a tensor with the shape and dtype of the current node's result, filled with one number."""
    spec = ctx.output
    return lax.broadcast_in_dim(number(value, spec.jax_dtype), spec.shape, ())


@lowers(aten.full.default)
def full(size: Any, value: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """A tensor of shape `size`, filled with one number.

    Dtype:  `dtype` if given, else that of the number: bool, int64, or the default float or complex.
    """
    return _filled(value, ctx)


@lowers(aten.full_like.default)
def full_like_tensor(x: Array, value: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """A tensor of x's shape, filled with one number.

    Dtype:  `dtype` if given, else that of x.
    """
    return _filled(value, ctx)


@lowers(aten.new_full.default)
def new_full(x: Array, size: Any, value: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """A tensor of shape `size`, filled with one number.

    Dtype:  `dtype` if given, else that of x.
    """
    return _filled(value, ctx)


@lowers(aten.scalar_tensor.default)
def scalar_tensor(value: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """A number as a tensor.

    Shape:  [].
    Dtype:  `dtype` if given, else the default float.
    """
    return _filled(value, ctx)


@lowers(aten.zeros.default, aten._efficientzerotensor.default, aten.empty.memory_format)
def zeros(size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Zeros. `empty` gives zeros too, so that every call of a program returns the same results.

    Dtype:  `dtype` if given, else the default float.
    """
    return _filled(0, ctx)


@lowers(aten.empty_strided.default, aten.empty_permuted.default)
def empty_strided(size: Any, layout: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Zeros. `layout` (strides, or an order of dimensions) is not read: a JAX array has no strides.

    Dtype:  `dtype` if given, else the default float.
    """
    return _filled(0, ctx)


@lowers(aten.zeros_like.default, aten.empty_like.default)
def zeros_like(x: Array, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Zeros in the shape of x. `empty_like` gives zeros, too.

    Dtype:  `dtype` if given, else that of x.
    """
    return _filled(0, ctx)


@lowers(aten.new_zeros.default, aten.new_empty.default)
def new_zeros(x: Array, size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Zeros of shape `size`. `new_empty` gives zeros, too.

    Dtype:  `dtype` if given, else that of x.
    """
    return _filled(0, ctx)


@lowers(aten.new_empty_strided.default)
def new_empty_strided(x: Array, size: Any, stride: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Zeros. `stride` is not read: a JAX array has no strides.

    Dtype:  `dtype` if given, else that of x.
    """
    return _filled(0, ctx)


@lowers(aten.ones.default)
def ones(size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Ones.

    Dtype:  `dtype` if given, else the default float.
    """
    return _filled(1, ctx)


@lowers(aten.ones_like.default)
def ones_like(x: Array, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Ones in the shape of x.

    Dtype:  `dtype` if given, else that of x.
    """
    return _filled(1, ctx)


@lowers(aten.new_ones.default)
def new_ones(x: Array, size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Ones of shape `size`.

    Dtype:  `dtype` if given, else that of x.
    """
    return _filled(1, ctx)


# Ranges and the identity


def _counting_dtype(dtype: DType) -> DType:
    """Returns the dtype in which ATen computes arange: float32 for half types, float64 for other floats, int64 for other dtypes."""
    if not dtypes.is_float(dtype):
        return np.dtype(np.int64)
    return dtypes.accumulator(dtype) if dtype.itemsize < 4 else np.dtype(np.float64)


@lowers(aten.arange.start_step)
def arange(start: Any, end: Any, step: Any = 1, *, dtype: DType | None = None, ctx: Context) -> Array:
    """start, start + step, and so on, up to but not including end.

    Shape:  [ceil((end - start) / step)].
    Dtype:  `dtype` if given; int64 if start, end and step are integers, else the default float.
    """
    spec = ctx.output
    counting_dtype = _counting_dtype(spec.jax_dtype)
    if dtypes.is_integer(counting_dtype):
        start, step = int(start), int(step)
    steps = lax.iota(counting_dtype, spec.shape[0])
    if step != 1:
        steps = lax.mul(steps, number(step, counting_dtype))
    if start != 0:
        steps = lax.add(steps, number(start, counting_dtype))
    return convert(steps, spec.jax_dtype)


@lowers(aten.arange.start)
def arange_start(start: Any, end: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Same as `arange`, with step 1."""
    return arange(start, end, ctx=ctx)


@lowers(aten.arange.default)
def arange_to(end: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Same as `arange`, from 0 with step 1."""
    return arange(0, end, ctx=ctx)


@lowers(aten.linspace.default, aten.linspace.Tensor_Tensor, aten.linspace.Tensor_Scalar, aten.linspace.Scalar_Tensor)
def linspace(start: Any, end: Any, steps: int, *, dtype: DType | None = None, ctx: Context) -> Array:
    """`steps` evenly spaced numbers from start to end, both included. Each number is computed from the nearer end: both ends are exact.

    Shape:  [steps].
    Dtype:  `dtype` if given, else the default float, or the default complex dtype for complex ends.
    Source: ATen native/cpu/RangeFactoriesKernel.cpp, linspace_kernel
    """
    return evenly_spaced(start, end, steps, ctx.output.jax_dtype)


def evenly_spaced(start: Any, end: Any, steps: int, dtype: DType) -> Array:
    """Same as `linspace`, with a result of `dtype`. The ends are numbers or arrays of rank 0."""
    start, end = (convert(value, dtype) if isinstance(value, Array) else number(value, dtype) for value in (start, end))
    if steps < 2:
        return lax.broadcast(start, (steps,))
    if dtypes.is_integer(dtype):
        # As in ATen, the step is a float32, for 64-bit integers a float64, and each value is truncated.
        counting_dtype = np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)
    elif dtypes.is_complex(dtype):
        counting_dtype = dtype
    else:
        counting_dtype = dtypes.accumulator(dtype)
    exact_dtype = np.dtype(np.complex128 if dtypes.is_complex(dtype) else np.float64)
    distance = lax.sub(convert(end, exact_dtype), convert(start, exact_dtype))
    # The barrier keeps XLA from replacing the division by a multiplication with a rounded reciprocal.
    step = convert(lax.div(distance, lax.optimization_barrier(lax.full((), steps - 1, exact_dtype))), counting_dtype)
    from_start = convert(lax.iota(np.int64, steps), counting_dtype)
    from_end = lax.sub(number(steps - 1, counting_dtype), from_start)
    first_half = lax.add(convert(start, counting_dtype), lax.mul(from_start, step))
    second_half = lax.sub(convert(end, counting_dtype), lax.mul(from_end, step))
    return convert(lax.select(lax.lt(lax.iota(np.int64, steps), np.int64(steps // 2)), first_half, second_half), dtype)


@lowers(aten.eye.m)
def eye(rows: int, columns: int, *, dtype: DType | None = None, ctx: Context) -> Array:
    """A matrix with ones on its diagonal and zeros elsewhere.

    Shape:  (rows, columns).
    Dtype:  `dtype` if given, else the default float.
    """
    shape = (rows, columns)
    return convert(lax.eq(lax.broadcasted_iota(np.int64, shape, 0), lax.broadcasted_iota(np.int64, shape, 1)), ctx.output.jax_dtype)


@lowers(aten.eye.default)
def eye_square(size: int, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Same as `eye`, with as many columns as rows."""
    return eye(size, size, ctx=ctx)


# Copies and casts


@lowers(aten._to_copy.default)
def to_copy(x: Array, *, dtype: DType | None = None) -> Array:
    """x cast to another dtype. A cast to a real dtype drops the imaginary part, a cast to an integer dtype the fraction.

    Dtype:  `dtype` if given, else that of x.
    """
    return x if dtype is None else convert(x, dtype)


@lowers(aten.fill.Scalar, aten.fill.Tensor)
def fill(x: Array, value: Any) -> Array:
    """A tensor of x's shape, filled with one value.

    Dtype:  that of x.
    """
    return expand(convert(value, x.dtype), x.shape) if isinstance(value, jax.Array) else full_like(x, value)


@lowers(aten.copy.default)
def copy(x: Array, source: Array) -> Array:
    """`source` with the shape and dtype of x."""
    return expand(convert(source, x.dtype), x.shape)


# JAX's arrays have no conjugate bit and no negative bit. An array holds the values that a PyTorch tensor with such a bit represents.
lower_table(
    {
        aten.clone.default: lambda x: x,
        aten.zero.default: lambda x: full_like(x, 0),
        aten._conj_physical.default: jnp.conj,
        aten.conj_physical.default: jnp.conj,
        aten._neg_view.default: lax.neg,
        aten.resolve_conj.default: lambda x: x,
        aten.resolve_neg.default: lambda x: x,
        aten.real.default: lambda x: lax.real(x) if dtypes.is_complex(x.dtype) else x,
        aten.imag.default: lax.imag,
    }
)


@lowers(aten._conj.default)
def lazy_conjugate(x: Any, *, ctx: Context) -> Array:
    """The conjugate of x. x is a Python number in the gradient of a tensor times a number. The result then has shape []."""
    return jnp.conj(x if isinstance(x, Array) else lax.full((), number(x, ctx.output.jax_dtype)))


# Conversion between complex numbers and pairs of real numbers


@lowers(aten.complex.default)
def complex_from_parts(real: Array, imaginary: Array) -> Array:
    """Complex numbers from their parts, broadcast.

    Dtype:  complex64 for float32, complex128 for float64.
    """
    return lax.complex(*broadcast([real, imaginary]))


@lowers(aten.polar.default)
def polar(magnitude: Array, angle: Array) -> Array:
    """Complex numbers from their absolute values and angles, broadcast.

    Dtype:  complex64 for float32, complex128 for float64.
    """
    r, phi = broadcast([magnitude, angle])
    return lax.complex(lax.mul(r, lax.cos(phi)), lax.mul(r, lax.sin(phi)))


@lowers(aten.view_as_real.default, aten.view_as_real_copy.default)
def view_as_real(x: Array) -> Array:
    """Real and imaginary parts, stacked in a new last dimension.

    Shape:  that of x, followed by 2.
    Dtype:  float32 for complex64, float64 for complex128.
    """
    shape = (*x.shape, 1)
    return lax.concatenate([lax.reshape(lax.real(x), shape), lax.reshape(lax.imag(x), shape)], x.ndim)


@lowers(aten.view_as_complex.default, aten.view_as_complex_copy.default)
def view_as_complex(x: Array) -> Array:
    """Complex numbers from pairs of real and imaginary parts.

    Shape:  that of x without its last dimension, which has size 2.
    Dtype:  complex64 for float32, complex128 for float64.
    """
    shape = x.shape[:-1]
    real, imaginary = (lax.reshape(lax.slice_in_dim(x, part, part + 1, axis=x.ndim - 1), shape) for part in (0, 1))
    return lax.complex(real, imaginary)


@lowers(aten.view.dtype)
def view_dtype(x: Array, dtype: DType) -> Array:
    """The bytes of x, read as another dtype.

    Shape:  that of x; where the dtypes' sizes differ, the last dimension grows or shrinks by their ratio.
    Dtype:  `dtype`.
    """
    shape = x.shape
    if dtypes.is_complex(x.dtype):
        if x.dtype == dtype:
            return x
        # The real and imaginary parts alternate along the last dimension.
        x = view_as_real(x)
        x = lax.reshape(x, (*x.shape[:-2], 2 * x.shape[-2]) if x.ndim > 1 else (2,))
    if dtypes.is_bool(x.dtype):
        x = lax.convert_element_type(x, np.uint8)
    if dtypes.is_complex(dtype):
        pairs = _bitcast(x, dtypes.real(dtype))
        return view_as_complex(lax.reshape(pairs, (*pairs.shape[:-1], pairs.shape[-1] // 2, 2)))
    if dtypes.is_bool(dtype):
        return lax.ne(_bitcast(x, np.dtype(np.uint8)), np.uint8(0))
    out = _bitcast(x, dtype)
    return lax.reshape(out, shape) if out.size == math.prod(shape) else out


def _bitcast(x: Array, dtype: DType) -> Array:
    """Returns the bytes of x read as another dtype; neither dtype is bool or complex."""
    old_size, new_size = x.dtype.itemsize, np.dtype(dtype).itemsize
    if old_size < new_size:
        ratio = new_size // old_size
        x = lax.reshape(x, (*x.shape[:-1], x.shape[-1] // ratio, ratio))
    out = bitcast(x, dtype)
    if old_size > new_size:
        out = lax.reshape(out, (*x.shape[:-1], x.shape[-1] * (old_size // new_size)))
    return out
