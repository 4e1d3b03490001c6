"""Sharing memory between a torch tensor and a JAX array."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import torch

from ..device import copies, storages
from ..errors import UnsupportedTensor
from ..lowering import dtypes
from ..runtime import devices
from .array_conversion import check, exported, imported, is_tracer, jax_device_of, torch_dtype, why_not, x64_now
from .torch_under_jax import tensor_of, under_jax, undifferentiated


def as_jax(tensor: torch.Tensor) -> jax.Array:
    """Returns a tensor as a JAX array on the same memory, which both keep alive. `dynaxla.to_jax` converts functions and modules.

    JAX assumes that arrays never change. A later write of torch to the tensor may or may not be visible to JAX: programs that run at the
    same time read either value, and values that JAX has computed or cached do not follow. Write to the tensor only after JAX has finished
    using it (`jax.block_until_ready`), in any thread. A tensor on the device "jax" returns its own array; torch writes to such a tensor by
    giving it another array, so the returned one does not change. The array is on JAX's own CPU device or GPU; it can be a tracer if the
    tensor is one (see `as_torch`).

    Raises:
        TypeError: Something else than a tensor.
        RuntimeError: A tensor that requires a gradient, as for `Tensor.numpy()`.
        UnsupportedTensor: A tensor whose memory an array cannot use, or a 64-bit dtype while JAX has 64-bit types switched off. The message
            gives the reason.
    """
    if not isinstance(tensor, torch.Tensor):
        if not callable(tensor):
            raise TypeError(f"as_jax takes a torch tensor, not {type(tensor).__name__}")
        text = 'dynaxla.as_jax(function) is now dynaxla.to_jax(function, device="jax"); dynaxla 0.2 removes the old name'
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return under_jax(tensor)
    if tensor.requires_grad:
        raise RuntimeError("Can't call as_jax() on Tensor that requires grad. Use dynaxla.as_jax(x.detach()) instead.")
    check(tensor, "the tensor", x64_now(), "pass x.int() or x.float(), or call as_jax(x) inside jax.enable_x64(True)")
    if tensor.device.type == storages.NAME:
        return copies.value_of(tensor)
    if reason := why_not(tensor):
        hint = "copy it: dynaxla.as_jax(x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format))"
        raise UnsupportedTensor(f"JAX cannot share the tensor's memory: {reason}", hint=hint)
    return imported(tensor, jax_device_of(tensor.device))


def as_torch(array: jax.Array, device: torch.device | str | None = None) -> torch.Tensor:
    """Returns a JAX array as a torch tensor on the same memory, which both keep alive.

    In a function under `jax.jit` or `jax.vmap`, arguments are tracers: torch's code, compiled or not, becomes part of the function that JAX
    traces, and `as_jax` converts its results back. JAX refuses to differentiate such code: with `jax.grad`, use
    `dynaxla.to_jax(function, device="jax")`.

    JAX assumes that arrays never change: do not write to a tensor of the CPU or a GPU that shares an array's memory (copy it first:
    `x.clone()`). Writing to a tensor on "jax" changes no array. The host waits for an array on the CPU; for a GPU, torch's stream waits.

    Args:
        device: "cpu" or "cuda" for memory on that device, or "jax" for a tensor that is this array (after `dynaxla.device.enable()`). None:
            the device of the memory; "jax" for tracers, and where torch cannot reach the memory.

    Raises:
        TypeError: Something else than an array.
        UnsupportedTensor: A dtype that torch lacks, an array on several devices, or on another device than `device`. The message gives the
            reason.
    """
    if not isinstance(array, jax.Array):
        right = "; dynaxla.to_torch takes a function" if callable(array) else ""
        raise TypeError(f"as_torch takes a jax.Array, not {type(array).__name__}{right}")
    torch_dtype(array.dtype, "the array")
    if is_tracer(array):
        return _on_jax(array, device, "a JAX tracer has no memory")
    if array.is_deleted():
        raise UnsupportedTensor("the array was deleted, or donated to a program", hint="pass the array that the program returned")
    if len(array.devices()) > 1:
        hint = "gather it: jax.device_put(x, jax.devices()[0])"
        raise UnsupportedTensor(f"the array is on {len(array.devices())} devices, and a tensor can be on only one", hint=hint)
    platform = {"gpu": "cuda"}.get(array.device.platform, array.device.platform)
    kind = None if device is None else str(device).partition(":")[0]
    if platform not in ("cpu", "cuda") or kind == storages.NAME:
        return _on_jax(array, device, f"torch cannot access the memory of {array.device}")
    if kind not in (None, platform):
        raise UnsupportedTensor(f"the array is on {array.device}, not on {device}", hint=f"as_torch(x).to({str(device)!r}) copies it")
    return exported(array)


def _on_jax(array: Any, device: torch.device | str | None, reason: str) -> torch.Tensor:
    if device is not None and str(device).partition(":")[0] != storages.NAME:
        raise UnsupportedTensor(f"{reason}, so it cannot become a tensor on {device}", hint='leave the device out, or give "jax"')
    wanted = torch.device(device) if device is not None and devices.holds_arrays(storages.NAME) else None
    return tensor_of(undifferentiated(array) if is_tracer(array) and dtypes.is_inexact(array.dtype) else array, wanted)
