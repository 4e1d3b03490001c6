"""Reductions over contiguous elements, in a form that XLA:CPU vectorizes.

XLA:CPU compiles a reduction over the innermost dimension to a loop in which each step waits for the previous one. For max and min, which
must propagate NaNs, such a loop takes four times as long as necessary. There are two remedies.

Folding (`_fold`) combines slices of a row elementwise, until about as many elements are left as a vector register holds.

Splitting into parts (`_reduce_parts`) is better for sums, and for reductions of a single row, such as all elements of an array. A row is
split into a few parts, which are combined elementwise. XLA:CPU computes the operand in the same loop, and reads memory as fast as torch
does.

- With more parts, the loop over the parts is not unrolled if the operand takes some arithmetic (a loss, an exponential), and nothing is
  vectorized. The sum of `gelu(x) * silu(y)` takes two to three times as long with 8 parts as with 4 to 6, the soft margin loss up to ten
  times as long with 7, 8 or 10. For operands in memory or with little arithmetic, 8 parts would save up to a fifth for sums along rows, and
  nothing for a sum over all elements.
- The length of a part is a multiple of a register's length. The few elements after the last part are reduced separately. If the last part
  were padded instead, binary cross entropy in rows of 197 would take seven times as long, and products in rows of 50,257 three times.
- The combined part is written to memory, and then reduced in the same way. XLA would otherwise fuse both steps into one loop, which is not
  vectorized and takes up to 20 times as long.

Both remedies also make sums more exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from jax import Array, lax

from .. import dtypes
from ..dimensions import is_static
from ..promotion import number
from .materialize import in_memory

Reduction = Callable[[Array, Sequence[int]], Array]

# `_fold` combines at most _RADIX slices per step, until at most 2 * _LANES elements are left. XLA's reduction reduces these.
_RADIX = 8
_LANES = 16
# The number of 32-bit elements of an AVX2 register.
_REGISTER = 8
# If a sum is over at most this number of rows, XLA:CPU recomputes its operand inside the loop, with everything that the operand depends on.
_FEW_ROWS = 32
# The maximum number of rows that the first step of `sum_rows` leaves for the second step.
_SECOND_STEP_ROWS = 128
# A row is split into _MIN_PARTS to _MAX_PARTS parts. Several rows are split only into parts of at least _MIN_PARTS rows.
_MAX_PARTS, _MIN_PARTS = 6, 4
# The length of the last dimension from which on `_reduce_rows` splits another dimension.
_LONG_ROW = 128


def reduce_max(x: Array, dims: Sequence[int]) -> Array:
    """Returns the maximum over dims, which are removed; NaN if any element is NaN."""
    return _reduce(x, dims, lax.reduce_max, lax.max, -math.inf)


def fast_reduce_max(x: Array, dims: Sequence[int]) -> Array:
    """Returns the maximum over dims, which are removed. For rows that contain a NaN, the result is undefined.

    On the CPU, it takes half the time of `reduce_max`. Use it if NaNs are propagated by other means.
    """
    return _reduce(x, dims, lax.reduce_max, _larger, -math.inf)


def _larger(x: Array, y: Array) -> Array:
    return lax.select(lax.gt(x, y), x, y)


def reduce_min(x: Array, dims: Sequence[int]) -> Array:
    """Returns the minimum over dims, which are removed; NaN if any element is NaN."""
    return _reduce(x, dims, lax.reduce_min, lax.min, math.inf)


def reduce_sum(x: Array, dims: Sequence[int]) -> Array:
    """Returns the sum over dims, which are removed."""
    return _reduce(x, dims, lax.reduce_sum, lax.add, 0.0)


def reduce_prod(x: Array, dims: Sequence[int]) -> Array:
    """Returns the product over dims, which are removed."""
    return _reduce(x, dims, lax.reduce_prod, lax.mul, 1.0)


def max_and_min_functions(reorders: bool) -> tuple[Reduction, Reduction]:
    """Returns the maximum and the minimum function for lowerings. Both remove the reduced dimensions, and propagate NaN.

    Args:
        reorders: See `sum_function`.
    """
    return (reduce_max, reduce_min) if reorders else (_in_rows(reduce_max, lax.reduce_max), _in_rows(reduce_min, lax.reduce_min))


def _in_rows(reduce: Reduction, plain: Reduction) -> Reduction:
    """Returns a reduction that calls `sum_rows` if the operand `is_foldable`, else `reduce`. plain: XLA's reduction of the same kind."""

    def reduced(x: Array, dims: Sequence[int]) -> Array:
        if not is_foldable(x, dims):
            return reduce(x, dims)
        return lax.platform_dependent(x, cpu=lambda x: sum_rows(in_memory(x), dims, plain), default=lambda x: plain(x, dims))

    return reduced


def sum_function(reorders: bool) -> Reduction:
    """Returns the sum function for lowerings.

    Args:
        reorders: True if passes/jaxpr/transposes.py will process the program. The pass may change memory orders, and rewrites sums itself.
    """
    return lax.reduce_sum if reorders else vectorized_sum


def vectorized_sum(x: Array, dims: Sequence[int]) -> Array:
    """Returns the sum over dims, which are removed.

    If several dimensions of more than 32 elements are reduced, XLA:CPU adds windows of 32 by 32 elements, and adjacent elements last. This
    takes up to 12 times as long as necessary. XLA:CPU does the same for one dimension that a reshape has merged from several. If other
    dimensions lie between the reduced ones, the sum has two steps. The last reduced dimensions, which are adjacent, are summed first if
    they have many elements. Otherwise the other reduced dimensions are summed first.
    """
    if not is_static(x.shape):
        return lax.reduce_sum(x, dims)
    nontrivial = [dim for dim in dims if x.shape[dim] > 1]
    first, last = min(nontrivial, default=0), max(nontrivial, default=0)
    if not nontrivial or 0 in x.shape or not dtypes.is_float(x.dtype) or x.dtype.itemsize < 4:
        return lax.reduce_sum(x, dims)
    if len(nontrivial) <= last - first:  # other dimensions lie between the reduced ones
        start = max(dim for dim in range(first, last) if dim not in nontrivial) + 1
        is_last_group_small = math.prod(x.shape[start : last + 1]) <= _FEW_ROWS
        if is_last_group_small and math.prod(x.shape[dim] for dim in nontrivial if dim < start) < _MIN_PARTS:
            return lax.reduce_sum(x, dims)
        steps = [[dim for dim in dims if dim < start], [dim for dim in dims if dim >= start]]
        in_steps = functools.partial(_sum_in_steps, steps=steps if is_last_group_small else steps[::-1])
        return lax.platform_dependent(x, cpu=in_steps, default=lambda x: lax.reduce_sum(x, dims))
    # Reduced dimensions of size 1 do not separate others in memory.
    squeezed = lax.reshape(x, [size for dim, size in enumerate(x.shape) if size != 1 or dim not in dims])
    start = first - sum(dim in dims for dim in range(first))
    neighbours = tuple(range(start, start + len(nontrivial)))
    if neighbours[-1] == squeezed.ndim - 1:
        return reduce_sum(squeezed, neighbours)
    if not is_foldable(squeezed, neighbours):
        return lax.reduce_sum(x, dims)
    return lax.platform_dependent(
        squeezed, cpu=lambda x: sum_rows(in_memory(x), neighbours), default=lambda x: lax.reduce_sum(x, neighbours)
    )


def _sum_in_steps(x: Array, steps: Sequence[Sequence[int]]) -> Array:
    """Returns the sum over the first group of dimensions, then over the second. The write to memory keeps XLA from fusing the steps."""
    first, second = steps
    shifted = [dim - sum(removed < dim for removed in first) for dim in second]
    return vectorized_sum(in_memory(vectorized_sum(x, first)), shifted)


def _reduce(x: Array, dims: Sequence[int], plain: Reduction, combine: Callable[[Array, Array], Array], identity: float) -> Array:
    dims = tuple(dims)
    outer = x.ndim - len(dims)
    if not is_static(x.shape):
        return plain(x, dims)
    count = math.prod(x.shape[outer:])
    # Some float8 dtypes have no infinities.
    can_be_folded = dtypes.is_float(x.dtype) and x.dtype.itemsize > 1
    if not can_be_folded or dims != tuple(range(outer, x.ndim)) or count <= 2 * _LANES or 0 in x.shape:
        return plain(x, dims)

    is_by_parts = plain is lax.reduce_sum or math.prod(x.shape[:outer]) == 1

    def reduced(x: Array) -> Array:
        if is_by_parts:
            x = _reduce_rows(x, outer, plain)
        x = lax.reshape(x, (*x.shape[:outer], math.prod(x.shape[outer:])))
        if is_by_parts:
            return lax.optimization_barrier(_reduce_parts(x, plain, combine))
        # Without the barrier, XLA would repeat the last, short reduction for each element that is compared with the result.
        return lax.optimization_barrier(plain(_fold(x, combine, identity), (outer,)))

    return lax.platform_dependent(x, cpu=reduced, default=lambda x: plain(x, dims))


def _reduce_rows(x: Array, outer: int, plain: Reduction) -> Array:
    """Returns x with one dimension, from `outer` to the last but one, split into equal parts that are combined; or x, if that is no gain.

    The last dimension is not merged with others: if x is computed from slices, XLA:CPU would then need a division per element to find the
    element's slice.
    """
    parts, dim = max(((_equal_parts(x.shape[dim]), dim) for dim in range(outer, x.ndim - 1)), default=(0, 0))
    if not parts or x.shape[-1] < _LONG_ROW:
        return x
    return in_memory(plain(lax.reshape(x, (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])), (dim,)))


def _equal_parts(count: int) -> int:
    """Returns the number of equal parts into which `count` rows are split; 0 if no number is suitable."""
    return max((parts for parts in range(_MIN_PARTS, min(_MAX_PARTS, count // _MIN_PARTS) + 1) if count % parts == 0), default=0)


def _reduce_parts(x: Array, plain: Reduction, combine: Callable[[Array, Array], Array]) -> Array:
    """Returns the reduction over the last dimension, by parts. The elements after the last part are reduced separately."""
    last = x.ndim - 1
    remainders = []
    while (count := x.shape[last]) > 2 * _LANES:
        parts, width = _split_row(count)
        if parts * width < count:
            remainders.append(lax.optimization_barrier(plain(lax.slice_in_dim(x, parts * width, count, axis=last), (last,))))
            x = lax.slice_in_dim(x, 0, parts * width, axis=last)
        x = in_memory(plain(lax.reshape(x, (*x.shape[:last], parts, width)), (last,)))
    return functools.reduce(combine, remainders, plain(x, (last,)))


def _split_row(count: int) -> tuple[int, int]:
    """Returns the number of parts into which a row of `count` elements is split, and their width, a multiple of _REGISTER.

    The choice leaves as few elements as possible after the last part.
    """
    widths = {parts: count // parts // _REGISTER * _REGISTER for parts in range(_MIN_PARTS, _MAX_PARTS + 1)}
    return max(widths.items(), key=lambda split: (math.prod(split), math.gcd(split[1], _LANES), split[0]))


def _fold(x: Array, combine: Callable[[Array, Array], Array], identity: float) -> Array:
    """Returns x with its last dimension folded to at most 2 * _LANES elements."""
    last = x.ndim - 1
    while (count := x.shape[last]) > 2 * _LANES:
        width = -(-count // min(_RADIX, count // _LANES))
        width += -width % _LANES
        parts = [lax.slice_in_dim(x, start, min(start + width, count), axis=last) for start in range(0, count, width)]
        missing = width - parts[-1].shape[last]
        parts[-1] = lax.pad(parts[-1], number(identity, x.dtype), [(0, 0, 0)] * last + [(0, missing, 0)])
        x = parts[0]
        for part in parts[1:]:
            x = combine(x, part)
    return x


def is_foldable(x: Array, dims: Sequence[int]) -> bool:
    """True if `sum_rows` can sum x over dims: adjacent dimensions of more than _FEW_ROWS elements, followed by another one of size > 1."""
    first, last = min(dims, default=0), max(dims, default=0)
    return (
        is_static(x.shape)
        and dtypes.is_float(x.dtype)
        and x.dtype.itemsize >= 4
        and len(dims) == last - first + 1
        and math.prod(x.shape[last + 1 :]) > 1
        and math.prod(x.shape[first : last + 1]) > _FEW_ROWS
        and 0 not in x.shape
    )


def sum_rows(x: Array, dims: Sequence[int], reduce: Reduction = lax.reduce_sum) -> Array:
    """Returns the sum over dims, which are removed, in two steps: the first leaves at most _SECOND_STEP_ROWS rows, which the second adds.

    XLA:CPU vectorizes the first step along its rows. A sum over several thousand rows at once takes up to 40 times as long.

    Args:
        x: The array.
        dims: The dimensions to sum; `is_foldable(x, dims)` must be true.
        reduce: Another reduction than the sum.
    """
    first, last = min(dims), max(dims)
    count = math.prod(x.shape[first : last + 1])
    row_count = max(size for size in range(1, min(_SECOND_STEP_ROWS, count // (_FEW_ROWS + 1)) + 1) if count % size == 0)
    rows = lax.reshape(x, (*x.shape[:first], count // row_count, row_count, *x.shape[last + 1 :]))
    # The barriers keep XLA from merging both steps, and the first step with a reshape; see `vectorized_sum`.
    return reduce(lax.optimization_barrier(reduce(lax.optimization_barrier(rows), [first])), [first])
