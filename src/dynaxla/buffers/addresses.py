"""Functions that depend on memory addresses. No address leaves this package: other packages get answers, distances or opaque values.

torch may free a tensor's memory and allocate another tensor at the same address. Code that compares addresses at two points in time must
therefore exclude that the memory was freed in between, or must be correct also if it was. For example, an alias of a parameter (see
`import_alias`) is correct for any tensor at its address, because a program reads the content that the memory has during the call.
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

# The addresses of some tensors at one point in time. Opaque: it supports only the comparison with another snapshot.
AddressSnapshot = NewType("AddressSnapshot", object)

_data_ptr = torch.Tensor.data_ptr

# `address` numbers the storages in XLA's memory by multiples of this distance. No storage has so many bytes, so their ranges never overlap.
_STORAGE_DISTANCE = 1 << 50


def address(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's first element; for a tensor in XLA's memory, a number derived from its storage id and offset."""
    if devices.is_in_xla(tensor.device):
        return private.storage_id(tensor) * _STORAGE_DISTANCE + int(tensor.storage_offset()) * tensor.itemsize
    return _data_ptr(tensor)


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the address of each tensor."""
    try:
        return list(map(_data_ptr, tensors))
    except RuntimeError:  # data_ptr() raises for a tensor in XLA's memory
        return list(map(address, tensors))


def address_snapshot(tensors: Iterable[torch.Tensor]) -> AddressSnapshot:
    """Returns an opaque value that changes if the address of a tensor changes.

    The value is a list created in C, because a training step compares thousands of tensors at every call.
    """
    return AddressSnapshot(addresses(list(tensors)))


def tensor_snapshot(tensors: Iterable[torch.Tensor]) -> AddressSnapshot:
    """Returns an opaque value that changes if a tensor is replaced by another one, moves in memory, or is written to.

    Writes to tensors created in inference mode are not detected, because these have no version counter.
    """
    return AddressSnapshot(
        [(id(tensor), address(tensor), 0 if tensor.is_inference() else private.version_of(tensor)) for tensor in tensors]
    )


def is_aligned(tensor: torch.Tensor) -> bool:
    """True if the tensor's address has the alignment that XLA needs to read the tensor without a copy."""
    return tensor.data_ptr() % transfer.ALIGNMENT == 0


def byte_distance(source: torch.Tensor, tensor: torch.Tensor) -> int:
    """Returns the distance in bytes from the first element of `source` to that of `tensor`."""
    return address(tensor) - address(source)


def element_distance(source: torch.Tensor, tensor: torch.Tensor) -> int:
    """Returns the distance from the first element of `source` to that of `tensor`, an alias of `source`, in elements of `tensor`."""
    return byte_distance(source, tensor) // tensor.itemsize


def lies_within(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if the memory range of `tensor` is inside that of `other` (ranges as in `extent`)."""
    (start, stop), (first, last) = extent(tensor), extent(other)
    return first <= start and stop <= last


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's first element, and the address after its last element.

    For this package only.
    """
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = address(tensor)
    return first, first + (last + 1) * tensor.itemsize


def import_alias(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], device: jax.Device) -> jax.Array:
    """Returns a jax.Array that shares the memory of a torch tensor and does not keep the memory alive.

    Before every use of the array, the caller must check that a live tensor still has this address. If `Fast.storage_at` is None, the array
    keeps the memory alive after all.

    Args:
        tensor: The tensor; its memory is aligned (`is_aligned`).
        shape: The shape of the array.
        strides: The strides with which the array reads the memory, in elements.
        device: The device of the array.
    """
    if Fast.storage_at is None:
        return transfer.import_tensor(torch.as_strided(tensor.detach(), shape, strides), device)
    storage = Fast.storage_at(tensor.data_ptr(), tensor.device, math.prod(shape) * tensor.element_size())
    with torch.no_grad():
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, shape, strides)
    return transfer.import_tensor(view, device)


# Results of at most this many bytes are copied into torch's own memory, because torch cannot resize XLA's memory. The copy takes 0.8 to 1.3
# microseconds more than sharing (Intel Xeon, AVX512, torch 2.13, 2026-11-27). Copying far larger results would take longer than the call.
_MAX_COPIED_BYTES = 16 << 10


def exporter(example: torch.Tensor) -> Callable[[jax.Array], torch.Tensor]:
    """Returns a function that converts one result of a program to a torch tensor.

    A result of at most `_MAX_COPIED_BYTES` is copied into torch's own memory. A larger result stays in XLA's memory. The program must have
    run in the calling thread, because the copy does not wait for the result.

    Args:
        example: The same result of an earlier call: a CPU tensor in XLA's memory. Its shape, strides and dtype hold for all calls.
    """
    nbytes = example.numel() * example.itemsize
    if not 0 < nbytes <= _MAX_COPIED_BYTES:
        return transfer.export_array
    shape, stride, dtype = example.shape, example.stride(), example.dtype
    empty_strided, memmove = torch.empty_strided, ctypes.memmove  # local variables: each call of a program needs them

    def export(array: jax.Array) -> torch.Tensor:
        tensor = empty_strided(shape, stride, dtype=dtype, device="cpu")
        memmove(_data_ptr(tensor), array.unsafe_buffer_pointer(), nbytes)
        return tensor

    return export


def aliases_one_of(array: jax.Array, others: Iterable[jax.Array]) -> bool:
    """True if a single-device array starts at the same address as one of `others`. False for an empty array."""
    pointers = {other.unsafe_buffer_pointer() for other in others if other.size}
    return bool(array.size) and array.unsafe_buffer_pointer() in pointers
