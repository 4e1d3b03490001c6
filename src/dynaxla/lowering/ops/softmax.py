"""Lowerings of softmax, log_softmax and safe_softmax, and of their gradients."""

from __future__ import annotations

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..cpu.exponential import exp_nonpositive
from ..cpu.materialize import in_memory
from ..cpu.vectorized_reductions import fast_reduce_max, reduce_max, reduce_sum
from ..dimensions import definitely
from ..dtypes import DType
from ..promotion import broadcast_back, convert, number, to_accumulator
from ..registry import lowers

# Up to this number of rows, XLA:CPU recomputes the exponentials in each step of the loop that sums them, unless `in_memory` stores them.
_MAX_RECOMPUTED_ROWS = 8


def minus_largest(x: Array, largest: Array) -> Array:
    """Returns x - largest, for arrays of one shape. The difference is exactly 0 where x equals a finite `largest`.

    Without the minimum, this would not hold if x is a product a * b: XLA fuses both operations, and LLVM contracts them to
    `fma(a, b, -largest)`, which is the rounding error of a * b, up to 256 for 1e10 in float32. The minimum changes no finite number.
    """
    if not dtypes.is_float(x.dtype):
        return lax.sub(x, largest)
    return lax.sub(lax.min(x, number(np.finfo(x.dtype).max, x.dtype)), largest)


def _shifted(x: Array, dim: int) -> Array:
    """Returns x minus its largest value along `dim`, so that no exponential overflows.

    In a row with a NaN, the NaN stays NaN. The other elements of this row may be above 0, since `fast_reduce_max` is then undefined.
    """
    return minus_largest(x, broadcast_back(fast_reduce_max(x, (dim,)), x.shape, (dim,)))


def _widened(x: Array, dim: int) -> tuple[Array, int]:
    """Returns x in the accumulator's dtype and with a rank of at least 1, and `dim` as a nonnegative number."""
    wide = to_accumulator(x)
    return (wide, dim % x.ndim) if x.ndim else (lax.reshape(wide, (1,)), 0)


def _like_input(out: Array, x: Array, dtype: DType) -> Array:
    """Returns the result in the rank of x, which may be 0, and in `dtype`."""
    return convert(out if x.ndim else lax.reshape(out, ()), dtype)


def _result_dtype(x: Array, half_to_float: bool) -> DType:
    return dtypes.accumulator(x.dtype) if half_to_float else x.dtype


def _normalized_exponentials(wide: Array, dim: int) -> Array:
    weights = exp_nonpositive(_shifted(wide, dim))
    if definitely(lambda: wide.size <= _MAX_RECOMPUTED_ROWS * wide.shape[dim]):
        weights = in_memory(weights)
    return lax.div(weights, broadcast_back(reduce_sum(weights, (dim,)), wide.shape, (dim,)))


@lowers(aten._softmax.default)
def softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    """exp(x) / sum(exp(x)) along one dimension, shifted by the maximum so that exp does not overflow.

    Shape:  that of x.
    Dtype:  that of x; float32 for half types with `half_to_float`.
    """
    wide, dim = _widened(x, dim)
    return _like_input(_normalized_exponentials(wide, dim), x, _result_dtype(x, half_to_float))


@lowers(aten._log_softmax.default)
def log_softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    """The logarithm of softmax.

    Shape:  that of x.
    Dtype:  that of x; float32 for half types with `half_to_float`.
    """
    wide, dim = _widened(x, dim)
    shifted = _shifted(wide, dim)
    total = lax.log(reduce_sum(in_memory(exp_nonpositive(shifted)), (dim,)))
    return _like_input(lax.sub(shifted, broadcast_back(total, wide.shape, (dim,))), x, _result_dtype(x, half_to_float))


@lowers(aten._safe_softmax.default)
def safe_softmax(x: Array, dim: int, dtype: DType | None = None) -> Array:
    """Softmax that is 0, not NaN, where all values along `dim` are -inf.

    Shape:  that of x.
    Dtype:  `dtype` if given, else that of x.
    """
    result_dtype = dtype or x.dtype
    wide, dim = _widened(convert(x, result_dtype), dim)
    largest = reduce_max(wide, (dim,))
    is_all_minus_inf = lax.eq(largest, lax.full_like(largest, -float("inf")))
    out = _normalized_exponentials(wide, dim)
    return _like_input(lax.select(broadcast_back(is_all_minus_inf, wide.shape, (dim,)), lax.full_like(out, 0), out), x, result_dtype)


@lowers(aten._softmax_backward_data.default)
def softmax_backward(grad: Array, output: Array, dim: int, input_dtype: DType) -> Array:
    """The gradient of softmax's input.

    Shape:  that of the output.
    Dtype:  `input_dtype`, which may be narrower than the output's: a half type whose softmax was float32.
    """
    wide_grad, dim = _widened(grad, dim)
    wide_output, _ = _widened(output, dim)
    total = reduce_sum(lax.mul(wide_grad, wide_output), (dim,))
    return _like_input(lax.mul(lax.sub(wide_grad, broadcast_back(total, wide_grad.shape, (dim,))), wide_output), grad, input_dtype)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad: Array, output: Array, dim: int, input_dtype: DType) -> Array:
    """The gradient of log_softmax's input.

    Shape:  that of the output.
    Dtype:  `input_dtype`, which may be narrower than the output's: a half type whose log_softmax was float32.
    """
    wide_grad, dim = _widened(grad, dim)
    wide_output, _ = _widened(output, dim)
    total = broadcast_back(reduce_sum(wide_grad, (dim,)), wide_grad.shape, (dim,))
    return _like_input(lax.sub(wide_grad, lax.mul(lax.exp(wide_output), total)), grad, input_dtype)
