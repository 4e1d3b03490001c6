"""Shards tensors and modules over a mesh: `mark_sharding`, `shard_module`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import jax
import torch
from jax.sharding import PartitionSpec
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..device import copies, gradient_shardings, storages
from ..device.strided_memory import StridedView
from ..errors import ArgumentError, UnsupportedTensor
from ..lowering.ops import sharding_constraints
from ..runtime import meshes
from .mesh import Mesh

# The mesh axes along which each dimension of a tensor is sharded.
Spec: TypeAlias = Sequence[str | Sequence[str] | None] | PartitionSpec


def mark_sharding(tensor: torch.Tensor, mesh: Any, spec: Spec) -> torch.Tensor:
    """Shards a tensor on the device "jax" over a mesh. The tensor stays the same object, with its values, views and version counter.

    Inside a program (torch.compile, compile_step, to_jax, and ops recorded in lazy mode), `mark_sharding` constrains the sharding of the
    tensor that it returns, and of that tensor's gradient.

    Args:
        tensor: The tensor.
        mesh: A `Mesh`, or torch's DeviceMesh with named dimensions.
        spec: For each dimension None, the name of an axis, or a tuple of names, as in JAX's PartitionSpec. Omitted trailing dimensions are
            not sharded.

    Returns:
        The tensor; inside a program, a new tensor.

    Raises:
        ArgumentError: The spec does not fit the tensor, or the mesh is one device and the tensor is on another.
        UnsupportedTensor: The tensor is not on the device "jax", or does not fill its storage.
    """
    mesh = Mesh.of(mesh)
    axes = _axes_of_spec(tensor, mesh, spec)
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return sharding_constraints.SHARDING_CONSTRAINT(tensor, mesh.sizes, mesh.names, mesh.devices, axes)
    _check_on_device(tensor)
    storage = tensor.untyped_storage()
    if isinstance(storages.content_of(storage), storages.StorageContent) or storages.any_traced_tensor([tensor]):
        return sharding_constraints.SHARDING_CONSTRAINT(tensor, mesh.sizes, mesh.names, mesh.devices, axes)
    view = StridedView.of(tensor)
    if tensor.numel() and not view.fills(storage.nbytes()):
        raise UnsupportedTensor(
            f"a tensor {_describe(tensor)} is a view of a part of another tensor, or overlaps itself, so it cannot have its own sharding",
            hint="mark the whole tensor, or a copy of the view: x.clone()",
        )
    packed = [axes[dim] for dim in view.layout.permutation]
    sharding = sharding_constraints.sharding_of(mesh.sizes, mesh.names, mesh.devices, packed)
    if mesh.is_virtual:
        storages.set_virtual_sharding(storage, view.layout.packed_shape, sharding)
        return tensor
    if len(mesh.devices) == 1:
        if mesh.devices[0] != tensor.device.index:
            raise ArgumentError(
                f"{mesh} does not have the device of a tensor {_describe(tensor)} on {tensor.device}", hint="move the tensor to the mesh"
            )
        return tensor
    gradient_shardings.register(tensor)
    while tensor.numel():
        array = copies.packed_array(tensor)
        if array.sharding == sharding or storages.compare_and_swap([(storage, array, meshes.copy_to(array, sharding))]):
            break
    return tensor


def _axes_of_spec(tensor: torch.Tensor, mesh: Mesh, spec: Spec) -> list[str]:
    """Converts a spec to the argument of the op `sharding_constraint`: for each dimension, axis names separated by commas.

    Raises:
        ArgumentError: The spec does not fit the tensor.
    """
    if isinstance(spec, str) or len(tuple(spec)) > tensor.dim():
        raise ArgumentError(
            f"spec {spec!r} has {len(tuple(spec))} entries for a tensor {_describe(tensor)} of {tensor.dim()} dimensions",
            hint="give one entry for each dimension: None, the name of an axis, or a tuple of names",
        )
    axes: list[str] = []
    used: set[str] = set()
    for dim, entry in enumerate(spec):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        count = 1
        for name in names:
            if name not in mesh.names:
                raise ArgumentError(
                    f"spec {spec!r} of a tensor {_describe(tensor)} names an axis {name!r}, which {mesh} does not have",
                    hint=f"the axes of the mesh are {', '.join(mesh.names)}",
                )
            if name in used:
                raise ArgumentError(
                    f"spec {spec!r} of a tensor {_describe(tensor)} has the axis {name!r} twice",
                    hint="an axis shards one dimension: leave it out of one of the entries",
                )
            used.add(name)
            count *= mesh.sizes[mesh.names.index(name)]
        size = tensor.shape[dim]
        if size % count:
            raise ArgumentError(
                f"dimension {dim} of a tensor {_describe(tensor)} has size {size}, not a multiple of the {count} devices along {names}",
                hint=f"pad it to {-(-size // count) * count}, or leave the dimension whole: None in the spec",
            )
        axes.append(",".join(names))
    return axes + [""] * (tensor.dim() - len(axes))


def _check_on_device(tensor: torch.Tensor) -> None:
    """Raises UnsupportedTensor for a tensor that is not on the device "jax"."""
    if not storages.is_jax_tensor(tensor):
        raise UnsupportedTensor(
            f"a tensor {_describe(tensor)} is on {tensor.device}, and only tensors on the device jax can be on a mesh",
            hint='call dynaxla.device.enable(), and move the tensor: x.to("jax")',
        )


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def shard_module(model: nn.Module, mesh: Any, specs: Mapping[str, Spec]) -> nn.Module:
    """Shards a module's parameters and buffers, and their gradients, over a mesh. Moves the module to the device "jax" if necessary.

    Args:
        model: The module.
        mesh: A `Mesh`, or torch's DeviceMesh with named dimensions.
        specs: Specs by pattern (fnmatch) for names in `named_parameters` and `named_buffers`. The last matching pattern applies. A tensor
            whose name matches no pattern is replicated on each device.

    Returns:
        The module.

    Raises:
        ArgumentError: A pattern matches no name, or a spec does not fit its tensor. No tensor has been sharded then.
        UnsupportedTensor: See `mark_sharding`.
    """
    mesh = Mesh.of(mesh)
    if not all(map(storages.is_jax_tensor, _tensors(model).values())):
        model.to("jax" if mesh.is_virtual else f"jax:{mesh.devices[0]}")
    tensors = _tensors(model)
    for pattern in specs:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            names = ", ".join(list(tensors)[:20])
            raise ArgumentError(f"the pattern {pattern!r} matches no parameter or buffer", hint=f"the names are {names}")
    spec_of = {name: next((spec for pattern, spec in reversed(list(specs.items())) if fnmatchcase(name, pattern)), ()) for name in tensors}
    for name, tensor in tensors.items():
        try:
            _axes_of_spec(tensor, mesh, spec_of[name])
        except ArgumentError as error:
            raise ArgumentError(f"{name}: {error.message}", hint=error.hint) from None
    for name, tensor in tensors.items():
        mark_sharding(tensor, mesh, spec_of[name])
        if tensor.grad is not None:
            mark_sharding(tensor.grad, mesh, spec_of[name])
    return model


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def sharding_of(tensor: torch.Tensor) -> jax.sharding.NamedSharding | None:
    """Returns the sharding of a tensor, in the order of the tensor's dimensions; None for a tensor on a single device.

    Raises:
        UnsupportedTensor: The tensor is not on the device "jax".
    """
    _check_on_device(tensor)
    return meshes.sharding_of(copies.value_of(tensor.detach()))


def local_shards(tensor: torch.Tensor) -> list[tuple[torch.device, tuple[slice, ...], torch.Tensor]]:
    """Returns the shards of a tensor on this process's devices: for each shard, its device, its slices of the tensor, and a CPU copy.

    Raises:
        UnsupportedTensor: The tensor is not on the device "jax".
    """
    _check_on_device(tensor)
    array = copies.value_of(tensor.detach())
    index_of = {device: index for index, device in enumerate(jax.local_devices())}
    return [
        (torch.device("jax", index_of[shard.device]), shard.index, storages.to_cpu_tensor(shard.data, tensor.dtype))
        for shard in array.addressable_shards
    ]
