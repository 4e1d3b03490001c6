"""Storages and tensors on the device "jax". A storage has no memory; its Python object has a jax.Array as an attribute.

This attribute is the storage's *content*. It is None for unwritten memory, and a `StorageContent` while the array is not computed yet, in
use by a program, or lost. torch keeps the Python object of a storage alive as long as the storage itself.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, Sharding

from .. import forks
from ..errors import UnsupportedTensor
from ..lowering import dtypes
from ..runtime import meshes, private, transfer
from ..runtime.layout import storage_extent
from . import pjrt_devices
from .device_templates import empty_template

NAME = "jax"
_CONTENT = "_dynaxla_content"


# The shape of a storage's array, and the array's sharding on a mesh. The shape is None for a storage that nobody has written to. The
# sharding is None for an array on one device.
ShapeAndSharding = tuple[tuple[int, ...] | None, NamedSharding | None]


class StorageContent:
    """Base class of contents that are not arrays, such as the value of an op that lazy mode has recorded but not computed."""

    __slots__ = ()

    def array(self, storage: torch.UntypedStorage) -> jax.Array | None:
        """Returns the array of the storage: see `array_of`."""
        raise NotImplementedError

    def shape_and_sharding(self, storage: torch.UntypedStorage) -> ShapeAndSharding:
        """Returns the shape and the sharding of the array. Subclasses that know them do not compute the array for this."""
        return _shape_and_sharding_of(self.array(storage))


def make_storage(nbytes: int, device: torch.device, content: jax.Array | StorageContent | None = None) -> torch.UntypedStorage:
    """Creates a storage of this size, in bytes. The content None stands for unwritten memory, which reads as zeros."""
    storage = private.storage_without_memory(device, nbytes)
    setattr(storage, _CONTENT, content)
    return storage


def new_tensor(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, array: jax.Array | None = None
) -> torch.Tensor:
    """Creates a tensor on a new storage. `array` is the content of the storage, or None for unwritten memory."""
    nbytes = storage_extent(tuple(shape), tuple(stride)) * dtype.itemsize
    return tensor_on(make_storage(nbytes, device, array), shape, stride, 0, dtype)


def tensor_on(storage: torch.UntypedStorage, shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype) -> torch.Tensor:
    """Creates a tensor on an existing storage. Autograd does not treat it as a view."""
    tensor = transfer.reinterpret(empty_template(dtype, storage.device.index or 0), (0,), (1,))
    private.set_storage(tensor, storage, offset, shape, stride)
    private.refuse_address(tensor)
    return tensor


def array_of(storage: torch.UntypedStorage) -> jax.Array | None:
    """Returns the array of a storage, or None for unwritten memory. Runs recorded ops, or waits for a running program, if necessary.

    Raises: RuntimeError for a storage that dynaxla did not create, or whose array was donated to a program that failed; ForkError; the
    errors of the recorded ops.
    """
    content = content_of(storage)
    return content.array(storage) if isinstance(content, StorageContent) else content


def content_of(storage: torch.UntypedStorage) -> jax.Array | StorageContent | None:
    """Returns the array of a storage, or the StorageContent that stands for it. No recorded op runs for this.

    Raises: RuntimeError for a storage that dynaxla did not create.
    """
    try:
        return getattr(storage, _CONTENT)
    except AttributeError:
        if not storage.nbytes():
            return None
        raise RuntimeError(
            f"a storage of {storage.nbytes()} bytes on {storage.device} has no jax.Array, since dynaxla did not create it (DLPack creates "
            'such storages); create the tensor on the CPU, and move it with .to("jax")'
        ) from None


class LostContent(StorageContent):
    """The content of a storage whose array was donated to a program that failed. Reading the array raises RuntimeError.

    Args:
        description: the tensor's dtype, shape and device, for the error message.
    """

    def __init__(self, description: str) -> None:
        self._description = description

    def array(self, storage: torch.UntypedStorage) -> jax.Array | None:
        raise RuntimeError(
            f"a compiled program that writes in place to a tensor ({self._description}) failed while it ran, so the value is lost: load or "
            "compute it again; options={'donate': False} keeps the old values until a program has succeeded"
        )


class InUseContent(StorageContent):
    """The content of storages while a program that may write to their arrays runs. Other threads wait until the program has finished.

    To avoid deadlocks, a waiting thread holds no `InUseContent` of its own, and no lock that the thread of the program may need.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lock.acquire()
        self._arrays: dict[int, jax.Array] = {}

    def acquire(self, storages: Sequence[torch.UntypedStorage], arrays: Sequence[jax.Array]) -> bool:
        """Puts this object into the storages in place of their arrays, before the program runs.

        Returns False and changes nothing unless all storages still hold these arrays.
        """
        self._arrays = {private.id_of_storage(storage): array for storage, array in zip(storages, arrays, strict=True)}
        return compare_and_swap([(storage, array, self) for storage, array in zip(storages, arrays, strict=True)])

    def array(self, storage: torch.UntypedStorage) -> jax.Array | None:
        """Waits for the program and returns the storage's new array. In the thread of the program, returns the old array."""
        if forks.has_lost_xla():  # the thread that runs the program does not exist in a forked child
            raise forks.fork_error()
        with self._lock:  # reentrant: a signal handler in the thread of the program must not wait for the program
            if getattr(storage, _CONTENT) is self:
                return self._arrays.get(private.id_of_storage(storage))
        return array_of(storage)

    def succeed(self, changes: Iterable[tuple[torch.UntypedStorage, jax.Array]]) -> None:
        """Puts the program's results into the storages, except into storages that another thread has overwritten meanwhile."""
        with _lock:
            for storage, array in changes:
                if getattr(storage, _CONTENT) is self:
                    set_content(storage, array)
        self._release()

    def fail(self, tensors: Iterable[tuple[torch.UntypedStorage, torch.Tensor]]) -> None:
        """Puts the old arrays back into the storages, or `LostContent` for an array that was donated.

        Args:
            tensors: each storage with a tensor on it, which describes the storage in an error.
        """
        with _lock:
            for storage, tensor in tensors:
                if getattr(storage, _CONTENT) is self:
                    array = self._arrays[private.id_of_storage(storage)]
                    lost = LostContent(f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}")
                    set_content(storage, lost if not any_tracer((array,)) and array.is_deleted() else array)
        self._release()

    def _release(self) -> None:
        """Drops the old arrays, and lets the waiting threads continue."""
        self._arrays = {}
        with contextlib.suppress(RuntimeError):  # if Ctrl-C comes right after a release, the caller releases the free lock again
            self._lock.release()


def set_content(storage: torch.UntypedStorage, content: jax.Array | StorageContent | None) -> None:
    """Sets the content of a storage. An array must have as many bytes as the storage."""
    setattr(storage, _CONTENT, content)


_tracer_checks = False  # True after `enable_tracer_checks`


def enable_tracer_checks() -> None:
    """Turns on the checks for JAX tracers in storages. Must be called before a storage first gets a tracer.

    The checks cost time, so they are off in processes in which no storage ever holds a tracer.
    """
    global _tracer_checks
    _tracer_checks = True


def tracer_checks_enabled() -> bool:
    """True if storages may hold tracers: see `enable_tracer_checks`."""
    return _tracer_checks


def any_tracer(arrays: Iterable[Any]) -> bool:
    """True if one of these arrays is a JAX tracer."""
    return _tracer_checks and any(isinstance(array, jax.core.Tracer) for array in arrays)


def any_traced_tensor(objects: Iterable[Any]) -> bool:
    """True if one of these objects is a tensor of the device whose storage holds a tracer. The objects may have any type."""
    return _tracer_checks and any_tracer(content_of(item.untyped_storage()) for item in objects if is_jax_tensor(item))


def escaped_tracer_error(error: Exception) -> UnsupportedTensor:
    """Returns the error for a tensor whose tracer is used after the trace of its function has ended.

    Args:
        error: JAX's UnexpectedTracerError.
    """
    lines = str(error).splitlines()
    return UnsupportedTensor(
        "a tensor was used outside of the JAX function (under jax.jit, jax.grad, jax.vmap) whose tracer it holds: it was stored, or "
        f"written to, while JAX traced that function. JAX says: {lines[0] if lines else type(error).__name__}",
        hint="return it from the JAX function with dynaxla.as_jax, and pass state as an argument and a result",
    )


_lock = forks.lock()  # held while contents are compared and replaced


def compare_and_swap(
    changes: Sequence[tuple[torch.UntypedStorage, jax.Array | StorageContent | None, jax.Array | StorageContent | None]],
) -> bool:
    """Replaces the contents of storages, all or none, by compare and swap.

    Returns False and changes nothing if another thread has written to one of the storages meanwhile, since that write would be lost.

    Args:
        changes: for each write, the storage, the content that the caller read, and the new content.
    """
    with _lock:
        if any(getattr(storage, _CONTENT, None) is not before for storage, before, _ in changes):
            return False
        for storage, _, after in changes:
            set_content(storage, after)
    return True


def shape_and_sharding(storage: torch.UntypedStorage) -> ShapeAndSharding:
    """Returns the shape and the sharding of a storage's array. No recorded op runs for this."""
    content = content_of(storage)
    return content.shape_and_sharding(storage) if isinstance(content, StorageContent) else _shape_and_sharding_of(content)


def _shape_and_sharding_of(array: jax.Array | None) -> ShapeAndSharding:
    return (None, None) if array is None or any_tracer((array,)) else (array.shape, meshes.sharding_of(array))


_VIRTUAL_SHARDING = "_dynaxla_virtual_sharding"


def set_virtual_sharding(storage: torch.UntypedStorage, shape: tuple[int, ...], sharding: NamedSharding) -> None:
    """Stores the shape and the sharding that a storage's array would have on a virtual mesh. The array itself does not change.

    Only programs that `dynaxla.sharding.report` compiles with `run=False` use this sharding.
    """
    setattr(storage, _VIRTUAL_SHARDING, (shape, sharding))


def virtual_sharding_of(storage: torch.UntypedStorage) -> ShapeAndSharding:
    """Returns the shape and the sharding that `set_virtual_sharding` has set, else (None, None)."""
    return getattr(storage, _VIRTUAL_SHARDING, (None, None))


def sharding_of_content(content: object) -> NamedSharding | None:
    """Returns the mesh sharding of a storage's content, which may be an array or a recorded value.

    Returns None for an array on one device, for an unwritten storage, and for a recorded value whose sharding XLA will choose.
    """
    if isinstance(content, jax.Array):
        return None if any_tracer((content,)) else meshes.sharding_of(content)
    return getattr(content, "sharding", None)


def sharding_of_storage(storage: torch.UntypedStorage) -> NamedSharding | None:
    """Returns the sharding of a storage's array on a mesh, or None."""
    return shape_and_sharding(storage)[1] if meshes.may_have_sharded_arrays() else None


def replicate(storage: torch.UntypedStorage, array: jax.Array, mesh_sharding: NamedSharding) -> jax.Array:
    """Copies the array of a storage from one device to all devices of a mesh. The storage keeps the replicated array.

    Args:
        storage: the storage.
        array: its array.
        mesh_sharding: the mesh's replicated sharding, as from `meshes.common`.
    """
    replicated = meshes.copy_to(array, mesh_sharding)
    # If another thread has written to the storage, this changes nothing, and the caller uses the old value.
    compare_and_swap([(storage, array, replicated)])
    return replicated


def array_from_cpu(tensor: torch.Tensor, device_or_sharding: meshes.DeviceOrMesh | Sharding) -> jax.Array:
    """Copies the value of a CPU tensor to an array in the tensor's logical shape, on a device or with a sharding. Raises: ForkError."""
    if forks.has_lost_xla():
        raise forks.fork_error()
    return meshes.device_put(_host_copy(tensor), device_or_sharding)


def _host_copy(tensor: torch.Tensor) -> np.ndarray:
    """Copies the elements of a CPU tensor to a NumPy array in the tensor's logical shape."""
    tensor = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    target = dtypes.to_jax(tensor.dtype)
    if not tensor.numel():
        return np.zeros(tuple(tensor.shape), target)
    return tensor.reshape(-1).view(torch.uint8).numpy().view(target).reshape(tuple(tensor.shape))


def to_cpu_tensor(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    """Copies the value of an array to a contiguous CPU tensor. `dtype` is the torch dtype of the array.

    Raises: UnsupportedTensor for a tracer.
    """
    if any_tracer((array,)):
        raise UnsupportedTensor(
            f"a tensor {dtype}{list(array.shape)} has no value that Python could read: it holds a tracer, which stands for an argument "
            "of a function that JAX traces or has traced",
            hint="inside the function, use it only in ops (no item(), if, print); outside, use the results of the function",
        )
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    if meshes.sharding_of(array) is None and array.device.platform == "cpu":
        return transfer.export_array(array).clone()
    memory = np.array(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(memory).view(dtype).reshape(array.shape)


def is_jax_tensor(tensor: Any) -> bool:
    """True if the object is a tensor on the device "jax"."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == NAME


def device_of(tensor: torch.Tensor) -> jax.Device:
    """Returns the PJRT device of a tensor's torch device. The array of a tensor on a mesh is on other devices too."""
    return pjrt_devices.jax_device(tensor.device.index or 0)


def resize(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> None:
    """Changes the shape and strides of a tensor. If its storage is too small, the tensor gets a larger one that begins with the old bytes.

    Raises: RuntimeError if the storage is too small and is shared with other tensors.
    """
    storage = tensor.untyped_storage()
    offset = int(tensor.storage_offset())
    needed = (offset + storage_extent(tuple(shape), tuple(stride))) * tensor.dtype.itemsize if math.prod(shape) else 0
    if needed > storage.nbytes():
        # Two references are those of this tensor and of the storage's Python object.
        if storage.nbytes() and private.storage_uses(storage) > 2:
            raise RuntimeError(
                f"a tensor on {tensor.device} cannot be resized from {storage.nbytes()} to {needed} bytes, since other tensors share its "
                "storage: create a new tensor with torch.empty and copy_ instead"
            )
        old = array_of(storage)
        array = None
        if old is not None and storage.nbytes():
            array = _zero_padded(old, needed)
        storage = make_storage(needed, tensor.device, array)
    private.set_storage(tensor, storage, offset, shape, stride)
    private.refuse_address(tensor)


def _zero_padded(array: jax.Array, nbytes: int) -> jax.Array:
    """Returns the bytes of an array as uint8[nbytes], with zeros at the end."""
    memory = np.zeros(nbytes, np.uint8)
    before = np.array(array).reshape(-1).view(np.uint8)
    memory[: before.size] = before
    return jax.device_put(memory, meshes.common([meshes.sharding_of(array)]) or array.device)
