"""Reads and writes of strided tensors in the array of their storage, as JAX code that becomes part of a program.

The memory of a storage is the sequence of its array's elements in row-major order, whatever the array's shape. A tensor is a place in that
memory.
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
        stride: in elements.
        offset: of the first element in the storage, in elements.
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
        return not self.offset and math.prod(self.shape) * self.dtype.itemsize == nbytes and self.layout.is_whole


def unwritten(nbytes: int, dtype: torch.dtype) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of the zeros in a storage of this size that nobody has written to.

    Args:
        dtype: of a tensor on the storage. With another dtype, each read would convert bytes: on a TPU, XLA takes 33.8 million cycles to
            read 36 MiB of bytes as bfloat16 (v5e, libtpu 0.0.42).
    """
    count, rest = divmod(nbytes, dtype.itemsize)
    return jax.ShapeDtypeStruct((nbytes,), np.uint8) if rest else jax.ShapeDtypeStruct((count,), dtypes.to_jax(dtype))


def read(array: jax.Array, place: StridedView) -> jax.Array:
    """Returns the tensor's value in its logical shape. `array` is that of the storage."""
    layout = place.layout
    whole = array.dtype == dtypes.to_jax(place.dtype) and array.shape == layout.packed_shape and not place.offset
    if whole and layout.dense:
        value = layout.unpack(array)
    elif math.prod(place.shape) == 0:
        value = jnp.zeros(place.shape, dtypes.to_jax(place.dtype))
    else:
        memory = _elements(array, place.dtype)
        box = _box(layout, place)
        if box is None:
            packed = jnp.take(memory, jnp.asarray(_indices(layout, place)), axis=0)
        else:
            packed = lax.slice(_boxed(memory, box), [0] * len(box.shape), box.taken)
        value = layout.unpack(lax.reshape(packed, layout.packed_shape))
    return _with_bits(value, place)


def write(array: jax.Array, place: StridedView, value: jax.Array) -> jax.Array:
    """Returns the storage's array after a write to the tensor, whose elements must not share memory with each other.

    Args:
        array: the storage's array before the write.
        value: the new value, in the tensor's logical shape and dtype.
    """
    value = _with_bits(value, place)
    layout = place.layout
    if place.fills(array.size * array.dtype.itemsize):
        return layout.pack(value)
    if math.prod(place.shape) == 0:
        return array
    memory = _elements(array, place.dtype)
    packed = layout.pack(value)
    box = _box(layout, place)
    if box is None:
        memory = memory.at[_indices(layout, place)].set(packed, unique_indices=True)
    else:
        region = lax.dynamic_update_slice(_boxed(memory, box), lax.reshape(packed, box.taken), [np.int32(0)] * len(box.shape))
        size = min(math.prod(box.shape), memory.size - place.offset)
        memory = lax.dynamic_update_slice(memory, lax.reshape(region, (region.size,))[:size], [np.int64(place.offset)])
    if memory.dtype == array.dtype:
        return lax.reshape(memory, array.shape)
    rest = _elements(array, torch.uint8)[memory.size * memory.dtype.itemsize :]
    return memory if not rest.size else jnp.concatenate([_elements(memory, torch.uint8), rest])


def shares_elements(place: StridedView) -> bool:
    """True if two of the tensor's elements may lie in the same memory."""
    layout = place.layout
    return layout.packed_shape != tuple(place.shape[dim] for dim in layout.permutation) or (
        math.prod(place.shape) > 1 and _box(layout, place) is None and len(np.unique(_indices(layout, place))) < math.prod(place.shape)
    )


def refuse_shared_elements(place: StridedView) -> None:
    """Raises ATen's RuntimeError for a write to a tensor with two elements in the same memory."""
    if shares_elements(place):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def overlaps(one: StridedView, other: StridedView) -> bool:
    """True if two tensors on one storage share memory.

    False if one of them has gaps or elements that share memory, since ATen does not check such tensors.
    """
    if not all(math.prod(place.shape) and place.layout.is_whole for place in (one, other)):
        return False
    (begin, end), (start, stop) = _bytes_of(one), _bytes_of(other)
    return begin < stop and start < end


def overlaps_partly(one: StridedView, other: StridedView) -> bool:
    """True if two tensors on one storage share memory, but with different extents or strides."""
    return overlaps(one, other) and (_bytes_of(one) != _bytes_of(other) or one.stride != other.stride)


def _bytes_of(place: StridedView) -> tuple[int, int]:
    """Returns the offsets of the first byte of a dense tensor, and of the byte after its last one."""
    begin = place.offset * place.dtype.itemsize
    return begin, begin + math.prod(place.shape) * place.dtype.itemsize


def _with_bits(value: jax.Array, place: StridedView) -> jax.Array:
    value = lax.conj(value) if place.conj and dtypes.is_complex(value.dtype) else value
    return lax.neg(value) if place.neg else value


class _Box(NamedTuple):
    """A tensor's elements as a corner of a row-major box of memory.

    Attributes:
        start: the offset of the box in memory, in elements.
        shape: of the box.
        taken: the shape of the corner that the tensor has.
    """

    start: int
    shape: tuple[int, ...]
    taken: tuple[int, ...]


def _box(layout: Layout, place: StridedView) -> _Box | None:
    """Returns the tensor's packed elements as the corner of a box of memory, or None if its strides are not multiples of each other."""
    shape: list[int] = []
    taken: list[int] = []
    outer = 0
    for dim, size in zip(layout.permutation, layout.packed_shape, strict=True):
        stride = place.stride[dim]
        if size == 1:
            continue
        if stride <= 0 or (shape and (outer % stride or size > outer // stride)):
            return None
        shape.append(outer // stride if shape else size)
        taken.append(size)
        outer = stride
    if not shape:
        return _Box(place.offset, (1,), (1,))
    return _Box(place.offset, (*shape, outer), (*taken, 1))


def _boxed(memory: jax.Array, box: _Box) -> jax.Array:
    end = box.start + math.prod(box.shape)
    if end > memory.size:  # the storage may end with the tensor's last element, before the end of the box
        memory = lax.pad(memory, memory.dtype.type(0), [(0, end - memory.size, 0)])
    return lax.reshape(memory[box.start : end], box.shape)


def _indices(layout: Layout, place: StridedView) -> np.ndarray:
    """Returns the offset in memory of each packed element, in elements."""
    found = np.full(layout.packed_shape, place.offset, np.int64)
    for axis, dim in enumerate(layout.permutation):
        steps = np.arange(layout.packed_shape[axis]) * place.stride[dim]
        found += steps.reshape([-1 if axis == other else 1 for other in range(found.ndim)])
    return found


def alike(array: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns the bytes of an array as elements of another dtype, in another shape."""
    flat = lax.reshape(array, (array.size,))
    return lax.reshape(flat if flat.dtype == dtype else _of_bytes(_bytes(flat), dtype), shape)


def _elements(array: jax.Array, dtype: torch.dtype) -> jax.Array:
    """Returns the storage's memory as elements of a dtype. Bytes at the end that make no whole element are left out."""
    wanted = dtypes.to_jax(dtype)
    flat = lax.reshape(array, (array.size,))
    return flat if flat.dtype == wanted else _of_bytes(_bytes(flat), wanted)


def _bytes(flat: jax.Array) -> jax.Array:
    if dtypes.is_complex(flat.dtype):
        flat = jnp.stack([lax.real(flat), lax.imag(flat)], axis=-1)
    if dtypes.is_bool(flat.dtype):
        flat = lax.convert_element_type(flat, np.uint8)
    return flat if flat.dtype == np.uint8 else _flat(lax.bitcast_convert_type(flat, np.uint8))


def _of_bytes(memory: jax.Array, dtype: dtypes.DType) -> jax.Array:
    size = np.dtype(dtype).itemsize
    memory = memory[: memory.size // size * size]
    if dtypes.is_bool(dtype):
        return lax.ne(memory, np.uint8(0))
    if dtypes.is_complex(dtype):
        parts = lax.reshape(_of_bytes(memory, dtypes.real(dtype)), (memory.size // size, 2))
        return lax.complex(parts[:, 0], parts[:, 1])
    if dtype == np.uint8:
        return memory
    pieces: Sequence[int] = (memory.size // size, size) if size > 1 else (memory.size,)
    return _flat(lax.bitcast_convert_type(lax.reshape(memory, pieces), dtype))


def _flat(array: jax.Array) -> jax.Array:
    return lax.reshape(array, (array.size,))


def read_at(array: jax.Array, place: StridedView, offset: jax.Array) -> jax.Array:
    """Returns the tensor's value as `read` does, `offset` elements later. `offset` is an int64[] that the program gets at run time."""
    return read(_stretch(array, place, offset), place)


def write_at(array: jax.Array, place: StridedView, offset: jax.Array, value: jax.Array) -> jax.Array:
    """Returns the storage's array as `write` does, for a tensor `offset` elements later. The array keeps its shape and dtype."""
    memory = _elements(array, place.dtype)
    memory = lax.dynamic_update_slice(memory, _flat(write(_stretch(array, place, offset), place, value)), [offset])
    if memory.dtype == array.dtype:
        return lax.reshape(memory, array.shape)
    old = _elements(array, torch.uint8)
    written = _elements(memory, torch.uint8)
    return alike(jnp.concatenate([written, old[written.size :]]), array.shape, array.dtype)


def _stretch(array: jax.Array, place: StridedView, offset: jax.Array) -> jax.Array:
    """Returns the memory from the tensor's first element to its last, for a tensor `offset` elements later."""
    return lax.dynamic_slice(_elements(array, place.dtype), [offset], [storage_extent(place.shape, place.stride)])
