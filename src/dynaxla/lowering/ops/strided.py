"""Lowerings of as_strided and as_strided_scatter, and updates of tensors whose elements overlap in memory.

JAX arrays have no strides: the strides and offset of the eager tensor come from its fake tensor (`TensorSpec`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from ..context import Context
from ..metadata import TensorSpec
from ..promotion import convert, expand
from ..registry import lowers


def _positions(size: Sequence[int], stride: Sequence[int], offset: int) -> np.ndarray:
    """Returns the position of each element of a strided tensor in its storage, an int64 array of shape `size`."""
    positions = np.full((1,) * len(size), offset, np.int64)
    for dim, (extent, step) in enumerate(zip(size, stride, strict=True)):
        positions = positions + (np.arange(extent, dtype=np.int64) * step).reshape([-1 if d == dim else 1 for d in range(len(size))])
    return np.broadcast_to(positions, tuple(size))


def _dense_order(spec: TensorSpec) -> list[int] | None:
    """Returns the dimensions from the outermost in memory to the innermost. None if the elements have gaps or overlaps in memory."""
    order = sorted(range(len(spec.shape)), key=lambda dim: (-spec.stride[dim], -spec.shape[dim]))
    expected = 1
    for dim in reversed(order):
        if spec.shape[dim] != 1 and spec.stride[dim] != expected:
            return None
        expected *= spec.shape[dim]
    return order


def _source_indices(spec: TensorSpec, positions: np.ndarray) -> np.ndarray:
    """Returns, for each storage position, the row-major index of the tensor's element at that position.

    Raises: UnsupportedOp if no element of the tensor lies at one of the positions.
    """
    own_positions = _positions(spec.shape, spec.stride, spec.offset).reshape(-1)
    element_at = np.full(max(int(own_positions.max(initial=-1)), int(positions.max(initial=-1))) + 1, -1, np.int64)
    element_at[own_positions] = np.arange(own_positions.size)
    sources = element_at[positions]
    if positions.size and sources.min() < 0:
        raise UnsupportedOp(
            f"as_strided of {spec} with strides {list(spec.stride)} reads memory outside of that tensor",
            hint="call as_strided on the tensor that owns the memory",
        )
    return sources


def _by_transpose_and_slice(x: Array, spec: TensorSpec, size: Sequence[int], stride: Sequence[int], offset: int) -> Array | None:
    """Returns the result of as_strided, computed by a transpose, a slice and a transpose.

    Returns None if x or the result has gaps or overlaps in memory, or if the result is not within the memory of x.
    """
    source = _dense_order(spec)
    target = TensorSpec(tuple(size), tuple(stride), spec.dtype, spec.device, offset)
    order = _dense_order(target)
    start, count = offset - spec.offset, math.prod(size)
    if source is None or order is None or start < 0 or start + count > x.size:
        return None
    flat = lax.reshape(lax.transpose(x, source), (x.size,))
    flat = lax.slice(flat, [start], [start + count]) if count != x.size else flat
    return lax.transpose(lax.reshape(flat, [size[dim] for dim in order]), sorted(range(len(order)), key=order.__getitem__))


@lowers(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(x: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None, *, ctx: Context) -> Array:
    """The view of x's eager storage with these sizes, strides and offset.

    Shape:  `size`.
    Raises: UnsupportedOp if the view reads parts of the storage that x does not cover.
    """
    spec = ctx.input(0)
    offset = spec.offset if storage_offset is None else storage_offset
    if math.prod(size) == 0:
        return lax.full(tuple(size), 0, x.dtype)
    if (result := _by_transpose_and_slice(x, spec, size, stride, offset)) is not None:
        return result
    sources = _source_indices(spec, _positions(size, stride, offset))
    return _take_flat(lax.reshape(x, (x.size,)), sources)


def may_overlap(spec: TensorSpec) -> bool:
    """True if several elements may share a memory location, so that writing to one of them writes to all.

    Expanded tensors (stride 0) count as not overlapping, since torch's functionalization relies on that. Other tensors do not overlap if,
    from the innermost dimension outwards, each stride exceeds the span of all inner dimensions.
    Source: ATen FunctionalInverses.cpp, expand_inverse; clone_preserve_strides.
    """
    span, overlaps = 1, False
    for step, size in sorted((step, size) for step, size in zip(spec.stride, spec.shape, strict=True) if size > 1):
        if step == 0:
            return False
        overlaps = overlaps or step < span
        span += step * (size - 1)
    return overlaps


def copy_to_overlapping(x: Array, spec: TensorSpec, is_written: np.ndarray) -> Array:
    """Returns x with the written elements copied to all elements that share memory with them in the layout of `spec`.

    `is_written` is the mask of the written elements, of the shape of x. If several share a memory location, the last one remains.
    """
    positions = _positions(spec.shape, spec.stride, 0).reshape(-1)
    last_writer = np.full(int(positions.max(initial=-1)) + 1, -1, np.int64)
    written_indices = np.flatnonzero(is_written)
    last_writer[positions[written_indices]] = written_indices
    writers = last_writer[positions]
    return lax.reshape(_take_flat(lax.reshape(x, (x.size,)), np.where(writers >= 0, writers, np.arange(x.size))), x.shape)


def _take_flat(flat: Array, sources: np.ndarray) -> Array:
    numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(flat, sources[..., None], numbers, slice_sizes=(1,), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


@lowers(aten.as_strided_scatter.default)
def as_strided_scatter(
    x: Array, source: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None, *, ctx: Context
) -> Array:
    """x with the elements of one of its strided views replaced by `source`, of shape `size`.

    If several elements are written to one memory location, the last element remains.

    Shape:  that of x.
    Raises: UnsupportedOp as for `as_strided`. When the program runs, RuntimeError for a negative offset and for a stride of zero, as in
            torch. (These raise no UnsupportedOp, for which torch's kernel would be called: it reads the storage of x.)
    """
    spec = ctx.input(0)
    offset = spec.offset if storage_offset is None else storage_offset
    if offset < 0:
        ctx.require(lax.full((), False), RuntimeError, f"Tensor: invalid storage offset {offset}")
        return x
    if math.prod(size) == 0:
        return x
    if any(step == 0 and extent > 1 for step, extent in zip(stride, size, strict=True)):
        message = "unsupported operation: more than one element of the written-to tensor refers to a single memory location."
        ctx.require(lax.full((), False), RuntimeError, f"{message} Please clone() the tensor before performing the operation.")
        return x
    positions = _source_indices(spec, _positions(size, stride, offset)).reshape(-1)
    last_writer = np.full(x.size, -1, np.int64)
    last_writer[positions] = np.arange(positions.size)
    is_written = last_writer >= 0
    new_values = _take_flat(lax.reshape(expand(convert(source, x.dtype), size), (positions.size,)), np.where(is_written, last_writer, 0))
    is_written = is_written.reshape(x.shape)
    result = lax.select(jax.numpy.asarray(is_written), lax.reshape(new_values, x.shape), x)
    return copy_to_overlapping(result, spec, is_written) if may_overlap(spec) else result
