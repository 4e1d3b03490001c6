"""Virtual tensors: copies of a program's inputs without data, with shardings on a mesh. Programs can be compiled for them, but not run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding

from ..device import storages
from ..device.strided_memory import StridedView
from ..lowering import dtypes
from ..lowering.ops import sharding_constraints
from ..runtime import private
from .mesh import Mesh

# The axes along which each dimension of a tensor is sharded.
Dims = tuple[tuple[str, ...], ...]


def storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that identifies the storage of a tensor."""
    return private.id_of_storage(tensor.untyped_storage())


def virtual_inputs(inputs: Sequence[Any], mesh: Mesh, dims: Mapping[int, Dims]) -> list[Any]:
    """Returns a program's inputs with virtual tensors in place of the tensors on the device. Other inputs are unchanged.

    Tensors that share a storage get virtual tensors that share a storage, too.

    Args:
        inputs: The inputs of a call of the program.
        mesh: The mesh.
        dims: The shardings of tensors that fill their storages, by `storage_key`. All other tensors are replicated on each device.
    """
    virtual_storages: dict[int, torch.UntypedStorage] = {}
    virtual = []
    for tensor in inputs:
        if not storages.is_jax_tensor(tensor):
            virtual.append(tensor)
            continue
        key = storage_key(tensor)
        if key not in virtual_storages:
            shape, dtype, sharding = _virtual_array(tensor, mesh, dims.get(key, ()))
            # A ShapeDtypeStruct has all those attributes of an array that are read before a program is called.
            array: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            virtual_storages[key] = storages.make_storage(tensor.untyped_storage().nbytes(), tensor.device, array)
        virtual.append(storages.tensor_on(virtual_storages[key], tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype))
    return virtual


def _virtual_array(tensor: torch.Tensor, mesh: Mesh, dims: Dims) -> tuple[tuple[int, ...], Any, NamedSharding]:
    """Returns the shape and dtype of the array in a tensor's storage, and the sharding that it would have on the mesh."""
    storage, view = tensor.untyped_storage(), StridedView.of(tensor)
    if view.fills(storage.nbytes()):
        by_dim = [",".join(axes) for axes in dims] + [""] * (tensor.dim() - len(dims))
        spec = [by_dim[dim] for dim in view.layout.permutation]
        return view.layout.packed_shape, dtypes.to_jax(tensor.dtype), _sharding(mesh, spec)
    array = storages.array_of(storage)
    shape, dtype = ((storage.nbytes(),), dtypes.to_jax(torch.uint8)) if array is None else (array.shape, array.dtype)
    return shape, dtype, _sharding(mesh, [])


def _sharding(mesh: Mesh, spec: Sequence[str]) -> NamedSharding:
    return sharding_constraints.sharding_of(mesh.sizes, mesh.names, mesh.devices, spec)


def bytes_of_inputs(inputs: Sequence[Any], mesh: Mesh, dims: Mapping[int, Dims]) -> int:
    """Returns the number of bytes that the inputs need on each device. Tensors that share a storage count once."""
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    bytes_of: dict[int, int] = {}
    for tensor in inputs:
        if storages.is_jax_tensor(tensor):
            key = storage_key(tensor)
            shard_count = math.prod(sizes[axis] for axes in dims.get(key, ()) for axis in axes)
            bytes_of[key] = tensor.untyped_storage().nbytes() // shard_count
    return sum(bytes_of.values())
