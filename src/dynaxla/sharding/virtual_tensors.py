"""Tensors as they would be on a mesh: a program can be compiled for them, but cannot run."""

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
    return private.identity_of(tensor.untyped_storage())


def placed(inputs: Sequence[Any], mesh: Mesh, dims: Mapping[int, Dims]) -> list[Any]:
    """Returns a program's inputs as they would be on a mesh.

    Tensors on the device get storages without data, which alias each other as the inputs' storages do; other inputs are unchanged.

    Args:
        dims: The sharding by `storage_key`, for tensors that fill their storages; all other tensors are replicated on each device.
    """
    made: dict[int, torch.UntypedStorage] = {}
    found = []
    for tensor in inputs:
        if not storages.is_jax_tensor(tensor):
            found.append(tensor)
            continue
        key = storage_key(tensor)
        if key not in made:
            shape, dtype, sharding = _lies(tensor, mesh, dims.get(key, ()))
            # It has the attributes of an array that are read before a program is called.
            array: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            made[key] = storages.make_storage(tensor.untyped_storage().nbytes(), tensor.device, array)
        found.append(storages.tensor_on(made[key], tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype))
    return found


def _lies(tensor: torch.Tensor, mesh: Mesh, dims: Dims) -> tuple[tuple[int, ...], Any, NamedSharding]:
    """Returns the shape and dtype of the array in a tensor's storage, and the sharding that it would have."""
    storage, place = tensor.untyped_storage(), StridedView.of(tensor)
    if place.fills(storage.nbytes()):
        by_dim = [",".join(axes) for axes in dims] + [""] * (tensor.dim() - len(dims))
        spec = [by_dim[dim] for dim in place.layout.permutation]
        return place.layout.packed_shape, dtypes.to_jax(tensor.dtype), _sharding(mesh, spec)
    array = storages.array_of(storage)
    shape, dtype = ((storage.nbytes(),), dtypes.to_jax(torch.uint8)) if array is None else (array.shape, array.dtype)
    return shape, dtype, _sharding(mesh, [])


def _sharding(mesh: Mesh, spec: Sequence[str]) -> NamedSharding:
    return sharding_constraints.sharding_of(mesh.sizes, mesh.names, mesh.devices, spec)


def bytes_of_inputs(inputs: Sequence[Any], mesh: Mesh, dims: Mapping[int, Dims]) -> int:
    """Returns the number of bytes that the inputs need on each device."""
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    found: dict[int, int] = {}
    for tensor in inputs:
        if storages.is_jax_tensor(tensor):
            key = storage_key(tensor)
            parts = math.prod(sizes[axis] for axes in dims.get(key, ()) for axis in axes)
            found[key] = tensor.untyped_storage().nbytes() // parts
    return sum(found.values())
