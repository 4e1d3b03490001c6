"""Copies between the device and the CPU, and between tensors of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from .. import forks
from ..lowering import dtypes
from ..lowering.settings import EXACT
from ..observe import metrics
from ..runtime import meshes, private
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.layout import Layout
from . import pjrt_devices, storages, strided_memory
from .op_compiler import compile_program
from .strided_memory import StridedView

# Compiled programs that read or write a tensor in a storage's array, or bitcast the array. The keys have the metadata and the placement.
_programs: LeastRecentlyUsed[Any] = LeastRecentlyUsed(512)


def from_cpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a CPU tensor to a new tensor on the device: with the same strides if they are non-overlapping and dense, else contiguous.

    Raises: RuntimeError for a dtype that JAX does not have; ForkError.
    """
    if not dtypes.is_supported(tensor.dtype):
        raise RuntimeError(f"JAX has no dtype {tensor.dtype}, so {device} does not support it: use another dtype")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    metrics.add("host_copies")
    layout = Layout.of(tuple(tensor.shape), tuple(tensor.stride()))
    if not layout.is_non_overlapping_and_dense:
        tensor = tensor.contiguous()
        layout = Layout.of(tuple(tensor.shape), tuple(tensor.stride()))
    packed = tensor.permute(layout.permutation)
    array = storages.array_from_cpu(packed, pjrt_devices.jax_device(device.index or 0))
    return storages.new_tensor(
        tuple(tensor.shape), layout.strides if tensor.numel() else tuple(tensor.stride()), tensor.dtype, device, array
    )


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor of the device to the CPU. A view of a part of its storage does not keep its strides. Raises: ForkError."""
    if forks.has_lost_xla():
        raise forks.fork_error()
    view = StridedView.of(tensor)
    array = storages.array_of(tensor.untyped_storage())
    nbytes = tensor.untyped_storage().nbytes()
    if array is None:
        with torch.no_grad():
            return torch.zeros_like(tensor, device="cpu")
    metrics.add("host_copies")
    layout = view.layout
    if not (view.conj or view.neg) and view.fills(nbytes) and array.dtype == dtypes.to_jax(view.dtype):
        host = storages.to_cpu_tensor(array, view.dtype).reshape(layout.packed_shape)
        inverse = sorted(range(len(layout.permutation)), key=layout.permutation.__getitem__)
        return host.permute(inverse)
    return storages.to_cpu_tensor(value_of(tensor), view.dtype)


def value_of(tensor: torch.Tensor) -> jax.Array:
    """Returns the tensor's value as an array in the tensor's shape. It may be the storage's own array, so the caller must not donate it."""
    view = StridedView.of(tensor)
    array = storages.array_of(tensor.untyped_storage())
    device = storages.device_of(tensor)
    if array is None:
        return meshes.device_put(np.zeros(view.shape, dtypes.to_jax(view.dtype)), device)
    is_plain = view.layout.is_row_major and not (view.offset or view.conj or view.neg)
    if is_plain and array.shape == view.shape and array.dtype == dtypes.to_jax(view.dtype):
        return array
    if storages.any_tracer((array,)):
        with jax.enable_x64(True):
            return strided_memory.read(array, view)
    key = "read", view, array.shape, array.dtype, _placement_key(array, device)
    call = _programs.get(key)
    if call is None:

        def read(array: jax.Array) -> list[jax.Array]:
            return [strided_memory.read(array, view)]

        call = compile_program(read, [_aval(array, device)], device, EXACT)
        _programs.put(key, call)
    return call([array])[0]


def share(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Copies a tensor without copying data: the target's storage gets the source's array, which is immutable.

    Returns False and changes nothing if that is not possible: for example if the strides differ, or the source's value is recorded only.
    """
    source_storage, target_storage = source.untyped_storage(), target.untyped_storage()
    view, target_view = StridedView.of(source), StridedView.of(target)
    if view != target_view:
        return False
    if private.id_of_storage(source_storage) == private.id_of_storage(target_storage):
        return not strided_memory.has_internal_overlap(target_view)  # the op that copies instead refuses a target that overlaps itself
    if not target_view.fills(target_storage.nbytes()) or source_storage.nbytes() != target_storage.nbytes():
        return False
    array = storages.content_of(source_storage)
    if array is None or isinstance(array, storages.StorageContent):  # recorded ops must not run for this copy
        return False
    if (
        meshes.may_have_sharded_arrays()
        and (sharding := storages.sharding_of_storage(target_storage)) is not None
        and sharding != storages.sharding_of_storage(source_storage)
    ):
        return False  # the target keeps its sharding
    storages.set_content(target_storage, array)
    return True


def bitcast(array: jax.Array, shape: tuple[int, ...], dtype: Any, device: jax.Device) -> jax.Array:
    """Reinterprets the bytes of a storage's array, which is on this device or on a mesh, as an array of another shape and dtype."""
    if storages.any_tracer((array,)):
        with jax.enable_x64(True):
            return strided_memory.bitcast(array, shape, dtype)
    key = "bitcast", shape, dtype, array.shape, array.dtype, _placement_key(array, device)
    call = _programs.get(key)
    if call is None:

        def pack(array: jax.Array) -> list[jax.Array]:
            return [strided_memory.bitcast(array, shape, dtype)]

        call = compile_program(pack, [_aval(array, device)], device, EXACT)
        _programs.put(key, call)
    return call([array])[0]


def write_from_cpu(target: torch.Tensor, source: torch.Tensor) -> None:
    """Writes a CPU tensor into a tensor of the device with the same shape and dtype.

    Raises: RuntimeError if two elements of the target share memory.
    """
    storage, view, device = target.untyped_storage(), StridedView.of(target), storages.device_of(target)
    metrics.add("host_copies")
    layout = view.layout
    if view.fills(storage.nbytes()) and not (view.conj or view.neg):
        permuted = source.detach().permute(layout.permutation)
        sharding = packed_array(target).sharding if storages.sharding_of_storage(storage) is not None else device
        storages.set_content(storage, storages.array_from_cpu(permuted, sharding))
        return
    strided_memory.check_no_internal_overlap(view)
    while True:
        before = storages.array_of(storage)
        value = storages.array_from_cpu(source, meshes.common([storages.sharding_of_storage(storage)]) or device)
        if storages.compare_and_swap([(storage, before, _updated_array(before, storage.nbytes(), view, value, device))]):
            return


def _updated_array(old: jax.Array | None, nbytes: int, view: StridedView, value: jax.Array, device: jax.Device) -> jax.Array:
    """Returns a storage's array after a write to a tensor on the storage.

    Args:
        old: the storage's array before the write; None if nobody has written to the storage.
        nbytes: the size of the storage, in bytes.
        view: the tensor.
        value: the new value of the tensor.
        device: the device of the storage.
    """
    if old is None:
        old = meshes.device_put(np.zeros(nbytes, np.uint8), device)
    if storages.any_tracer((old, value)):
        with jax.enable_x64(True):
            return strided_memory.write(old, view, value)
    key = "write", view, old.shape, old.dtype, _placement_key(old, device)
    call = _programs.get(key)
    if call is None:

        def written(array: jax.Array, value: jax.Array) -> list[jax.Array]:
            new = strided_memory.write(array, view, value)
            return [new if sharding is None else strided_memory.bitcast(new, array.shape, array.dtype)]

        sharding = meshes.sharding_of(old)
        call = compile_program(written, [_aval(old, device), _aval(value, device)], device, EXACT, [sharding])
        _programs.put(key, call)
    (result,) = call([old, value])
    return result


def packed_array(tensor: torch.Tensor) -> jax.Array:
    """Returns the array of a tensor's storage in the tensor's dtype and packed shape (`Layout`). The storage then holds this array.

    The tensor must fill its storage.
    """
    storage, view = tensor.untyped_storage(), StridedView.of(tensor)
    while True:
        array = storages.array_of(storage)
        shape, dtype = view.layout.packed_shape, dtypes.to_jax(view.dtype)
        if array is not None and (array.shape, array.dtype) == (shape, dtype):
            return array
        device = storages.device_of(tensor)
        packed = zeros(shape, view.dtype, device) if array is None else bitcast(array, shape, dtype, device)
        if storages.compare_and_swap([(storage, array, packed)]):
            return packed


def zeros(shape: Sequence[int], dtype: torch.dtype, device_or_sharding: meshes.DeviceOrMesh) -> jax.Array:
    """Returns an array of zeros on a device or with a sharding. While JAX traces a function, the result is an array, too, and no tracer."""
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jax.numpy.zeros(tuple(shape), dtypes.to_jax(dtype), device=device_or_sharding)


def _placement_key(array: jax.Array, device: jax.Device) -> object:
    """Returns a hashable key for the placement of an array: its sharding on a mesh, or its device."""
    return meshes.device_key(meshes.sharding_of(array) or device)


def _aval(array: jax.Array, device: jax.Device) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=meshes.as_sharding(meshes.sharding_of(array) or device))
