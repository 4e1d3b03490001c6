"""Reads and writes of strided tensors in the array of their storage, as JAX code that becomes part of a program.

The memory of a storage is the sequence of its array's elements in row-major order, whatever the array's shape. A tensor is a strided view
of that memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax import lax
from jax import numpy as jnp

from ..lowering import dtypes
from ..runtime.layout import Layout, storage_extent


class StridedView(NamedTuple):
    """The metadata of a tensor in its storage.

    Attributes:
        dtype: torch's dtype.
        shape: the tensor's shape.
        stride: the tensor's strides, in elements.
        offset: the tensor's offset in the storage, in elements.
        conj: the tensor's conjugate bit.
        neg: the tensor's negative bit.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    conj: bool = False
    neg: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> StridedView:
        return StridedView(
            tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
        )

    @property
    def layout(self) -> Layout:
        return Layout.of(self.shape, self.stride)

    def fills(self, nbytes: int) -> bool:
        """True if each byte of a storage of this size belongs to exactly one element of the tensor."""
        return not self.offset and math.prod(self.shape) * self.dtype.itemsize == nbytes and self.layout.is_non_overlapping_and_dense


def unwritten_aval(nbytes: int, dtype: torch.dtype) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the array of zeros for a storage that nobody has written to.

    Args:
        nbytes: the size of the storage.
        dtype: the dtype of a tensor on the storage. The zeros have this dtype, so that reads need not convert bytes: on a TPU, XLA takes
            33.8 million cycles to read 36 MiB of bytes as bfloat16 (v5e, libtpu 0.0.42).
    """
    count, rest = divmod(nbytes, dtype.itemsize)
    return jax.ShapeDtypeStruct((nbytes,), np.uint8) if rest else jax.ShapeDtypeStruct((count,), dtypes.to_jax(dtype))


def read(array: jax.Array, view: StridedView) -> jax.Array:
    """Returns the tensor's value in its logical shape. `array` is the storage's array."""
    layout = view.layout
    fills_array = array.dtype == dtypes.to_jax(view.dtype) and array.shape == layout.packed_shape and not view.offset
    if fills_array and layout.dense:
        value = layout.unpack(array)
    elif math.prod(view.shape) == 0:
        value = jnp.zeros(view.shape, dtypes.to_jax(view.dtype))
    else:
        memory = _elements(array, view.dtype)
        box = _box(layout, view)
        if box is None:
            packed = jnp.take(memory, jnp.asarray(_indices(layout, view)), axis=0)
        else:
            packed = lax.slice(_boxed(memory, box), [0] * len(box.shape), box.corner)
        value = layout.unpack(lax.reshape(packed, layout.packed_shape))
    return _apply_bits(value, view)


def write(array: jax.Array, view: StridedView, value: jax.Array) -> jax.Array:
    """Returns the storage's array after a write to the tensor, possibly in another shape and dtype. The tensor must not overlap itself.

    Args:
        array: the storage's array before the write.
        view: the tensor.
        value: the new value, in the tensor's logical shape and dtype.
    """
    value = _apply_bits(value, view)
    layout = view.layout
    if view.fills(array.size * array.dtype.itemsize):
        return layout.pack(value)
    if math.prod(view.shape) == 0:
        return array
    memory = _elements(array, view.dtype)
    packed = layout.pack(value)
    box = _box(layout, view)
    if box is None:
        memory = memory.at[_indices(layout, view)].set(packed, unique_indices=True)
    else:
        region = lax.dynamic_update_slice(_boxed(memory, box), lax.reshape(packed, box.corner), [np.int32(0)] * len(box.shape))
        size = min(math.prod(box.shape), memory.size - view.offset)
        memory = lax.dynamic_update_slice(memory, lax.reshape(region, (region.size,))[:size], [np.int64(view.offset)])
    if memory.dtype == array.dtype:
        return lax.reshape(memory, array.shape)
    rest = _elements(array, torch.uint8)[memory.size * memory.dtype.itemsize :]
    return memory if not rest.size else jnp.concatenate([_elements(memory, torch.uint8), rest])


def has_internal_overlap(view: StridedView) -> bool:
    """True if two of the tensor's elements share memory."""
    layout = view.layout
    if not math.prod(view.shape):
        return False
    return layout.packed_shape != tuple(view.shape[dim] for dim in layout.permutation) or (
        math.prod(view.shape) > 1 and _box(layout, view) is None and len(np.unique(_indices(layout, view))) < math.prod(view.shape)
    )


def check_no_internal_overlap(view: StridedView) -> None:
    """Raises ATen's RuntimeError for a write to a tensor if two of the tensor's elements share memory."""
    if has_internal_overlap(view):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def overlaps(a: StridedView, b: StridedView) -> bool:
    """True if two tensors on one storage share memory.

    False if one of the tensors has gaps between its elements, or elements that share memory: ATen does not check such tensors.
    """
    if not all(math.prod(view.shape) and view.layout.is_non_overlapping_and_dense for view in (a, b)):
        return False
    (a_begin, a_end), (b_begin, b_end) = _byte_range(a), _byte_range(b)
    return a_begin < b_end and b_begin < a_end


def overlaps_partly(a: StridedView, b: StridedView) -> bool:
    """True if two tensors on one storage share memory, but differ in their byte ranges or strides."""
    return overlaps(a, b) and (_byte_range(a) != _byte_range(b) or a.stride != b.stride)


def _byte_range(view: StridedView) -> tuple[int, int]:
    """Returns the byte offsets at which a dense tensor begins and ends in its storage."""
    begin = view.offset * view.dtype.itemsize
    return begin, begin + math.prod(view.shape) * view.dtype.itemsize


def _apply_bits(value: jax.Array, view: StridedView) -> jax.Array:
    """Conjugates and negates a value if the tensor's bits say so.

    Reads and writes both call this function, since conjugation and negation are their own inverses.
    """
    value = lax.conj(value) if view.conj and dtypes.is_complex(value.dtype) else value
    return lax.neg(value) if view.neg else value


class _Box(NamedTuple):
    """A part of memory as a row-major array, in which a tensor with gaps is the slice `[:corner[0], :corner[1], ...]`.

    Example: a tensor of shape (3, 2) and strides (5, 1) is the slice [:3, :2, :1] of a box of shape (3, 5, 1).

    Attributes:
        start: the offset of the box in memory, in elements.
        shape: the shape of the box.
        corner: the shape of the slice that has the tensor's elements.
    """

    start: int
    shape: tuple[int, ...]
    corner: tuple[int, ...]


def _box(layout: Layout, view: StridedView) -> _Box | None:
    """Returns the box whose corner has the tensor's packed elements.

    Returns None unless each stride is a positive multiple of the next smaller stride, and at least that stride times its dimension's size.
    """
    shape: list[int] = []
    corner: list[int] = []
    outer = 0
    for dim, size in zip(layout.permutation, layout.packed_shape, strict=True):
        stride = view.stride[dim]
        if size == 1:
            continue
        if stride <= 0 or (shape and (outer % stride or size > outer // stride)):
            return None
        shape.append(outer // stride if shape else size)
        corner.append(size)
        outer = stride
    if not shape:
        return _Box(view.offset, (1,), (1,))
    return _Box(view.offset, (*shape, outer), (*corner, 1))


def _boxed(memory: jax.Array, box: _Box) -> jax.Array:
    """Returns the part of memory that a box describes, in the shape of the box."""
    end = box.start + math.prod(box.shape)
    if end > memory.size:  # the storage may end with the tensor's last element, before the end of the box
        memory = lax.pad(memory, memory.dtype.type(0), [(0, end - memory.size, 0)])
    return lax.reshape(memory[box.start : end], box.shape)


def _indices(layout: Layout, view: StridedView) -> np.ndarray:
    """Returns the offset in memory of each packed element, in elements."""
    indices = np.full(layout.packed_shape, view.offset, np.int64)
    for axis, dim in enumerate(layout.permutation):
        steps = np.arange(layout.packed_shape[axis]) * view.stride[dim]
        indices += steps.reshape([-1 if axis == other else 1 for other in range(indices.ndim)])
    return indices


def bitcast(array: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Reinterprets the bytes of an array as elements of another dtype, in another shape."""
    flat = lax.reshape(array, (array.size,))
    return lax.reshape(flat if flat.dtype == dtype else _from_bytes(_bytes(flat), dtype), shape)


def _elements(array: jax.Array, dtype: torch.dtype) -> jax.Array:
    """Returns the storage's memory as elements of a dtype. Bytes at the end that make no whole element are left out."""
    wanted = dtypes.to_jax(dtype)
    flat = lax.reshape(array, (array.size,))
    return flat if flat.dtype == wanted else _from_bytes(_bytes(flat), wanted)


def _bytes(flat: jax.Array) -> jax.Array:
    """Returns the bytes of an array of rank 1, as uint8."""
    if dtypes.is_complex(flat.dtype):
        flat = jnp.stack([lax.real(flat), lax.imag(flat)], axis=-1)
    if dtypes.is_bool(flat.dtype):
        flat = lax.convert_element_type(flat, np.uint8)
    return flat if flat.dtype == np.uint8 else _flat(lax.bitcast_convert_type(flat, np.uint8))


def _from_bytes(memory: jax.Array, dtype: dtypes.DType) -> jax.Array:
    """Returns bytes (uint8, rank 1) as elements of a dtype. Bytes at the end that make no whole element are left out."""
    size = np.dtype(dtype).itemsize
    memory = memory[: memory.size // size * size]
    if dtypes.is_bool(dtype):
        return lax.ne(memory, np.uint8(0))
    if dtypes.is_complex(dtype):
        parts = lax.reshape(_from_bytes(memory, dtypes.real(dtype)), (memory.size // size, 2))
        return lax.complex(parts[:, 0], parts[:, 1])
    if dtype == np.uint8:
        return memory
    pieces: Sequence[int] = (memory.size // size, size) if size > 1 else (memory.size,)
    return _flat(lax.bitcast_convert_type(lax.reshape(memory, pieces), dtype))


def _flat(array: jax.Array) -> jax.Array:
    return lax.reshape(array, (array.size,))


def read_at(array: jax.Array, view: StridedView, offset: jax.Array) -> jax.Array:
    """Reads a tensor like `read`, but `offset` elements after the first element of `view`.

    The offset is an int64[] array, so a program can take it as an input, and views at different offsets share the program.
    """
    return read(_extent_slice(array, view, offset), view)


def write_at(array: jax.Array, view: StridedView, offset: jax.Array, value: jax.Array) -> jax.Array:
    """Writes to the tensor of `read_at` like `write`. The array keeps its shape and dtype."""
    memory = _elements(array, view.dtype)
    memory = lax.dynamic_update_slice(memory, _flat(write(_extent_slice(array, view, offset), view, value)), [offset])
    if memory.dtype == array.dtype:
        return lax.reshape(memory, array.shape)
    old = _elements(array, torch.uint8)
    written = _elements(memory, torch.uint8)
    return bitcast(jnp.concatenate([written, old[written.size :]]), array.shape, array.dtype)


def _extent_slice(array: jax.Array, view: StridedView, offset: jax.Array) -> jax.Array:
    """Returns the elements of memory from the first to the last element of the tensor of `read_at`."""
    return lax.dynamic_slice(_elements(array, view.dtype), [offset], [storage_extent(view.shape, view.stride)])
