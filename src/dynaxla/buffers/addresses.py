"""Functions that depend on memory addresses. No address leaves this package: callers get answers or opaque, comparable values.

An address belongs to a tensor only for as long as its memory lives. Code that compares the addresses of two points in time must know that
the memory was not freed in between, or must be correct in both cases. A program, for example, reads the current content of an address.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NewType

import jax
import torch

from ..runtime import devices, private, transfer
from ..runtime.private import Fast

# The addresses of some tensors at one point in time. Opaque: can only be compared with the addresses at another point in time.
Places = NewType("Places", object)

_data_ptr = torch.Tensor.data_ptr

# The distance between the numbers that stand for the addresses of storages in XLA's memory. No storage is as long.
_STORAGE_DISTANCE = 1 << 50


def address(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's first element. For a tensor in XLA's memory: a number derived from its storage and offset."""
    if devices.is_in_xla(tensor.device):
        return private.storage_id(tensor) * _STORAGE_DISTANCE + int(tensor.storage_offset()) * tensor.itemsize
    return _data_ptr(tensor)


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the address of each tensor."""
    try:
        return list(map(_data_ptr, tensors))
    except RuntimeError:  # a tensor without an address
        return list(map(address, tensors))


def places(tensors: Iterable[torch.Tensor]) -> Places:
    """Returns an opaque value that changes if the address of a tensor changes.

    The value is a list created in C, because a training step compares thousands of tensors at every call.
    """
    return Places(addresses(list(tensors)))


def states(tensors: Iterable[torch.Tensor]) -> Places:
    """Returns an opaque value that changes if a tensor is replaced by another one, moves in memory, or is written to.

    Writes to tensors created in inference mode are not detected.
    """
    return Places([(id(tensor), address(tensor), 0 if tensor.is_inference() else private.version_of(tensor)) for tensor in tensors])


def is_aligned(tensor: torch.Tensor) -> bool:
    """True if XLA can read the tensor in place."""
    return tensor.data_ptr() % transfer.ALIGNMENT == 0


def bytes_behind(source: torch.Tensor, tensor: torch.Tensor) -> int:
    """Returns the distance in bytes from the first element of `source` to that of `tensor`."""
    return address(tensor) - address(source)


def elements_behind(source: torch.Tensor, tensor: torch.Tensor) -> int:
    """Returns the distance from the first element of `source` to that of `tensor`, an alias of `source`, in elements of `tensor`."""
    return bytes_behind(source, tensor) // tensor.itemsize


def lies_within(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if all elements of `tensor` lie in memory between the first and the last element of `other`."""
    (start, stop), (first, last) = extent(tensor), extent(other)
    return first <= start and stop <= last


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address of the first element, and the address after the last element. For this package only."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = address(tensor)
    return first, first + (last + 1) * tensor.itemsize


def import_alias(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], device: jax.Device) -> jax.Array:
    """Returns a jax.Array on the aligned memory of a torch tensor, with this shape and these strides, that does not keep the memory alive.

    The caller may use the array only while a live tensor has this address, and must check this before every use. Where torch lacks the
    necessary function, the array keeps the memory alive.
    """
    if Fast.storage_at is None:
        return transfer.import_tensor(torch.as_strided(tensor.detach(), shape, strides), device)
    storage = Fast.storage_at(tensor.data_ptr(), tensor.device, math.prod(shape) * tensor.element_size())
    with torch.no_grad():
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, shape, strides)
    return transfer.import_tensor(view, device)


# Results of at most this many bytes are copied into torch's own memory, which takes 0.8 to 1.3 microseconds more than sharing XLA's memory
# (Intel Xeon, AVX512, torch 2.13, 2026-11-27). torch cannot resize shared memory, and a copy of much more would cost more than a call.
_MAX_COPIED_BYTES = 16 << 10


def exporter(example: torch.Tensor) -> Callable[[jax.Array], torch.Tensor]:
    """Returns a function that converts a program's result to a torch tensor. The program must run in the thread that calls it.

    Args:
        example: A result like those to convert, on the CPU, in XLA's memory.

    Returns:
        A function whose tensor is in torch's own memory, which torch can resize, if the result is small, and else in XLA's memory.
    """
    nbytes = example.numel() * example.itemsize
    if not 0 < nbytes <= _MAX_COPIED_BYTES:
        return transfer.export_array
    shape, stride, dtype, make, copy = example.shape, example.stride(), example.dtype, torch.empty_strided, ctypes.memmove

    def export(array: jax.Array) -> torch.Tensor:
        tensor = make(shape, stride, dtype=dtype, device="cpu")
        copy(_data_ptr(tensor), array.unsafe_buffer_pointer(), nbytes)
        return tensor

    return export


def lies_in_one_of(array: jax.Array, others: Iterable[jax.Array]) -> bool:
    """True if a single-device array has the address, and thus the memory, of one of `others`. False for an empty array."""
    pointers = {other.unsafe_buffer_pointer() for other in others if other.size}
    return bool(array.size) and array.unsafe_buffer_pointer() in pointers
