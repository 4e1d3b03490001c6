"""Sums and extrema over neighbouring numbers.

XLA:CPU compiles a reduction over the fastest dimension to a loop in which each step waits for the last; for max and min, which must keep
NaNs, that takes four times as long as it could. Folding instead, which combines slices of a row until a vector register's worth is left, is
elementwise work, which it vectorizes. Sums, and what is a single row, such as all numbers of an array, gain most where a row is cut into a
few parts that are combined with each other, number by number: XLA:CPU computes the operand in the same loop, and reads memory as fast as
torch does. With more parts the loop over them is not unrolled if the operand takes some arithmetic (a loss, an exponential), and nothing is
vectorized: the sum of `gelu(x) * silu(y)` takes two to three times as long with 8 as with 4 to 6, the soft margin loss up to ten times with
7, 8 or 10. Sums of what is in memory, and of little arithmetic, gain up to a fifth by 8 along rows, and nothing where all is one sum.

Parts are whole registers, and the few numbers behind the last one are reduced by themselves. Rows of 197 numbers cut into slices, the last
of them filled up, take seven times as long for binary cross entropy, and rows of 50,257 products three times. What is left is written to
memory, and then reduced in the same way: XLA would make one loop of both steps, which is not vectorized, and takes up to 20 times as long.
All of this makes sums more exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from jax import Array, lax

from .. import dtypes
from ..dimensions import all_known
from ..promotion import number
from .in_memory import in_memory

Reduction = Callable[[Array, Sequence[int]], Array]

# Slices that are combined at once, and the numbers that are left for a plain reduction.
_RADIX = 8
_LANES = 16
# Numbers of 32 bits in a register of AVX2.
_REGISTER = 8
# XLA:CPU computes the operand of a sum over so many rows anew inside its loop, and with it, again and again, what that depends on.
_FEW_ROWS = 32
# Of a sum over rows, at most so many are left for the second step.
_LEFT = 128
# A row is cut into at most so many parts, and at least so many. Several rows are not cut at all into parts of fewer rows than the latter.
_PARTS, _LEAST = 6, 4
# Numbers side by side that are left beside each other.
_LONG = 128


def reduce_max(x: Array, dims: Sequence[int]) -> Array:
    """The largest over dims, which disappear; NaN if there is one."""
    return _reduce(x, dims, lax.reduce_max, lax.max, -math.inf)


def reduce_largest(x: Array, dims: Sequence[int]) -> Array:
    """The largest over dims, which disappear; of rows that contain a NaN, any number or NaN.

    On the CPU it takes half the time of `reduce_max`, for readers who find NaNs by other means.
    """
    return _reduce(x, dims, lax.reduce_max, _larger, -math.inf)


def _larger(x: Array, y: Array) -> Array:
    return lax.select(lax.gt(x, y), x, y)


def reduce_min(x: Array, dims: Sequence[int]) -> Array:
    """The smallest over dims, which disappear; NaN if there is one."""
    return _reduce(x, dims, lax.reduce_min, lax.min, math.inf)


def reduce_sum(x: Array, dims: Sequence[int]) -> Array:
    """The sum over dims, which disappear."""
    return _reduce(x, dims, lax.reduce_sum, lax.add, 0.0)


def reduce_prod(x: Array, dims: Sequence[int]) -> Array:
    """The product over dims, which disappear."""
    return _reduce(x, dims, lax.reduce_prod, lax.mul, 1.0)


def extrema(reorders: bool) -> tuple[Reduction, Reduction]:
    """How lowerings find the largest and the smallest over dimensions, which disappear; NaN if there is one. reorders: as for `summing`."""
    return (reduce_max, reduce_min) if reorders else (_in_rows(reduce_max, lax.reduce_max), _in_rows(reduce_min, lax.reduce_min))


def _in_rows(reduce: Reduction, plain: Reduction) -> Reduction:
    """As `reduce`; over rows in two steps, as `sum_rows`."""

    def reduced(x: Array, dims: Sequence[int]) -> Array:
        if not is_foldable(x, dims):
            return reduce(x, dims)
        return lax.platform_dependent(x, cpu=lambda x: sum_rows(in_memory(x), dims, plain), default=lambda x: plain(x, dims))

    return reduced


def summing(reorders: bool) -> Reduction:
    """How lowerings add over dimensions. reorders: where arrays may lie in another order, transposes.py chooses how."""
    return lax.reduce_sum if reorders else sum_neighbours


def sum_neighbours(x: Array, dims: Sequence[int]) -> Array:
    """The sum over dims, which disappear.

    XLA:CPU adds windows of 32 by 32 where several dimensions of more than 32 disappear, each number's neighbours in memory last: that takes
    up to 12 times as long as it could. It does so for a single one too, if that has been made of several. Of dimensions with others between
    them the last ones are added first, if there are many numbers in them, else the others.
    """
    if not all_known(x.shape):
        return lax.reduce_sum(x, dims)
    large = [dim for dim in dims if x.shape[dim] > 1]
    first, last = min(large, default=0), max(large, default=0)
    if not large or 0 in x.shape or not dtypes.is_float(x.dtype) or x.dtype.itemsize < 4:
        return lax.reduce_sum(x, dims)
    if len(large) <= last - first:  # others stand between them
        start = max(dim for dim in range(first, last) if dim not in large) + 1
        are_few = math.prod(x.shape[start : last + 1]) <= _FEW_ROWS
        if are_few and math.prod(x.shape[dim] for dim in large if dim < start) < _LEAST:
            return lax.reduce_sum(x, dims)
        steps = [[dim for dim in dims if dim < start], [dim for dim in dims if dim >= start]]
        in_steps = functools.partial(_sum_in_steps, steps=steps if are_few else steps[::-1])
        return lax.platform_dependent(x, cpu=in_steps, default=lambda x: lax.reduce_sum(x, dims))
    # Dimensions of size 1 do not separate others in memory.
    squeezed = lax.reshape(x, [size for dim, size in enumerate(x.shape) if size != 1 or dim not in dims])
    start = first - sum(dim in dims for dim in range(first))
    neighbours = tuple(range(start, start + len(large)))
    if neighbours[-1] == squeezed.ndim - 1:
        return reduce_sum(squeezed, neighbours)
    if not is_foldable(squeezed, neighbours):
        return lax.reduce_sum(x, dims)
    return lax.platform_dependent(
        squeezed, cpu=lambda x: sum_rows(in_memory(x), neighbours), default=lambda x: lax.reduce_sum(x, neighbours)
    )


def _sum_in_steps(x: Array, steps: Sequence[Sequence[int]]) -> Array:
    """The sum over some dimensions, and of that over others. XLA would make one loop of the two again."""
    first, second = steps
    left = [dim - sum(gone < dim for gone in first) for dim in second]
    return sum_neighbours(in_memory(sum_neighbours(x, first)), left)


def _reduce(x: Array, dims: Sequence[int], plain: Reduction, combine: Callable[[Array, Array], Array], identity: float) -> Array:
    dims = tuple(dims)
    outer = x.ndim - len(dims)
    if not all_known(x.shape):
        return plain(x, dims)
    count = math.prod(x.shape[outer:])
    # A float8 may lack infinities.
    foldable = dtypes.is_float(x.dtype) and x.dtype.itemsize > 1
    if not foldable or dims != tuple(range(outer, x.ndim)) or count <= 2 * _LANES or 0 in x.shape:
        return plain(x, dims)

    by_parts = plain is lax.reduce_sum or math.prod(x.shape[:outer]) == 1

    def reduced(x: Array) -> Array:
        if by_parts:
            x = _reduce_rows(x, outer, plain)
        x = lax.reshape(x, (*x.shape[:outer], math.prod(x.shape[outer:])))
        if by_parts:
            return lax.optimization_barrier(_reduce_parts(x, plain, combine))
        # The barrier keeps XLA from computing the last, short reduction again for each number that is compared with its result.
        return lax.optimization_barrier(plain(_fold(x, combine, identity), (outer,)))

    return lax.platform_dependent(x, cpu=reduced, default=lambda x: plain(x, dims))


def _reduce_rows(x: Array, outer: int, plain: Reduction) -> Array:
    """x with one of its dimensions from `outer` on cut into equal parts, which are combined. Rows are left: where x is computed of slices,
    XLA:CPU would divide to know in which of them a number of a single one is. x itself if that is of no use."""
    parts, dim = max(((_equal_parts(x.shape[dim]), dim) for dim in range(outer, x.ndim - 1)), default=(0, 0))
    if not parts or x.shape[-1] < _LONG:
        return x
    return in_memory(plain(lax.reshape(x, (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])), (dim,)))


def _equal_parts(count: int) -> int:
    """Into how many equal parts so many rows are cut; 0 if that is of no use."""
    return max((parts for parts in range(_LEAST, min(_PARTS, count // _LEAST) + 1) if count % parts == 0), default=0)


def _reduce_parts(x: Array, plain: Reduction, combine: Callable[[Array, Array], Array]) -> Array:
    """The reduction over the last dimension, cut into parts. What is behind the last part is reduced by itself."""
    last = x.ndim - 1
    others = []
    while (count := x.shape[last]) > 2 * _LANES:
        parts, width = _cut(count)
        if parts * width < count:
            others.append(lax.optimization_barrier(plain(lax.slice_in_dim(x, parts * width, count, axis=last), (last,))))
            x = lax.slice_in_dim(x, 0, parts * width, axis=last)
        x = in_memory(plain(lax.reshape(x, (*x.shape[:last], parts, width)), (last,)))
    return functools.reduce(combine, others, plain(x, (last,)))


def _cut(count: int) -> tuple[int, int]:
    """Into how many parts a row is cut, and how many numbers each has: whole registers. Few are left behind the last part."""
    widths = {parts: count // parts // _REGISTER * _REGISTER for parts in range(_LEAST, _PARTS + 1)}
    return max(widths.items(), key=lambda cut: (math.prod(cut), math.gcd(cut[1], _LANES), cut[0]))


def _fold(x: Array, combine: Callable[[Array, Array], Array], identity: float) -> Array:
    """x with its last dimension reduced to at most 2 * _LANES."""
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
    """Whether a sum over dims is one for `sum_rows`: neighbours, in front of others."""
    first, last = min(dims, default=0), max(dims, default=0)
    return (
        all_known(x.shape)
        and dtypes.is_float(x.dtype)
        and x.dtype.itemsize >= 4
        and len(dims) == last - first + 1
        and math.prod(x.shape[last + 1 :]) > 1
        and math.prod(x.shape[first : last + 1]) > _FEW_ROWS
        and 0 not in x.shape
    )


def sum_rows(x: Array, dims: Sequence[int], reduce: Reduction = lax.reduce_sum) -> Array:
    """The sum over dims, which disappear, of what `is_foldable`, in two steps: first over rows of many numbers, then over what is left.
    reduce: another reduction than the sum.

    XLA:CPU vectorizes the first along its rows. A sum over several thousand rows at once takes up to 40 times as long.
    """
    first, last = min(dims), max(dims)
    count = math.prod(x.shape[first : last + 1])
    left = max(size for size in range(1, min(_LEFT, count // (_FEW_ROWS + 1)) + 1) if count % size == 0)
    rows = lax.reshape(x, (*x.shape[:first], count // left, left, *x.shape[last + 1 :]))
    # The barriers keep XLA from making one sum of the two again, and the first one of several dimensions: see `sum_neighbours`.
    return reduce(lax.optimization_barrier(reduce(lax.optimization_barrier(rows), [first])), [first])
