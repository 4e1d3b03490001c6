"""Normalizes ATen's dimensions and sizes to plain non-negative ints.

In a program for export a size may be symbolic: an expression of JAX's symbolic dimensions. Some comparisons of such sizes are undecidable.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence

import jax
from jax import core, export, lax

from ..errors import UnsupportedOp

Dims = Sequence[int]
Sizes = Sequence[int]


def definitely(comparison: Callable[[], bool]) -> bool:
    """Returns the result of a comparison of sizes; False if the result depends on the values of symbolic sizes.

    Use this function only for decisions that affect time or memory, not results.
    """
    try:
        return comparison()
    except jax.errors.InconclusiveDimensionOperation:
        return False


def is_static(shape: Iterable[int]) -> bool:
    """True if no size is symbolic."""
    return not any(export.is_symbolic_dim(size) for size in shape)


def wrap(dim: int, rank: int) -> int:
    """Returns a non-negative dimension. A rank-0 tensor has the dimensions 0 and -1, both of which give 0.

    Raises:
        UnsupportedOp: The tensor does not have the dimension. The interpreter then calls torch's kernel, which raises eager mode's error.
    """
    size = max(rank, 1)
    if not -size <= dim < size:
        raise UnsupportedOp(f"dimension {dim} is out of range for a tensor of {rank} dimensions")
    return dim % size


def wrap_all(dims: Iterable[int], rank: int) -> tuple[int, ...]:
    """Returns non-negative dimensions; see `wrap`."""
    return tuple(wrap(dim, rank) for dim in dims)


def reduction_dims(dims: int | Iterable[int] | None, rank: int) -> tuple[int, ...]:
    """Returns the dimensions that a reduction covers: all of them for None and for an empty list, none for a rank-0 tensor."""
    if rank == 0:
        return ()
    if dims is None:
        return tuple(range(rank))
    if isinstance(dims, int):
        return (wrap(dims, rank),)
    return wrap_all(dims, rank) or tuple(range(rank))


def infer_size(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Returns `sizes` with a -1 replaced by the size for which the shape has `count` elements: [2, -1] gives (2, 3) for 6 elements."""
    if -1 not in sizes:
        return tuple(sizes)
    given_elements = -math.prod(sizes)
    return tuple((count // given_elements if given_elements else 0) if size == -1 else size for size in sizes)


def clamp_slice(size: int, start: int | None, end: int | None, step: int = 1) -> tuple[int, int, int]:
    """Returns (start, end, number of elements) of a Python slice over a dimension of `size`, with 0 <= start <= end <= size."""
    if not is_static(value for value in (size, start, end) if value is not None):
        first, last = _clamped(size, 0 if start is None else start), _clamped(size, size if end is None else end)
        last = core.max_dim(first, last)
        return first, last, -(-(last - first) // step)
    first, last, _ = slice(start, end).indices(size)
    last = max(first, last)
    return first, last, -(-(last - first) // step)


def _clamped(size: int, index: int) -> int:
    """Clamps an index into a dimension of symbolic size; a negative index counts from the end."""
    if isinstance(index, int) and index >= sys.maxsize:
        return size
    if isinstance(index, int) and index == 0:
        return 0
    return core.min_dim(core.max_dim(index + size if index < 0 else index, 0), size)


def slice_dim(x: jax.Array, dim: int, start: int, end: int, step: int = 1) -> jax.Array:
    """Returns x[start:end:step] in one dimension; 0 <= start <= end <= size."""
    if start == 0 and end == x.shape[dim] and step == 1:
        return x
    starts, ends, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    starts[dim], ends[dim], steps[dim] = start, end, step
    return lax.slice(x, starts, ends, steps if step != 1 else None)


def move(x: jax.Array, source: int, destination: int) -> jax.Array:
    """Moves one dimension, as `torch.movedim` does. Both positions are non-negative."""
    if source == destination:
        return x
    order = [dim for dim in range(x.ndim) if dim != source]
    order.insert(destination, source)
    return lax.transpose(x, order)
