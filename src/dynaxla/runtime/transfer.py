"""Handing memory between torch and XLA.

Each step has a fast way (private, a few microseconds) and a public way that needs nothing private; see private.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import torch

from .private import Fast

# XLA imports memory only at this alignment, in bytes; below it, it copies.
ALIGNMENT = 64

# DLPack's number for memory of the host.
_DLPACK_CPU = 1


def import_tensor(tensor: torch.Tensor, device: jax.Device, stream: int | None = None) -> jax.Array:
    """A jax.Array on the memory of a contiguous torch tensor. It shares the memory and keeps it alive; misaligned memory is copied.

    stream: on a GPU, the stream of XLA's on which the array is ready (see streams.py). None: its reader is ordered by another array.
    """
    if Fast.to_buffer and Fast.torch_to_capsule:
        return Fast.to_buffer(Fast.torch_to_capsule(tensor), device, stream)
    with jax.enable_x64(True):
        return jax.dlpack.from_dlpack(tensor.detach())


def reinterpret(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Another tensor on the same storage; not a view to autograd. offset: elements from the tensor's own start."""
    if Fast.reinterpret is not None:
        return Fast.reinterpret(tensor, tuple(shape), tuple(stride), offset)  # torch 2.15 refuses torch.Size
    return torch.as_strided(tensor.detach(), shape, stride, tensor.storage_offset() + offset)


def view_as(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """A tensor of another dtype on the same storage; not a view to autograd. Stride, offset (from the tensor's start): in its elements."""
    start, beyond = divmod(tensor.storage_offset() * tensor.element_size(), dtype.itemsize)
    if beyond:
        raise RuntimeError(
            f"a tensor of {tensor.dtype} that starts {beyond} bytes behind an element of {dtype} cannot be viewed as {dtype}"
        )
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), start + offset, shape, stride)


def export_array(array: jax.Array, stream: int | None = None) -> torch.Tensor:
    """A torch tensor on the memory of a jax.Array; it shares the memory and keeps it alive. Waits until the array is computed (CPU), or
    lets `stream` wait for it (GPU)."""
    if Fast.to_capsule and Fast.torch_from_capsule:
        return Fast.torch_from_capsule(Fast.to_capsule(array, stream))
    return torch.from_dlpack(array)


def on_buffer(buffer: Any) -> torch.Tensor:
    """A torch tensor on a buffer that XLA lends to a callback. Source: Python array API standard, __dlpack__."""
    if Fast.torch_from_capsule and buffer.__dlpack_device__()[0] == _DLPACK_CPU:
        return Fast.torch_from_capsule(buffer.__dlpack__())
    return torch.from_dlpack(buffer)


def on_stream(context: Any, buffer: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside, torch uses the stream on which a program calls back. context: of the callback; buffer: one of its buffers."""
    kind, index = buffer.__dlpack_device__()
    if kind == _DLPACK_CPU:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(context.stream, device=torch.device("cuda", index)))
