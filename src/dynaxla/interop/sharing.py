"""Torch tensors and JAX arrays that share memory: `as_jax` and `as_torch`."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import torch

from ..device import copies, storages
from ..errors import UnsupportedTensor
from ..lowering import dtypes
from ..runtime import devices
from .array_conversion import (
    array_on_tensor,
    check_on_one_device,
    check_representable,
    is_tracer,
    jax_device_of,
    tensor_on_array,
    torch_dtype,
    unshareable_reason,
    x64_enabled,
)
from .torch_under_jax import as_jax_function, not_differentiable, tensor_of


def as_jax(tensor: torch.Tensor) -> jax.Array:
    """Returns a JAX array that uses a tensor's memory, which both keep alive. `dynaxla.to_jax` converts functions and modules.

    JAX assumes that arrays never change. A later write of torch to the tensor may or may not be visible to JAX: programs that run at the
    same time read the old or the new value, and values that JAX has computed or cached stay as they are. Write to the tensor only after
    the programs that read the array have finished, in all threads (`jax.block_until_ready` on their results). The array is on the GPU, or
    on the CPU device of JAX's own client.

    For a tensor on the device "jax", the result is the tensor's own array. torch writes to such a tensor by giving it another array, so the
    returned array does not change. The result is a tracer if the tensor holds a tracer (see `as_torch`).

    Raises:
        TypeError: The argument is not a tensor.
        RuntimeError: The tensor requires a gradient, as for `Tensor.numpy()`.
        UnsupportedTensor: An array cannot use the tensor's memory, or the dtype has 64 bits while JAX's 64-bit types are off. The message
            gives the reason.
    """
    if not isinstance(tensor, torch.Tensor):
        if not callable(tensor):
            raise TypeError(f"as_jax takes a torch tensor, not {type(tensor).__name__}")
        text = 'dynaxla.as_jax(function) is now dynaxla.to_jax(function, device="jax"); dynaxla 0.2 removes the old name'
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return as_jax_function(tensor)
    if tensor.requires_grad:
        raise RuntimeError("Can't call as_jax() on Tensor that requires grad. Use dynaxla.as_jax(x.detach()) instead.")
    check_representable(tensor, "the tensor", x64_enabled(), "pass x.int() or x.float(), or call as_jax(x) inside jax.enable_x64(True)")
    if tensor.device.type == storages.NAME:
        return copies.value_of(tensor)
    if reason := unshareable_reason(tensor):
        hint = "copy it: dynaxla.as_jax(x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format))"
        raise UnsupportedTensor(f"JAX cannot share the tensor's memory: {reason}", hint=hint)
    return array_on_tensor(tensor, jax_device_of(tensor.device))


def as_torch(array: jax.Array, device: torch.device | str | None = None) -> torch.Tensor:
    """Returns a torch tensor that uses a JAX array's memory, which both keep alive.

    In a function under `jax.jit` or `jax.vmap`, arguments are tracers. The result for a tracer is a tensor on "jax": torch ops on the
    tensor, compiled or not, become part of the program that JAX traces, and `as_jax` converts their results back. JAX refuses to
    differentiate these ops: with `jax.grad`, use `dynaxla.to_jax(function, device="jax")`.

    JAX assumes that arrays never change: do not write to a tensor on the CPU or a GPU that shares an array's memory (copy it first:
    `x.clone()`). Writing to a tensor on "jax" changes no array. If the array is not computed yet, the host waits for it on the CPU, and
    torch's stream waits for it on a GPU.

    Args:
        array: The array or tracer.
        device: "cpu" or "cuda" if the array is on that device, or "jax" for a tensor that holds this array (after
            `dynaxla.device.enable()`). None: the device of the memory; "jax" for tracers, and where torch cannot access the memory.

    Raises:
        TypeError: The argument is not an array.
        UnsupportedTensor: Torch has no such dtype, or the array is on several devices or on another device than `device`. The message gives
            the reason.
    """
    if not isinstance(array, jax.Array):
        hint = "; dynaxla.to_torch takes a function" if callable(array) else ""
        raise TypeError(f"as_torch takes a jax.Array, not {type(array).__name__}{hint}")
    torch_dtype(array.dtype, "the array")
    if is_tracer(array):
        return _tensor_on_jax(array, device, "a JAX tracer has no memory")
    if array.is_deleted():
        raise UnsupportedTensor("the array was deleted, or donated to a program", hint="pass the array that the program returned")
    check_on_one_device(array, "the array")
    platform = devices.platform_name(array.device)
    device_type = None if device is None else str(device).partition(":")[0]
    if platform not in ("cpu", "cuda") or device_type == storages.NAME:
        return _tensor_on_jax(array, device, f"torch cannot access the memory of {array.device}")
    if device_type not in (None, platform):
        raise UnsupportedTensor(f"the array is on {array.device}, not on {device}", hint=f"as_torch(x).to({str(device)!r}) copies it")
    tensor = tensor_on_array(array)
    if device is not None and torch.device(device).index not in (None, tensor.device.index or 0):
        raise UnsupportedTensor(f"the array is on {tensor.device}, not on {device}", hint=f"as_torch(x).to({str(device)!r}) copies it")
    return tensor


def _tensor_on_jax(array: Any, device: torch.device | str | None, reason: str) -> torch.Tensor:
    """Returns a tensor on the device "jax" that holds the array or tracer.

    Args:
        array: The array or tracer.
        device: The device that the user gave, or None.
        reason: The reason why the tensor cannot be on another device than "jax", for errors.
    """
    if device is not None and str(device).partition(":")[0] != storages.NAME:
        raise UnsupportedTensor(f"{reason}, so it cannot become a tensor on {device}", hint='leave the device out, or give "jax"')
    target = torch.device(device) if device is not None and devices.is_registered(storages.NAME) else None
    return tensor_of(not_differentiable(array) if is_tracer(array) and dtypes.is_inexact(array.dtype) else array, target)
