"""Conversion of torch's tensors to JAX's arrays and back, around JAX functions that run now."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .. import forks
from ..buffers.addresses import is_aligned, lies_in_one_of
from ..device import copies, storages
from ..errors import UnsupportedTensor
from ..lowering import dtypes
from ..observe import metrics
from ..runtime import devices, transfer
from ..runtime.layout import row_major

# With its 64-bit types off, JAX silently computes with these dtypes in 32 bits: 2**40 becomes 0.
WIDE = (torch.int64, torch.uint64, torch.float64, torch.complex128)


def x64_now() -> bool:
    """True if JAX has 64-bit types enabled here and now."""
    return bool(jax.config.jax_enable_x64)


def check(tensor: torch.Tensor, what: str, x64: bool, hint: str) -> None:
    """Checks that JAX can represent a tensor.

    Raises:
        UnsupportedTensor: JAX has no such array, or would cut it to 32 bits. `hint` is the advice for the latter.
    """
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(f"{what} has layout {tensor.layout}: JAX's arrays are dense", hint="pass x.to_dense()")
    if not dtypes.is_supported(tensor.dtype):
        raise UnsupportedTensor(f"{what} is {tensor.dtype}: JAX has no such dtype", hint="cast it, e.g. x.float()")
    if tensor.device.type == "meta":
        raise UnsupportedTensor(f"{what} is on the device meta, and has no data", hint="create it on the CPU or on a GPU")
    if tensor.dtype in WIDE and not x64:
        raise UnsupportedTensor(
            f"{what} is {tensor.dtype}, and JAX's 64-bit types are off here: JAX would convert it to 32 bits", hint=hint
        )


def check_operands(tensors: Sequence[torch.Tensor], name: str, x64: bool) -> None:
    """Checks the operands of a JAX function of this name.

    Raises:
        UnsupportedTensor: As in `check`.
    """
    hint = f"pass x.int() or x.float(), or use to_torch({name}, x64=True), which runs it inside jax.enable_x64(True)"
    for index, tensor in enumerate(tensors):
        check(tensor, f"tensor {index} among the arguments of {name}", x64, hint)


def torch_dtype(dtype: Any, what: str) -> torch.dtype:
    """Returns the torch dtype of an array's dtype.

    Raises:
        UnsupportedTensor: Torch lacks the dtype.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise UnsupportedTensor(f"{what} is a key of jax.random", hint="pass the numbers of the key: jax.random.key_data(key)")
    try:
        return dtypes.to_torch(dtype)
    except KeyError:
        raise UnsupportedTensor(f"{what} is {dtype}: torch has no such dtype", hint="cast it in JAX, e.g. x.astype('int8')") from None


def is_tracer(value: Any) -> bool:
    """True if the value is a tracer, which represents an array in a function that JAX traces."""
    return isinstance(value, jax.core.Tracer)


def jax_device_of(device: torch.device) -> jax.Device:
    """Returns the device of JAX's own clients with this device's memory.

    Raises:
        UnsupportedTensor: There is none.
        ForkError: This is a forked process that cannot use JAX.
    """
    if forks.has_lost_xla():
        raise forks.fork_error()
    return devices.users_cpu_device() if device.type == "cpu" else devices.jax_device(device)


def imported(tensor: torch.Tensor, device: jax.Device) -> jax.Array:
    """Returns an array on a tensor's own memory.

    Raises:
        UnsupportedTensor: See `why_not`.
    """
    if not tensor.numel():
        with jax.enable_x64(True):
            return jax.device_put(np.zeros(tuple(tensor.shape), dtypes.to_jax(tensor.dtype)), device)
    if tensor.device.type == "cpu":
        return transfer.import_tensor(tensor.detach(), device)
    with jax.enable_x64(True):  # from_dlpack orders the array after the work on torch's stream
        return jax.dlpack.from_dlpack(tensor.detach())


def why_not(tensor: torch.Tensor) -> str:
    """Returns why an array cannot use a tensor's memory; "" if it can."""
    if tensor.is_conj() or tensor.is_neg():
        return "it has the conjugate or the negative bit, and its memory holds other values"
    if not tensor.is_contiguous():
        return f"it is not contiguous: its strides are {tuple(tensor.stride())}"
    if tensor.numel() and tensor.device.type == "cpu" and not is_aligned(tensor):
        return f"its memory does not start at a multiple of {transfer.ALIGNMENT} bytes, which XLA needs"
    return ""


def shareable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy if an array cannot use its memory."""
    if not why_not(tensor):
        return tensor
    metrics.add("input_copies")
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def exported(array: jax.Array) -> torch.Tensor:
    """Returns a contiguous tensor on an array's own memory, on the CPU or a GPU, once the array is computed."""
    if not array.size:
        device = "cpu" if array.device.platform == "cpu" else f"cuda:{array.device.local_hardware_id}"
        return torch.empty(array.shape, dtype=dtypes.to_torch(array.dtype), device=device)
    tensor = transfer.export_array(array) if array.device.platform == "cpu" else torch.from_dlpack(array)
    return tensor.contiguous()


class ArrayScope:
    """Converts tensors to arrays, and within its context makes their device JAX's default device.

    Args:
        tensors: The function's tensor arguments, on one device.
        name: The function's name, for errors.
        x64: JAX's 64-bit types are enabled within the context.

    Attributes:
        arrays: The tensors as arrays.

    Raises:
        DeviceMismatch: The tensors are on several devices.
        UnsupportedTensor: JAX cannot represent a tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], name: str, x64: bool) -> None:
        self._name = name
        self._device = devices.common_device(tensor.device for tensor in tensors) if tensors else None
        check_operands(tensors, name, x64)
        self._contexts = contextlib.ExitStack()
        self.arrays: list[jax.Array] = []
        if self._device is not None:
            device = jax_device_of(self._device)
            if self._device.type == storages.NAME:
                self.arrays = [copies.value_of(tensor) for tensor in tensors]
            else:
                self.arrays = [imported(shareable(tensor), device) for tensor in tensors]
            if device != (jax.config.jax_default_device or jax.local_devices()[0]):
                self._contexts.enter_context(jax.default_device(device))
        if x64 != x64_now():
            self._contexts.enter_context(jax.enable_x64(x64))

    def __enter__(self) -> ArrayScope:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._contexts.close()

    def take(self, results: list[Any]) -> list[torch.Tensor]:
        """Returns a function's results as tensors on the device of its arguments, or, if there were none, on the device of the arrays.

        A tensor is mutable, so it has its own memory: an array with other references (an argument, a constant, a residual of a backward
        pass) is copied. XLA has finished reading torch's memory when this returns.
        """
        for index, value in enumerate(results):
            if not isinstance(value, jax.Array):
                results[index] = self._array(value, index)
        value = None
        names = [f"result {index} of {self._name}" for index in range(len(results))]
        kinds = [torch_dtype(array.dtype, name) for array, name in zip(results, names, strict=True)]
        if self._device is not None and self._device.type == storages.NAME:
            return [
                storages.make(array.shape, row_major(array.shape), kind, self._device, array)
                for array, kind in zip(results, kinds, strict=True)
            ]
        if any(map(is_tracer, results)):
            raise UnsupportedTensor(
                f"{self._name} was called with tensors outside of JAX, and returned a JAX tracer: it reads an argument of a function "
                "under jax.jit, jax.grad or jax.vmap",
                hint="call dynaxla.device.enable(), and pass that argument as a tensor: dynaxla.as_torch(x)",
            )
        jax.block_until_ready(results)
        tensors = []
        for index in range(len(results)):
            # One reference is the list's, the other one is getrefcount's argument.
            alone = sys.getrefcount(results[index]) <= 2
            tensor = self._exported(results[index], names[index])
            alone = alone and not lies_in_one_of(results[index], self.arrays)
            tensors.append(tensor if alone else tensor.clone())
        return tensors

    def _array(self, value: Any, index: int) -> jax.Array:
        try:
            return jnp.asarray(value)
        except TypeError:
            raise TypeError(f"result {index} of {self._name} is a {type(value).__name__}, and results must be arrays or numbers") from None

    def _exported(self, array: jax.Array, what: str) -> torch.Tensor:
        if len(array.devices()) > 1:
            raise UnsupportedTensor(f"{what} is on {len(array.devices())} devices", hint="gather it: jax.device_put(x, jax.devices()[0])")
        return exported(array)
