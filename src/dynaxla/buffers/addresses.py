"""What depends on where tensors lie in memory. No address leaves this package: others get answers, or what can only be compared.

An address is a tensor's own only for as long as its memory lives. Whoever compares places of two times must know that the memory was
not freed in between, or not care: a program reads whatever lies there now.
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

# Comparable with that of another time, and nothing else.
Places = NewType("Places", object)

_data_ptr = torch.Tensor.data_ptr

# Storages without memory are as far apart as no storage is long.
_APART = 1 << 50


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's first element is. Of a tensor in XLA: a number that tells it from all others on that device."""
    if devices.is_in_xla(tensor.device):
        return private.storage_id(tensor) * _APART + int(tensor.storage_offset()) * tensor.itemsize
    return _data_ptr(tensor)


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The same for each."""
    try:
        return list(map(_data_ptr, tensors))
    except RuntimeError:  # one of them has no address
        return list(map(address, tensors))


def places(tensors: Iterable[torch.Tensor]) -> Places:
    """Where each of these lies. A list that is made in C: this is asked about thousands of tensors at every call of a step."""
    return Places(addresses(list(tensors)))


def states(tensors: Iterable[torch.Tensor]) -> Places:
    """Which tensors these are, where each lies, and how often each has been written to: another one after any of that has changed.

    Tensors made in inference mode do not count what is written to them.
    """
    return Places([(id(tensor), address(tensor), 0 if tensor.is_inference() else private.version_of(tensor)) for tensor in tensors])


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether XLA can read the tensor where it is."""
    return tensor.data_ptr() % transfer.ALIGNMENT == 0


def bytes_behind(source: torch.Tensor, tensor: torch.Tensor) -> int:
    """How many bytes a tensor begins behind the first element of another one."""
    return address(tensor) - address(source)


def elements_behind(source: torch.Tensor, tensor: torch.Tensor) -> int:
    """How many of its elements a tensor begins behind the first element of another one, in whose memory it lies."""
    return bytes_behind(source, tensor) // tensor.itemsize


def lies_within(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all of a tensor's elements lie between the first and the last one of another."""
    (start, stop), (first, last) = extent(tensor), extent(other)
    return first <= start and stop <= last


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first element, and that behind the last one. For this package alone."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = address(tensor)
    return first, first + (last + 1) * tensor.itemsize


def import_alias(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], device: jax.Device) -> jax.Array:
    """A jax.Array on the aligned memory of a torch tensor, read with this shape and these strides, that does not keep the memory alive.

    The caller may use it only while a live tensor has this address, and must check that before every use.
    Where torch lacks the means, the array does keep the memory alive, until the caller drops it.
    """
    if Fast.storage_at is None:
        return transfer.import_tensor(torch.as_strided(tensor.detach(), shape, strides), device)
    storage = Fast.storage_at(tensor.data_ptr(), tensor.device, math.prod(shape) * tensor.element_size())
    with torch.no_grad():
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, shape, strides)
    return transfer.import_tensor(view, device)


# Results of at most so many bytes are copied into memory of torch's own: 0.8 to 1.3 microseconds more than sharing XLA's (Intel Xeon,
# AVX512, torch 2.13, 2026-11-27). torch cannot resize memory that it shares, and a copy of much more would cost more than a call.
_MOST_COPIED = 16 << 10


def exporter(example: torch.Tensor) -> Callable[[jax.Array], torch.Tensor]:
    """The function that makes a torch tensor of a program's result, whenever the program has run in the calling thread.

    Args:
        example: such a result, on the CPU, on XLA's memory.

    Returns:
        A function that gives a small result in memory of torch's own, which torch can resize, and others on XLA's memory.
    """
    nbytes = example.numel() * example.itemsize
    if not 0 < nbytes <= _MOST_COPIED:
        return transfer.export_array
    shape, stride, dtype, make, copy = example.shape, example.stride(), example.dtype, torch.empty_strided, ctypes.memmove

    def export(array: jax.Array) -> torch.Tensor:
        tensor = make(shape, stride, dtype=dtype, device="cpu")
        copy(_data_ptr(tensor), array.unsafe_buffer_pointer(), nbytes)
        return tensor

    return export


def lies_in_one_of(array: jax.Array, others: Iterable[jax.Array]) -> bool:
    """Whether an array of one device begins where one of these does, so that it is the same memory. Empty ones have none."""
    known = {other.unsafe_buffer_pointer() for other in others if other.size}
    return bool(array.size) and array.unsafe_buffer_pointer() in known
