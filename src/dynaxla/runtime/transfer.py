"""Zero-copy transfer of memory between torch and XLA.

Most functions have a fast implementation by private entry points, which saves a few microseconds, and a public alternative (private.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import torch

from .private import Fast

# XLA aliases memory only if the memory has this alignment, in bytes. Otherwise XLA copies the memory.
ALIGNMENT = 64

# DLPack's device type of host memory (kDLCPU).
_DLPACK_CPU = 1


def import_tensor(tensor: torch.Tensor, device: jax.Device, stream: int | None = None) -> jax.Array:
    """Returns a jax.Array that shares and keeps alive the memory of a contiguous torch tensor. Misaligned memory is copied.

    Args:
        tensor: The tensor.
        device: The device of the array.
        stream: On a GPU, the handle of the XLA stream for whose work the program must wait (see streams.py). None if another argument of
            the same program makes the program wait for torch's work.
    """
    if Fast.to_buffer and Fast.torch_to_capsule:
        return Fast.to_buffer(Fast.torch_to_capsule(tensor), device, stream)
    with jax.enable_x64(True):
        return jax.dlpack.from_dlpack(tensor.detach())


def reinterpret(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Returns another tensor on the same storage, which autograd does not treat as a view.

    Args:
        tensor: The tensor.
        shape: The shape of the result.
        stride: The strides of the result, in elements.
        offset: The distance from the first element of `tensor` to that of the result, in elements.
    """
    if Fast.reinterpret is not None:
        return Fast.reinterpret(tensor, tuple(shape), tuple(stride), offset)  # torch 2.15 refuses torch.Size
    return torch.as_strided(tensor.detach(), shape, stride, tensor.storage_offset() + offset)


def view_as(tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """Returns a tensor of another dtype on the same storage, which autograd does not treat as a view.

    The arguments are those of `reinterpret`, with `stride` and `offset` in elements of the new dtype.

    Raises: RuntimeError if the tensor does not start at an element of the new dtype.
    """
    start, remainder = divmod(tensor.storage_offset() * tensor.element_size(), dtype.itemsize)
    if remainder:
        raise RuntimeError(
            f"a tensor of {tensor.dtype} that starts {remainder} bytes after the start of an element of {dtype} cannot be viewed as {dtype}"
        )
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage(), start + offset, shape, stride)


def export_array(array: jax.Array, stream: int | None = None) -> torch.Tensor:
    """Returns a torch tensor that shares and keeps alive the memory of a jax.Array.

    On the CPU it waits until the array is computed.

    Args:
        array: The array.
        stream: On a GPU, the handle of the CUDA stream that the export makes wait until the array is computed (see streams.py).
    """
    if Fast.to_capsule and Fast.torch_from_capsule:
        return Fast.torch_from_capsule(Fast.to_capsule(array, stream))
    return torch.from_dlpack(array)


def on_buffer(buffer: Any) -> torch.Tensor:
    """Returns a torch tensor on a buffer that XLA passes to a callback. The memory is valid until the callback returns.

    Source: Python array API standard, __dlpack__.
    """
    if Fast.torch_from_capsule and buffer.__dlpack_device__()[0] == _DLPACK_CPU:
        return Fast.torch_from_capsule(buffer.__dlpack__())
    return torch.from_dlpack(buffer)


def on_stream(context: Any, buffer: Any) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which torch uses the stream of a callback.

    Args:
        context: The callback's context.
        buffer: Any of the callback's buffers.
    """
    kind, index = buffer.__dlpack_device__()
    if kind == _DLPACK_CPU:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(context.stream, device=torch.device("cuda", index)))
