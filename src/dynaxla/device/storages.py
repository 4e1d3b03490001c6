"""Tensors on the device "jax": ordinary tensors, on a storage without memory whose Python object has a jax.Array.

torch keeps a storage's Python object for as long as the storage lives, whoever holds it.
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
from . import places
from .beginnings import first_of

NAME = "jax"
_ARRAY = "_dynaxla_array"


# The shape of a storage's array, and its sharding on a mesh. None: nobody has written to it; it lies on one device.
Lies = tuple[tuple[int, ...] | None, NamedSharding | None]


class StandIn:
    """Stands in a storage in an array's place."""

    __slots__ = ()

    def array(self, storage: torch.UntypedStorage) -> jax.Array | None:
        """As `array_of`."""
        raise NotImplementedError

    def lies(self, storage: torch.UntypedStorage) -> Lies:
        """As `lies`."""
        return _lies(self.array(storage))


def make_storage(nbytes: int, device: torch.device, array: jax.Array | StandIn | None = None) -> torch.UntypedStorage:
    """A storage of this size. array: what is in it; None for memory that nobody has written to."""
    storage = private.storage_without_memory(device, nbytes)
    setattr(storage, _ARRAY, array)
    return storage


def make(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, array: jax.Array | None = None
) -> torch.Tensor:
    """A new tensor, alone in its storage. array: what is in the storage."""
    nbytes = storage_extent(tuple(shape), tuple(stride)) * dtype.itemsize
    return on(make_storage(nbytes, device, array), shape, stride, 0, dtype)


def on(storage: torch.UntypedStorage, shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on a storage; not a view to autograd."""
    tensor = transfer.reinterpret(first_of(dtype, storage.device.index or 0), (0,), (1,))
    private.place_tensor(tensor, storage, offset, shape, stride)
    private.refuse_address(tensor)
    return tensor


def array_of(storage: torch.UntypedStorage) -> jax.Array | None:
    """What is in a storage; None if nobody has written to it. It is computed if it is only recorded.

    Raises: RuntimeError for one that dynaxla has not made, or that a failed program was to write to; as the program that computes it.
    """
    held = held_by(storage)
    return held.array(storage) if isinstance(held, StandIn) else held


def held_by(storage: torch.UntypedStorage) -> jax.Array | StandIn | None:
    """As `array_of`, but nothing is computed."""
    try:
        return getattr(storage, _ARRAY)
    except AttributeError:
        if not storage.nbytes():
            return None
        raise RuntimeError(
            f"a storage of {storage.nbytes()} bytes on {storage.device} has no jax.Array: it came from outside of dynaxla, "
            'as through DLPack; move the tensor there with .to("jax")'
        ) from None


class Lost(StandIn):
    """Of a storage whose array was donated to a program that has failed. what: the tensor, in words."""

    def __init__(self, what: str) -> None:
        self._what = what

    def array(self, storage: torch.UntypedStorage) -> jax.Array | None:
        raise RuntimeError(
            f"a tensor ({self._what}) was written to in place by a compiled program that failed while it ran, so its value is lost: "
            "load or make it anew; options={'donate': False} keeps the old values until a program has succeeded"
        )


class Lent(StandIn):
    """Of storages whose arrays are given to a program that may write to them. Other threads wait until it has succeeded or failed.

    Who waits for one holds no other, nor any lock that a thread may need which has one.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lock.acquire()
        self._arrays: dict[int, jax.Array] = {}

    def lend(self, storages: Sequence[torch.UntypedStorage], arrays: Sequence[jax.Array]) -> bool:
        """Gives False, and lends nothing, unless all storages still hold these arrays."""
        self._arrays = {private.identity_of(storage): array for storage, array in zip(storages, arrays, strict=True)}
        return replace_arrays([(storage, array, self) for storage, array in zip(storages, arrays, strict=True)])

    def array(self, storage: torch.UntypedStorage) -> jax.Array | None:
        if forks.is_cut_off():  # the thread that has lent it does not live on
            raise forks.cut_off()
        with self._lock:  # a signal's handler in the same thread does not wait
            if getattr(storage, _ARRAY) is self:
                return self._arrays.get(private.identity_of(storage))
        return array_of(storage)

    def succeed(self, changes: Iterable[tuple[torch.UntypedStorage, jax.Array]]) -> None:
        """The storages have these arrays, but for one that somebody has given another one meanwhile, without looking."""
        with _lock:
            for storage, array in changes:
                if getattr(storage, _ARRAY) is self:
                    set_array(storage, array)
        self._settle()

    def fail(self, given: Iterable[tuple[torch.UntypedStorage, torch.Tensor]]) -> None:
        """What the program has not written to is as it was. given: the storages, and a tensor in each."""
        with _lock:
            for storage, tensor in given:
                if getattr(storage, _ARRAY) is self:
                    array = self._arrays[private.identity_of(storage)]
                    lost = Lost(f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}")
                    set_array(storage, lost if not any_tracer((array,)) and array.is_deleted() else array)
        self._settle()

    def _settle(self) -> None:
        self._arrays = {}
        with contextlib.suppress(RuntimeError):  # Ctrl-C came between this and the caller's next step, so it is done again
            self._lock.release()


def set_array(storage: torch.UntypedStorage, array: jax.Array | StandIn | None) -> None:
    """array: its elements are the storage's bytes."""
    setattr(storage, _ARRAY, array)


_traced: list[bool] = []


def may_hold_tracers() -> None:
    """From now on storages may hold what JAX traces in arrays' places: whoever runs a program asks."""
    _traced[:] = [True]


def tracers_exist() -> bool:
    """Whether there may be any."""
    return bool(_traced)


def any_tracer(arrays: Iterable[Any]) -> bool:
    """Whether one of them stands for an array in a function that JAX traces."""
    return bool(_traced) and any(isinstance(array, jax.core.Tracer) for array in arrays)


def hold_tracers(tensors: Iterable[Any]) -> bool:
    """Whether one of these, of what kind they may be, is a tensor of the device that holds one."""
    return bool(_traced) and any_tracer(held_by(tensor.untyped_storage()) for tensor in tensors if is_ours(tensor))


def outlived(error: Exception) -> UnsupportedTensor:
    """What is raised where a tensor's tracer is used and its function's trace has ended."""
    lines = str(error).splitlines()
    return UnsupportedTensor(
        "a tensor was used outside of the JAX function (under jax.jit, jax.grad, jax.vmap) whose tracer it holds: it was kept, or written "
        f"to, while JAX traced that function. JAX says: {lines[0] if lines else type(error).__name__}",
        hint="return it from the JAX function, with dynaxla.as_jax, instead of keeping it; state goes in and out as argument and result",
    )


_lock = forks.lock()


def replace_arrays(changes: Sequence[tuple[torch.UntypedStorage, jax.Array | StandIn | None, jax.Array | StandIn | None]]) -> bool:
    """Give storages what was made of that in them. changes: storage; what was in it then; what is to be in it.

    Gives False, and changes nothing, if another thread has written to one of them meanwhile: what it wrote would be lost.
    """
    with _lock:
        if any(getattr(storage, _ARRAY, None) is not before for storage, before, _ in changes):
            return False
        for storage, _, after in changes:
            set_array(storage, after)
    return True


def lies(storage: torch.UntypedStorage) -> Lies:
    """How a storage's array lies on several devices. What is recorded is not computed for this."""
    held = held_by(storage)
    return held.lies(storage) if isinstance(held, StandIn) else _lies(held)


def _lies(array: jax.Array | None) -> Lies:
    return (None, None) if array is None or any_tracer((array,)) else (array.shape, meshes.sharding_of(array))


_PLAN = "_dynaxla_plan"


def plan(storage: torch.UntypedStorage, shape: tuple[int, ...], sharding: NamedSharding) -> None:
    """How an array of this shape in a storage would lie on a virtual mesh: programs are compiled for that when `report` asks."""
    setattr(storage, _PLAN, (shape, sharding))


def plan_of(storage: torch.UntypedStorage) -> Lies:
    return getattr(storage, _PLAN, (None, None))


def sharding_of_held(held: object) -> NamedSharding | None:
    """How an array, or what a recording has in its place, lies on a mesh; None for one device, for nothing, and where XLA chooses."""
    if isinstance(held, jax.Array):
        return None if any_tracer((held,)) else meshes.sharding_of(held)
    return getattr(held, "sharding", None)


def sharding_in(storage: torch.UntypedStorage) -> NamedSharding | None:
    """How a storage's array lies on a mesh, or None."""
    return lies(storage)[1] if meshes.exist() else None


def spread(storage: torch.UntypedStorage, array: jax.Array, where: NamedSharding) -> jax.Array:
    """What is in a storage, an array on one device, as one that is whole on each of a mesh's. It stays there."""
    found = meshes.moved(array, where)
    replace_arrays([(storage, array, found)])  # if another thread has written to it, this one reads what was there
    return found


def as_array(tensor: torch.Tensor, where: meshes.Where | Sharding) -> jax.Array:
    """A copy of a CPU tensor's value. Raises: ForkError."""
    if forks.is_cut_off():
        raise forks.cut_off()
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jax.device_put(_host_copy(tensor), where)


def _host_copy(tensor: torch.Tensor) -> np.ndarray:
    """The elements in memory of their own, in logical shape."""
    tensor = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    target = dtypes.to_jax(tensor.dtype)
    if not tensor.numel():
        return np.zeros(tuple(tensor.shape), target)
    return tensor.reshape(-1).view(torch.uint8).numpy().view(target).reshape(tuple(tensor.shape))


def on_host(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    """A copy of an array's value, as a contiguous tensor of the CPU. dtype: torch's name for the array's.

    Raises: UnsupportedTensor for what JAX traces.
    """
    if any_tracer((array,)):
        raise UnsupportedTensor(
            f"a tensor {dtype}{list(array.shape)} has no value that Python or the CPU could look at: it holds a tracer, which stands for "
            "an argument in a function that JAX traces (or has traced)",
            hint="inside, use it only with ops that XLA computes (no item(), if, print); outside, use what the JAX function returned",
        )
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    if meshes.sharding_of(array) is None and array.device.platform == "cpu":
        return transfer.export_array(array).clone()
    memory = np.array(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(memory).view(dtype).reshape(array.shape)


def is_ours(tensor: Any) -> bool:
    """Whether it is a tensor on the device."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == NAME


def device_of(tensor: torch.Tensor) -> jax.Device:
    return places.jax_device(tensor.device.index or 0)


def resize(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> None:
    """Give a tensor another shape, and a larger storage if it needs one, whose beginning is what the old one held.

    Raises: RuntimeError if the storage is too small, and something else refers to it, too.
    """
    storage = tensor.untyped_storage()
    offset = int(tensor.storage_offset())
    needed = (offset + storage_extent(tuple(shape), tuple(stride))) * tensor.dtype.itemsize if math.prod(shape) else 0
    if needed > storage.nbytes():
        # The tensor's reference, and that of the storage's Python object here.
        if storage.nbytes() and private.storage_uses(storage) > 2:
            raise RuntimeError(
                f"a tensor on {tensor.device} cannot be resized from {storage.nbytes()} to {needed} bytes, since other tensors share its "
                "storage: make a new tensor instead, as with torch.empty and copy_"
            )
        old = array_of(storage)
        array = None
        if old is not None and storage.nbytes():
            array = _longer(old, needed)
        storage = make_storage(needed, tensor.device, array)
    private.place_tensor(tensor, storage, offset, shape, stride)
    private.refuse_address(tensor)


def _longer(array: jax.Array, nbytes: int) -> jax.Array:
    memory = np.zeros(nbytes, np.uint8)
    before = np.array(array).reshape(-1).view(np.uint8)
    memory[: before.size] = before
    return jax.device_put(memory, meshes.common([meshes.sharding_of(array)]) or array.device)
