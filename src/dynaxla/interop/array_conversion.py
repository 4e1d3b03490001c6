"""Converts torch's tensors to JAX's arrays and back, around calls of JAX functions."""

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
from ..artifact.manifest import NARROW_DTYPES
from ..buffers.addresses import aliases_one_of, is_aligned
from ..device import copies, storages
from ..errors import UnsupportedTensor
from ..lowering import dtypes
from ..observe import metrics
from ..runtime import devices, transfer
from ..runtime.layout import row_major


def x64_enabled() -> bool:
    """True if JAX's 64-bit types are enabled in this thread and context."""
    return bool(jax.config.jax_enable_x64)


def check_representable(tensor: torch.Tensor, description: str, x64: bool, hint: str) -> None:
    """Checks that JAX can represent a tensor.

    Args:
        tensor: The tensor.
        description: The tensor's role, for errors.
        x64: True if JAX's 64-bit types are enabled.
        hint: The error's hint for a 64-bit tensor while JAX's 64-bit types are off.

    Raises:
        UnsupportedTensor: JAX has no array of this layout or dtype, the tensor has no data, or JAX would narrow it to 32 bits.
    """
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(f"{description} has layout {tensor.layout}: JAX's arrays are dense", hint="pass x.to_dense()")
    if not dtypes.is_supported(tensor.dtype):
        raise UnsupportedTensor(f"{description} is {tensor.dtype}: JAX has no such dtype", hint="cast it, e.g. x.float()")
    if tensor.device.type == "meta":
        raise UnsupportedTensor(f"{description} is on the device meta, and has no data", hint="create it on the CPU or on a GPU")
    if not x64 and dtypes.to_jax(tensor.dtype).name in NARROW_DTYPES:  # JAX would convert without an error: 2**40 becomes 0
        raise UnsupportedTensor(
            f"{description} is {tensor.dtype}, and JAX's 64-bit types are off here: JAX would convert it to 32 bits", hint=hint
        )


def check_operands(tensors: Sequence[torch.Tensor], name: str, x64: bool) -> None:
    """Checks that JAX can represent the operands of the JAX function `name`.

    Raises:
        UnsupportedTensor: As in `check_representable`.
    """
    hint = f"pass x.int() or x.float(), or use to_torch({name}, x64=True), which runs it inside jax.enable_x64(True)"
    for index, tensor in enumerate(tensors):
        check_representable(tensor, f"tensor {index} among the arguments of {name}", x64, hint)


def torch_dtype(dtype: Any, description: str) -> torch.dtype:
    """Returns the torch dtype that corresponds to an array's dtype.

    Args:
        dtype: The array's dtype.
        description: The array's role, for errors.

    Raises:
        UnsupportedTensor: Torch has no such dtype.
    """
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        raise UnsupportedTensor(f"{description} is a key of jax.random", hint="pass the key's data: jax.random.key_data(key)")
    try:
        return dtypes.to_torch(dtype)
    except KeyError:
        raise UnsupportedTensor(
            f"{description} is {dtype}: torch has no such dtype", hint="cast it in JAX, e.g. x.astype('int8')"
        ) from None


def is_tracer(value: Any) -> bool:
    """True if the value is a JAX tracer, which stands for an array in a function that JAX traces."""
    return isinstance(value, jax.core.Tracer)


def jax_device_of(device: torch.device) -> jax.Device:
    """Returns the JAX device that shares a torch device's memory. On the CPU it is the device of the user's arrays, not dynaxla's own.

    Raises:
        UnsupportedTensor: There is no such device.
        ForkError: This is a forked process that cannot use JAX.
    """
    if forks.has_lost_xla():
        raise forks.fork_error()
    return devices.users_cpu_device() if device.type == "cpu" else devices.jax_device(device)


def array_on_tensor(tensor: torch.Tensor, device: jax.Device) -> jax.Array:
    """Returns an array that uses a tensor's memory and keeps it alive. `unshareable_reason` must return "" for the tensor."""
    if not tensor.numel():
        with jax.enable_x64(True):
            return jax.device_put(np.zeros(tuple(tensor.shape), dtypes.to_jax(tensor.dtype)), device)
    if tensor.device.type == "cpu":
        return transfer.import_tensor(tensor.detach(), device)
    with jax.enable_x64(True):  # from_dlpack orders the array after the work on torch's stream
        return jax.dlpack.from_dlpack(tensor.detach())


def unshareable_reason(tensor: torch.Tensor) -> str:
    """Returns the reason why an array cannot use a tensor's memory, or "" if it can."""
    if tensor.is_conj() or tensor.is_neg():
        return "its conjugate or negative bit is set, so its memory holds other values than the tensor"
    if not tensor.is_contiguous():
        return f"it is not contiguous: its strides are {tuple(tensor.stride())}"
    if tensor.numel() and tensor.device.type == "cpu" and not is_aligned(tensor):
        return f"its memory does not start at a multiple of {transfer.ALIGNMENT} bytes, which XLA needs"
    return ""


def shareable_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy if an array cannot use its memory."""
    if not unshareable_reason(tensor):
        return tensor
    metrics.add("input_copies")
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def check_on_one_device(array: jax.Array, description: str) -> None:
    """Checks that an array, which must not be a tracer, is on one device. `description`: the array's role, for errors.

    Raises:
        UnsupportedTensor: The array is on several devices.
    """
    if len(array.devices()) > 1:
        hint = "gather it: jax.device_put(x, jax.devices()[0])"
        raise UnsupportedTensor(f"{description} is on {len(array.devices())} devices, and a tensor can be on only one", hint=hint)


def tensor_on_array(array: jax.Array) -> torch.Tensor:
    """Returns a contiguous tensor on the memory of an array on the CPU or a GPU, or on a copy if the array is not row-major.

    For an array on the CPU, the host waits until it is computed; for an array on a GPU, torch's current stream waits.
    """
    if not array.size:
        device = "cpu" if array.device.platform == "cpu" else f"cuda:{array.device.local_hardware_id}"
        return torch.empty(array.shape, dtype=dtypes.to_torch(array.dtype), device=device)
    tensor = transfer.export_array(array) if array.device.platform == "cpu" else torch.from_dlpack(array)
    return tensor.contiguous()


class ArrayScope:
    """Converts the arguments of a call of a JAX function to arrays, and later the results to tensors.

    The call must be inside the context, in which JAX's default device is the device of the arguments.

    Args:
        tensors: The function's tensor arguments, on one device.
        name: The function's name, for errors.
        x64: True if JAX's 64-bit types are enabled inside the context.

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
                self.arrays = [array_on_tensor(shareable_tensor(tensor), device) for tensor in tensors]
            if device != (jax.config.jax_default_device or jax.local_devices()[0]):
                self._contexts.enter_context(jax.default_device(device))
        if x64 != x64_enabled():
            self._contexts.enter_context(jax.enable_x64(x64))

    def __enter__(self) -> ArrayScope:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._contexts.close()

    def to_tensors(self, results: list[Any]) -> list[torch.Tensor]:
        """Converts a function's results to tensors on the device of its arguments, or of the results if there were no arguments.

        A tensor on the CPU or a GPU has memory of its own, because it is mutable: an array with other references (an argument, a constant,
        a residual of a backward pass) is copied. When this method returns, XLA no longer reads the memory of the arguments.

        Args:
            results: The results: arrays, tracers or numbers. The numbers in this list are replaced by arrays.

        Raises:
            UnsupportedTensor: Torch has no such dtype, an array is on several devices, or a tracer would become a tensor not on "jax".
            TypeError: A result is neither an array nor a number.
        """
        for index, value in enumerate(results):
            if not isinstance(value, jax.Array):
                results[index] = self._array(value, index)
        value = None  # `getrefcount` below would count this reference to the last result
        names = [f"result {index} of {self._name}" for index in range(len(results))]
        torch_dtypes = [torch_dtype(array.dtype, name) for array, name in zip(results, names, strict=True)]
        if self._device is not None and self._device.type == storages.NAME:
            return [
                storages.new_tensor(array.shape, row_major(array.shape), dtype, self._device, array)
                for array, dtype in zip(results, torch_dtypes, strict=True)
            ]
        if any(map(is_tracer, results)):
            raise UnsupportedTensor(
                f"{self._name} was called with tensors that hold no tracers, but returned a JAX tracer: its code reads an argument of a "
                "surrounding function under jax.jit, jax.grad or jax.vmap",
                hint="call dynaxla.device.enable(), and pass that argument as a tensor: dynaxla.as_torch(x)",
            )
        jax.block_until_ready(results)
        tensors = []
        for index in range(len(results)):
            # An array that is used nowhere else has two references: from the list, and from getrefcount's own argument.
            is_unshared = sys.getrefcount(results[index]) <= 2
            tensor = self._tensor_on(results[index], names[index])
            is_unshared = is_unshared and not aliases_one_of(results[index], self.arrays)
            tensors.append(tensor if is_unshared else tensor.clone())
        return tensors

    def _array(self, value: Any, index: int) -> jax.Array:
        """Converts `value`, the result at this index, to an array. Raises TypeError if it is neither an array nor a number."""
        try:
            return jnp.asarray(value)
        except TypeError:
            raise TypeError(f"result {index} of {self._name} is a {type(value).__name__}, and results must be arrays or numbers") from None

    def _tensor_on(self, array: jax.Array, description: str) -> torch.Tensor:
        check_on_one_device(array, description)
        return tensor_on_array(array)
