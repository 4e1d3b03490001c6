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
from .op_compiler import compiled
from .strided_memory import StridedView

# Compiled programs that read or write a view, for which there is no ATen op.
_reads: LeastRecentlyUsed[Any] = LeastRecentlyUsed(512)


def from_cpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a CPU tensor to a new tensor on the device, with the same strides if it is dense."""
    if not dtypes.is_supported(tensor.dtype):
        raise RuntimeError(f"JAX has no dtype {tensor.dtype}, so {device} does not support it: use another dtype")
    tensor = tensor.detach().resolve_conj().resolve_neg()
    metrics.add("host_copies")
    layout = Layout.of(tuple(tensor.shape), tuple(tensor.stride()))
    if not layout.is_whole:
        tensor = tensor.contiguous()
        layout = Layout.of(tuple(tensor.shape), tuple(tensor.stride()))
    packed = tensor.permute(layout.permutation)
    array = storages.as_array(packed, pjrt_devices.jax_device(device.index or 0))
    return storages.make(tuple(tensor.shape), layout.strides if tensor.numel() else tuple(tensor.stride()), tensor.dtype, device, array)


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor of the device to the CPU, with the same strides if it is dense. Raises: ForkError."""
    if forks.has_lost_xla():
        raise forks.fork_error()
    place = StridedView.of(tensor)
    array = storages.array_of(tensor.untyped_storage())
    nbytes = tensor.untyped_storage().nbytes()
    if array is None:
        with torch.no_grad():
            return torch.zeros_like(tensor, device="cpu")
    metrics.add("host_copies")
    layout = place.layout
    plain = not place.conj and not place.neg
    if plain and place.fills(nbytes) and array.dtype == dtypes.to_jax(place.dtype):
        host = storages.on_host(array, place.dtype).reshape(layout.packed_shape)
        inverse = sorted(range(len(layout.permutation)), key=layout.permutation.__getitem__)
        return host.permute(inverse)
    return storages.on_host(value_of(tensor), place.dtype)


def value_of(tensor: torch.Tensor) -> jax.Array:
    """Returns the tensor's value as an array in its logical shape. It may be the storage's own array, since arrays are immutable."""
    place = StridedView.of(tensor)
    array = storages.array_of(tensor.untyped_storage())
    device = storages.device_of(tensor)
    if array is None:
        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            return jax.device_put(np.zeros(place.shape, dtypes.to_jax(place.dtype)), device)
    plain = place.layout.is_row_major and not (place.offset or place.conj or place.neg)
    if plain and array.shape == place.shape and array.dtype == dtypes.to_jax(place.dtype):
        return array
    if storages.any_tracer((array,)):
        with jax.enable_x64(True):
            return strided_memory.read(array, place)
    key = "read", place, array.shape, array.dtype, _placed(array, device)
    call = _reads.get(key)
    if call is None:

        def read(held: jax.Array) -> list[jax.Array]:
            return [strided_memory.read(held, place)]

        call = compiled(read, [_aval(array, device)], device, EXACT)
        _reads.put(key, call)
    return call([array])[0]


def share(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Copies by sharing: the target's storage gets the source's array, which is immutable.

    Returns False and changes nothing where sharing does not make the target a copy of the source.
    """
    mine, theirs = source.untyped_storage(), target.untyped_storage()
    place, wanted = StridedView.of(source), StridedView.of(target)
    if place != wanted:
        return False
    if private.identity_of(mine) == private.identity_of(theirs):
        return not strided_memory.shares_elements(wanted)  # ops refuse to write to tensors whose elements overlap
    if not wanted.fills(theirs.nbytes()) or mine.nbytes() != theirs.nbytes():
        return False
    array = storages.held_by(mine)
    if array is None or isinstance(array, storages.StorageContent):  # so that recorded ops do not run for this copy
        return False
    if meshes.exist() and (kept := storages.sharding_in(theirs)) is not None and kept != storages.sharding_in(mine):
        return False  # the target keeps its sharding
    storages.set_array(theirs, array)
    return True


def packed(array: jax.Array, shape: tuple[int, ...], dtype: Any, device: jax.Device) -> jax.Array:
    """Returns the bytes of a storage's array as an array of another shape and dtype."""
    if storages.any_tracer((array,)):
        with jax.enable_x64(True):
            return strided_memory.alike(array, shape, dtype)
    key = "packed", shape, dtype, array.shape, array.dtype, _placed(array, device)
    call = _reads.get(key)
    if call is None:

        def pack(held: jax.Array) -> list[jax.Array]:
            return [strided_memory.alike(held, shape, dtype)]

        call = compiled(pack, [_aval(array, device)], device, EXACT)
        _reads.put(key, call)
    return call([array])[0]


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Writes a CPU tensor into a tensor of the device with the same shape and dtype.

    Raises: RuntimeError if two elements of the target share memory.
    """
    storage, place, device = target.untyped_storage(), StridedView.of(target), storages.device_of(target)
    metrics.add("host_copies")
    layout = place.layout
    if place.fills(storage.nbytes()) and not (place.conj or place.neg):
        permuted = source.detach().permute(layout.permutation)
        kept = packed_array(target).sharding if storages.sharding_in(storage) is not None else device
        storages.set_array(storage, storages.as_array(permuted, kept))
        return
    strided_memory.refuse_shared_elements(place)
    while True:
        before = storages.array_of(storage)
        value = storages.as_array(source, meshes.common([storages.sharding_in(storage)]) or device)
        if storages.replace_arrays([(storage, before, _with_part(before, storage.nbytes(), place, value, device))]):
            return


def _with_part(held: jax.Array | None, nbytes: int, place: StridedView, value: jax.Array, device: jax.Device) -> jax.Array:
    """Returns a storage's array after a write to a tensor in it. `held` is the old array, `nbytes` the size of the storage."""
    if held is None:
        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            held = jax.device_put(np.zeros(nbytes, np.uint8), device)
    if storages.any_tracer((held, value)):
        with jax.enable_x64(True):
            return strided_memory.write(held, place, value)
    key = "write", place, held.shape, held.dtype, _placed(held, device)
    call = _reads.get(key)
    if call is None:

        def written(array: jax.Array, value: jax.Array) -> list[jax.Array]:
            new = strided_memory.write(array, place, value)
            return [new if kept is None else strided_memory.alike(new, held.shape, held.dtype)]

        kept = meshes.sharding_of(held)
        call = compiled(written, [_aval(held, device), _aval(value, device)], device, EXACT, [kept])
        _reads.put(key, call)
    (result,) = call([held, value])
    return result


def packed_array(tensor: torch.Tensor) -> jax.Array:
    """Returns the array of a tensor's storage in the tensor's packed shape, and stores it there. The tensor must fill its storage."""
    storage, place = tensor.untyped_storage(), StridedView.of(tensor)
    while True:
        array = storages.array_of(storage)
        shape, dtype = place.layout.packed_shape, dtypes.to_jax(place.dtype)
        if array is not None and (array.shape, array.dtype) == (shape, dtype):
            return array
        device = storages.device_of(tensor)
        found = zeros(shape, place.dtype, device) if array is None else packed(array, shape, dtype, device)
        if storages.replace_arrays([(storage, array, found)]):
            return found


def zeros(shape: Sequence[int], dtype: torch.dtype, where: meshes.Where) -> jax.Array:
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jax.numpy.zeros(tuple(shape), dtypes.to_jax(dtype), device=where)


def _placed(array: jax.Array, device: jax.Device) -> object:
    """Returns a hashable key for the placement of an array: its sharding on a mesh, or its device."""
    return meshes.key_of(meshes.sharding_of(array) or device)


def _aval(array: jax.Array, device: jax.Device) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=meshes.as_sharding(meshes.sharding_of(array) or device))
