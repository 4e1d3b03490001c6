"""Lowerings of reductions over dimensions: sums, products, extrema and their indices, any and all, moments, norms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from jax import Array, lax
from torch.fx import Node

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu.vectorized_reductions import Reduction, reduce_max, reduce_min, reduce_prod, vectorized_sum
from ..dimensions import definitely, reduction_dims, wrap
from ..dtypes import DType
from ..memory_order import in_memory_order
from ..promotion import Promotion, broadcast_back, convert, elementwise, to_accumulator
from ..registry import lowers
from .comparison import is_nan
from .moments import mean_over
from .rounding import in_accumulator
from .softmax import minus_largest

Dims = int | Sequence[int] | None

_BOOL = np.dtype(np.bool_)
_INT64 = np.dtype(np.int64)


def apply_keepdim(result: Array, x: Array, dims: Sequence[int], keepdim: bool) -> Array:
    """Returns the result of a reduction of x over dims in its final shape: with keepdim, the reduced dimensions have size 1."""
    return lax.reshape(result, [1 if dim in dims else size for dim, size in enumerate(x.shape)]) if keepdim and x.ndim else result


def _reduce(ctx: Context, x: Array, dims: Sequence[int], reduce: Reduction) -> Array:
    """Returns reduce(x, dims).

    If x is the current node's first argument, x is first transposed to the memory order of the arrays from which x is computed. Without
    that, XLA:CPU takes 50 times as long for the sum of a transposed matrix.
    """
    (result,) = _reduce_to_several(ctx, x, dims, lambda x, dims: [reduce(x, dims)])
    return result


def _reduce_to_several(
    ctx: Context, x: Array, dims: Sequence[int], reduce: Callable[[Array, Sequence[int]], Sequence[Array]]
) -> Sequence[Array]:
    """Like `_reduce`, for a function `reduce` that returns several arrays."""
    node = next(iter(ctx.node.args), None)
    if not isinstance(node, Node) or node not in ctx.values or ctx.values[node] is not x:
        return reduce(x, dims)
    operand, new_dims = in_memory_order(ctx, 0, x)
    results = reduce(operand, tuple(sorted(new_dims[dim] for dim in dims)))
    remaining = [d for dim, d in enumerate(new_dims) if dim not in dims]
    if remaining == sorted(remaining):
        return results
    return [lax.transpose(result, [sorted(remaining).index(d) for d in remaining]) for result in results]


def _reduce_in(ctx: Context, x: Array, dim: Dims, keepdim: bool, dtype: DType, reduce: Reduction, *, is_cast_first: bool = True) -> Array:
    """Returns reduce(x, dim) in `dtype`, computed in the accumulator of `dtype`. With `is_cast_first`, x is first rounded to `dtype`."""
    dims = reduction_dims(dim, x.ndim)
    widened = in_accumulator if is_cast_first else lambda x, dtype: convert(x, dtypes.accumulator(dtype))
    result = _reduce(ctx, x, dims, lambda x, dims: reduce(widened(x, dtype), dims))
    return apply_keepdim(convert(result, dtype), x, dims, keepdim)


@lowers(aten.sum.dim_IntList)
def sum_(x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None, ctx: Context) -> Array:
    """The sum over some dimensions. Half types are added in float32; a sum with dtype bool is a logical or.

    Shape:  x without `dim` (all dimensions if None or empty); with `keepdim` these dimensions have size 1.
    Dtype:  `dtype` if given, int64 for bool and integers, else that of x.
    """
    out = dtype or dtypes.widen_integers(x.dtype)
    return _reduce_in(ctx, x, dim, keepdim, out, lax.reduce_or if out == np.bool_ else ctx.sum)


@lowers(aten.sum.default)
def sum_all(x: Array, *, dtype: DType | None = None, ctx: Context) -> Array:
    """The sum of all elements.

    Shape:  [].
    Dtype:  `dtype` if given, int64 for bool and integers, else that of x.
    """
    return sum_(x, dtype=dtype, ctx=ctx)


@lowers(aten.mean.dim)
def mean(x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None, ctx: Context) -> Array:
    """The mean over some dimensions; nan for a mean of no elements. Half types are added in float32.

    Shape:  x without `dim` (all dimensions if None or empty); with `keepdim` these dimensions have size 1.
    Dtype:  `dtype` if given, else that of x, which must be a float or complex dtype.
    """
    return _reduce_in(ctx, x, dim, keepdim, dtype or x.dtype, lambda x, dims: mean_over(x, dims, ctx.sum), is_cast_first=False)


@lowers(aten.mean.default)
def mean_all(x: Array, *, dtype: DType | None = None, ctx: Context) -> Array:
    """The mean of all elements.

    Shape:  [].
    Dtype:  as for `mean`.
    """
    return mean(x, dtype=dtype, ctx=ctx)


@lowers(aten.prod.dim_int)
def prod(x: Array, dim: int | None, keepdim: bool = False, *, dtype: DType | None = None, ctx: Context) -> Array:
    """The product along one dimension. Half types are multiplied in float32; a product with dtype bool is a logical and.

    Shape:  x without `dim` (all dimensions if None); with `keepdim` it has size 1.
    Dtype:  `dtype` if given, int64 for bool and integers, else that of x.
    """
    out = dtype or dtypes.widen_integers(x.dtype)
    return _reduce_in(ctx, x, dim, keepdim, out, lax.reduce_and if out == np.bool_ else reduce_prod)


@lowers(aten.prod.default)
def prod_all(x: Array, *, dtype: DType | None = None, ctx: Context) -> Array:
    """The product of all elements.

    Shape:  [].
    Dtype:  as for `prod`.
    """
    return prod(x, None, dtype=dtype, ctx=ctx)


@lowers(aten.nansum.default)
def nansum(x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None, ctx: Context) -> Array:
    """The sum of the elements that are not nan.

    Shape:  x without `dim` (all dimensions if None or empty); with `keepdim` these dimensions have size 1.
    Dtype:  `dtype` if given, int64 for bool and integers, else that of x.
    """
    if dtypes.is_inexact(x.dtype):
        x = lax.select(is_nan(x), lax.full_like(x, 0), x)
    return sum_(x, dim, keepdim, dtype=dtype, ctx=ctx)


@lowers(aten.amax.default)
def amax(x: Array, dim: Dims = (), keepdim: bool = False, *, ctx: Context) -> Array:
    """The largest element over some dimensions; nan if any element is nan.

    Shape:  x without `dim` (all dimensions if None or empty); with `keepdim` these dimensions have size 1.
    Dtype:  that of x.
    """
    dims = reduction_dims(dim, x.ndim)
    return apply_keepdim(_reduce(ctx, x, dims, ctx.max), x, dims, keepdim)


@lowers(aten.amin.default)
def amin(x: Array, dim: Dims = (), keepdim: bool = False, *, ctx: Context) -> Array:
    """The smallest element over some dimensions; nan if any element is nan.

    Shape:  x without `dim` (all dimensions if None or empty); with `keepdim` these dimensions have size 1.
    Dtype:  that of x.
    """
    dims = reduction_dims(dim, x.ndim)
    return apply_keepdim(_reduce(ctx, x, dims, ctx.min), x, dims, keepdim)


@lowers(aten.aminmax.default)
def aminmax(x: Array, *, dim: int | None = None, keepdim: bool = False, ctx: Context) -> tuple[Array, Array]:
    """The smallest and the largest element; both are nan if any element is nan.

    Shape:  x without `dim` (all dimensions if None); with `keepdim` it has size 1. Both results have this shape.
    Dtype:  that of x.
    """
    return amin(x, dim, keepdim, ctx=ctx), amax(x, dim, keepdim, ctx=ctx)


def first_index(hits: Array, dim: int) -> Array:
    """Returns the first index along `dim` at which `hits` is True. Each vector along `dim` must have a True element."""
    size = hits.shape[dim]
    dtype = "int32" if definitely(lambda: size < 2**31) else "int64"
    indices = lax.broadcasted_iota(dtype, hits.shape, dim)
    return convert(reduce_min(lax.select(hits, indices, lax.full_like(indices, size - 1)), (dim,)), _INT64)


def _extremum_and_index(x: Array, dim: int, reduce: Reduction) -> tuple[Array, Array]:
    """Returns the extremum along one dimension, and its first index. NaN counts as the extremum, for both maximum and minimum.

    Extremum and index are computed by two reductions, since XLA does not vectorize a reduction over pairs of value and index.
    """
    best = reduce(x, (dim,))
    hits = lax.eq(x, broadcast_back(best, x.shape, (dim,)))
    if dtypes.is_float(x.dtype):
        hits = lax.bitwise_or(hits, is_nan(x))
    return best, first_index(hits, dim)


def _extremum_of_dim(x: Array, dim: int, keepdim: bool, reduce: Reduction) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, lax.full((), 0, _INT64)
    dim = wrap(dim, x.ndim)
    if 0 in x.shape:
        shape = [size for d, size in enumerate(x.shape) if d != dim]
        best, index = lax.full(shape, 0, x.dtype), lax.full(shape, 0, _INT64)
    else:
        best, index = _extremum_and_index(x, dim, reduce)
    return apply_keepdim(best, x, (dim,), keepdim), apply_keepdim(index, x, (dim,), keepdim)


@lowers(aten.max.dim)
def max_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The largest element along one dimension, and its first index. If there are nans, the first nan.

    Shape:  x without `dim`; with `keepdim` it has size 1. Both results have this shape.
    Dtype:  that of x, and int64 for the indices.
    """
    return _extremum_of_dim(x, dim, keepdim, reduce_max)


@lowers(aten.min.dim)
def min_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    """The smallest element along one dimension, and its first index. If there are nans, the first nan.

    Shape:  x without `dim`; with `keepdim` it has size 1. Both results have this shape.
    Dtype:  that of x, and int64 for the indices.
    """
    return _extremum_of_dim(x, dim, keepdim, reduce_min)


@lowers(aten.max.default)
def max_all(x: Array, *, ctx: Context) -> Array:
    """The largest element of all; nan if any element is nan.

    Shape:  [].
    Dtype:  that of x.
    """
    return amax(x, ctx=ctx)


@lowers(aten.min.default)
def min_all(x: Array, *, ctx: Context) -> Array:
    """The smallest element of all; nan if any element is nan.

    Shape:  [].
    Dtype:  that of x.
    """
    return amin(x, ctx=ctx)


def _arg_extremum(x: Array, dim: int | None, keepdim: bool, reduce: Reduction) -> Array:
    if dim is None:
        index = _extremum_of_dim(lax.reshape(x, (x.size,)), 0, False, reduce)[1]
        return lax.reshape(index, (1,) * x.ndim) if keepdim else index
    return _extremum_of_dim(x, dim, keepdim, reduce)[1]


@lowers(aten.argmax.default)
def argmax(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The index of the largest element: the first of several equal ones, and the first nan if there is one.

    Shape:  x without `dim`. If `dim` is None, the shape is [], and the index is that in the flattened x. With `keepdim`, reduced dimensions
            have size 1.
    Dtype:  int64.
    """
    return _arg_extremum(x, dim, keepdim, reduce_max)


@lowers(aten.argmin.default)
def argmin(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """The index of the smallest element: the first of several equal ones, and the first nan if there is one.

    Shape:  as for `argmax`.
    Dtype:  int64.
    """
    return _arg_extremum(x, dim, keepdim, reduce_min)


def _logical_dtype(x: Array) -> DType:
    """Returns the result dtype of any and all: uint8 for uint8, which was PyTorch's first bool dtype, else bool."""
    return x.dtype if x.dtype == np.uint8 else _BOOL


@lowers(aten.any.dim, aten.any.dims)
def any_(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """True if at least one element is nonzero. NaN is nonzero.

    Shape:  x without `dim` (all dimensions if None, none if it is an empty list). With `keepdim` these dimensions have size 1.
    Dtype:  bool; uint8 for uint8.
    """
    dims = _logical_dims(dim, x.ndim)
    return apply_keepdim(convert(lax.reduce_or(convert(x, _BOOL), dims), _logical_dtype(x)), x, dims, keepdim)


@lowers(aten.all.dim, aten.all.dims)
def all_(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    """True if no element is zero. NaN is nonzero.

    Shape:  as for `any_`.
    Dtype:  bool; uint8 for uint8.
    """
    dims = _logical_dims(dim, x.ndim)
    return apply_keepdim(convert(lax.reduce_and(convert(x, _BOOL), dims), _logical_dtype(x)), x, dims, keepdim)


def _logical_dims(dim: Dims, rank: int) -> tuple[int, ...]:
    """Returns the dimensions that any and all reduce. Unlike sums, they reduce no dimension for an empty list."""
    return () if dim is not None and not isinstance(dim, int) and not len(dim) else reduction_dims(dim, rank)


@lowers(aten.any.default)
def any_all(x: Array) -> Array:
    """True if at least one element is nonzero.

    Shape:  [].
    Dtype:  bool; uint8 for uint8.
    """
    return any_(x)


@lowers(aten.all.default)
def all_all(x: Array) -> Array:
    """True if no element is zero.

    Shape:  [].
    Dtype:  bool; uint8 for uint8.
    """
    return all_(x)


@lowers(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(x: Array, dim: Dims = None) -> Array:
    """The number of nonzero elements.

    Shape:  x without `dim` (all dimensions if None or empty).
    Dtype:  int64.
    """
    return lax.reduce_sum(convert(convert(x, _BOOL), _INT64), reduction_dims(dim, x.ndim))


@lowers(aten.hash_tensor.default)
def hash_tensor(x: Array, dim: Dims = (), *, keepdim: bool = False, mode: int = 0) -> Array:
    """The exclusive or of the bits of all elements, after conversion of floats to float64 and of other dtypes to int64.

    Shape:  x without `dim` (all dimensions if None or empty); with `keepdim` these dimensions have size 1.
    Dtype:  uint64.
    """
    dims = reduction_dims(dim, x.ndim)
    wide = convert(x, np.dtype(np.float64)) if dtypes.is_float(x.dtype) else convert(x, _INT64)
    return apply_keepdim(lax.reduce_xor(lax.bitcast_convert_type(wide, np.uint64), dims), x, dims, keepdim)


def _moments(ctx: Context, x: Array, dim: Dims, correction: float | None) -> tuple[Array, Array, tuple[int, ...]]:
    """Returns variance and mean in the accumulator's dtype, and the reduced dimensions.

    The variance of complex numbers is the sum of the variances of their real and imaginary parts.
    """
    dims = reduction_dims(dim, x.ndim)
    count = math.prod(x.shape[d] for d in dims)
    divisor = max(count - (1 if correction is None else correction), 0)

    def moments(x: Array, dims: Sequence[int]) -> tuple[Array, Array]:
        x = to_accumulator(x)
        mean = mean_over(x, dims, vectorized_sum)
        deviations = lax.sub(x, broadcast_back(mean, x.shape, dims))
        parts = [lax.real(deviations), lax.imag(deviations)] if dtypes.is_complex(x.dtype) else [deviations]
        sum_of_squares = functools.reduce(lax.add, [vectorized_sum(lax.square(part), dims) for part in parts])
        return lax.div(sum_of_squares, lax.full_like(sum_of_squares, divisor)), mean

    variance, mean = _reduce_to_several(ctx, x, dims, moments)
    return variance, mean, dims


@lowers(aten.var.correction)
def var(x: Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False, ctx: Context) -> Array:
    """The variance: the sum of squared distances from the mean, divided by the number of elements minus `correction` (1 if None).

    Shape:  x without `dim` (all dimensions if None or empty); with `keepdim` these dimensions have size 1.
    Dtype:  that of x; for complex x the real dtype.
    """
    variance, _, dims = _moments(ctx, x, dim, correction)
    return apply_keepdim(convert(variance, dtypes.real(x.dtype)), x, dims, keepdim)


@lowers(aten.std.correction)
def std(x: Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False, ctx: Context) -> Array:
    """The standard deviation; `correction` as for `var`.

    Shape:  x without `dim` (all dimensions if None or empty); with `keepdim` these dimensions have size 1.
    Dtype:  that of x; for complex x the real dtype.
    """
    variance, _, dims = _moments(ctx, x, dim, correction)
    return apply_keepdim(convert(lax.sqrt(variance), dtypes.real(x.dtype)), x, dims, keepdim)


@lowers(aten.var_mean.correction)
def var_mean(x: Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False, ctx: Context) -> tuple[Array, Array]:
    """The variance and the mean; `correction` as for `var`.

    Shape:  both: x without `dim` (all dimensions if None or empty); with `keepdim` these dimensions have size 1.
    Dtype:  that of x; for complex x, the variance's is the real dtype.
    """
    variance, average, dims = _moments(ctx, x, dim, correction)
    return apply_keepdim(convert(variance, dtypes.real(x.dtype)), x, dims, keepdim), apply_keepdim(
        convert(average, x.dtype), x, dims, keepdim
    )


@lowers(aten.std_mean.correction)
def std_mean(x: Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False, ctx: Context) -> tuple[Array, Array]:
    """The standard deviation and the mean; `correction` as for `var`.

    Shape:  both: x without `dim` (all dimensions if None or empty); with `keepdim` these dimensions have size 1.
    Dtype:  that of x; for complex x, the deviation's is the real dtype.
    """
    variance, average, dims = _moments(ctx, x, dim, correction)
    deviation = lax.sqrt(variance)
    return apply_keepdim(convert(deviation, dtypes.real(x.dtype)), x, dims, keepdim), apply_keepdim(
        convert(average, x.dtype), x, dims, keepdim
    )


@lowers(aten.logsumexp.default)
def logsumexp(x: Array, dim: Dims, keepdim: bool = False, *, ctx: Context) -> Array:
    """log(sum(exp(x))), shifted by the maximum so that exp does not overflow.

    Shape:  x without `dim`; with `keepdim` these dimensions have size 1.
    Dtype:  that of x; the default float for bool and integers.
    """
    out = x.dtype if dtypes.is_inexact(x.dtype) else dtypes.default_float()
    return _reduce_in(ctx, x, dim, keepdim, out, _logsumexp)


def _logsumexp(x: Array, dims: Sequence[int]) -> Array:
    if math.prod(x.shape[d] for d in dims) == 0:
        return lax.log(lax.reduce_sum(x, tuple(dims)))
    largest = reduce_max(lax.real(x) if dtypes.is_complex(x.dtype) else x, dims)
    # Subtracting an infinite maximum would compute inf - inf.
    largest = lax.select(lax.is_finite(largest), largest, lax.full_like(largest, 0))
    shift = convert(largest, x.dtype)
    total = lax.log(vectorized_sum(lax.exp(minus_largest(x, broadcast_back(shift, x.shape, dims))), dims))
    return lax.add(total, shift)


@lowers(aten.linalg_vector_norm.default)
def linalg_vector_norm(
    x: Array, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: DType | None = None, ctx: Context
) -> Array:
    """(sum(|x|**ord))**(1/ord). For ord inf the largest |x|, for -inf the smallest, for 0 the number of nonzero elements.

    Shape:  x without `dim` (all dimensions if None or empty); with `keepdim` these dimensions have size 1.
    Dtype:  the real dtype of `dtype`, if given, else of x.
    """
    out = dtypes.real(dtype or x.dtype)
    dims = reduction_dims(dim, x.ndim)
    accumulator = dtypes.accumulator(dtype or x.dtype)

    def norm(x: Array, dims: Sequence[int]) -> Array:
        magnitude = lax.abs(convert(convert(x, dtype or x.dtype), accumulator))
        if math.isinf(ord):
            if math.prod(x.shape[d] for d in dims) == 0:
                return lax.reduce_sum(magnitude, tuple(dims))
            return ctx.max(magnitude, dims) if ord > 0 else ctx.min(magnitude, dims)
        if ord == 0:
            return ctx.sum(convert(lax.ne(magnitude, lax.full_like(magnitude, 0)), magnitude.dtype), dims)
        if ord == 1:
            return ctx.sum(magnitude, dims)
        if ord == 2:
            return lax.sqrt(ctx.sum(lax.square(magnitude), dims))
        total = ctx.sum(lax.pow(magnitude, lax.full_like(magnitude, ord)), dims)
        return lax.pow(total, lax.full_like(total, 1 / ord))

    return apply_keepdim(convert(_reduce(ctx, x, dims, norm), out), x, dims, keepdim)


@lowers(aten.trace.default)
def trace(x: Array, *, ctx: Context) -> Array:
    """The sum of the main diagonal of a matrix.

    Shape:  [].
    Dtype:  int64 for bool and integers, else that of x.
    """
    rows, columns = (lax.broadcasted_iota("int32", x.shape, dim) for dim in (0, 1))
    return sum_(lax.select(lax.eq(rows, columns), x, lax.full_like(x, 0)), ctx=ctx)


@lowers(aten.dist.default)
def dist(x: Array, other: Array, p: float = 2, *, ctx: Context) -> Array:
    """The p-norm of x - other, after broadcasting both.

    Shape:  [].
    Dtype:  that of x; for complex x the real dtype.
    """
    return linalg_vector_norm(elementwise(lax.sub, (x, other), Promotion.DEFAULT), p, ctx=ctx)
