"""Marks the mesh axes along which a tensor's dimensions are sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from ..runtime import meshes, private
from .mesh import Mesh

# The axes along which each dimension is sharded.
Spec: TypeAlias = Sequence[str | Sequence[str] | None] | PartitionSpec


def mark_sharding(tensor: torch.Tensor, mesh: Any, spec: Spec) -> torch.Tensor:
    """Shards a tensor on the device "jax" over a mesh. Its values, views, identity and version do not change.

    Inside a program (torch.compile, compile_step, to_jax, and ops recorded in lazy mode) it is a constraint on the sharding of the result
    there; gradients get the same sharding, except in steps, where XLA chooses.

    Args:
        tensor: The tensor.
        mesh: A `Mesh`, or torch's DeviceMesh with named dimensions.
        spec: For each dimension None, an axis' name, or a tuple of names, as in JAX's PartitionSpec. Omitted trailing dimensions are not
            sharded.

    Returns:
        The tensor; inside a program, a new one.

    Raises:
        ArgumentError: The spec does not fit the tensor.
        UnsupportedTensor: The tensor is not on the device, or is a part of another tensor.
    """
    mesh = Mesh.of(mesh)
    axes = _checked(tensor, mesh, spec)
    if isinstance(tensor, FakeTensor):
        return _recorded(tensor, lambda x: sharding_constraints.OP(x, mesh.sizes, mesh.names, mesh.devices, axes))
    if torch.compiler.is_compiling():
        return sharding_constraints.OP(tensor, mesh.sizes, mesh.names, mesh.devices, axes)
    _check_kind(tensor)
    storage = tensor.untyped_storage()
    if isinstance(storages.content_of(storage), storages.StorageContent) or storages.hold_tracers([tensor]):
        return sharding_constraints.OP(tensor, mesh.sizes, mesh.names, mesh.devices, axes)
    place = StridedView.of(tensor)
    if tensor.numel() and not place.fills(storage.nbytes()):
        raise UnsupportedTensor(
            f"a tensor {_shown(tensor)} is a view of a part of another tensor, or overlaps itself, so it cannot have its own sharding",
            hint="mark the whole tensor, or a copy of the view: x.clone()",
        )
    packed = [axes[dim] for dim in place.layout.permutation]
    sharding = sharding_constraints.sharding_of(mesh.sizes, mesh.names, mesh.devices, packed)
    if mesh.is_virtual:
        storages.set_plan(storage, place.layout.packed_shape, sharding)
        return tensor
    if len(mesh.devices) == 1:
        if mesh.devices[0] != tensor.device.index:
            raise ArgumentError(
                f"{mesh} does not have the device of a tensor {_shown(tensor)} on {tensor.device}", hint="move the tensor to the mesh"
            )
        return tensor
    gradient_shardings.register(tensor)
    while tensor.numel():
        array = copies.packed_array(tensor)
        if array.sharding == sharding or storages.compare_and_swap([(storage, array, meshes.moved(array, sharding))]):
            break
    return tensor


def _recorded(tensor: torch.Tensor, constrain: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns the constrained copy that replaces a tensor in a step that is being recorded.

    Such a step does not record functions with custom derivatives, or hooks, so the gradient's sharding is left to XLA.
    """
    result = tensor.clone()
    with torch.no_grad(), private.below_autograd():
        result.copy_(constrain(result))
    return result


def _checked(tensor: torch.Tensor, mesh: Mesh, spec: Spec) -> list[str]:
    """Returns the spec as the op takes it: for each dimension, axis names separated by commas.

    Raises:
        ArgumentError: The spec does not fit the tensor.
    """
    if isinstance(spec, str) or len(tuple(spec)) > tensor.dim():
        raise ArgumentError(
            f"spec {spec!r} has {len(tuple(spec))} entries for a tensor {_shown(tensor)} of {tensor.dim()} dimensions",
            hint="give one entry for each dimension: None, the name of an axis, or a tuple of names",
        )
    found: list[str] = []
    used: set[str] = set()
    for dim, entry in enumerate(spec):
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        count = 1
        for name in names:
            if name not in mesh.names:
                raise ArgumentError(
                    f"spec {spec!r} of a tensor {_shown(tensor)} names an axis {name!r}, which {mesh} does not have",
                    hint=f"the axes of the mesh are {', '.join(mesh.names)}",
                )
            if name in used:
                raise ArgumentError(
                    f"spec {spec!r} of a tensor {_shown(tensor)} has the axis {name!r} twice",
                    hint="an axis shards one dimension: leave it out of one of the entries",
                )
            used.add(name)
            count *= mesh.sizes[mesh.names.index(name)]
        size = tensor.shape[dim]
        if size % count:
            raise ArgumentError(
                f"dimension {dim} of a tensor {_shown(tensor)} has size {size}, not a multiple of the {count} devices along {names}",
                hint=f"pad it to {-(-size // count) * count}, or leave the dimension whole: None in the spec",
            )
        found.append(",".join(names))
    return found + [""] * (tensor.dim() - len(found))


def _check_kind(tensor: torch.Tensor) -> None:
    if not storages.is_jax_tensor(tensor):
        raise UnsupportedTensor(
            f"a tensor {_shown(tensor)} is on {tensor.device}, and only tensors on the device jax can be on a mesh",
            hint='call dynaxla.device.enable(), and move the tensor: x.to("jax")',
        )


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def shard_module(model: nn.Module, mesh: Any, specs: Mapping[str, Spec]) -> nn.Module:
    """Shards a module's parameters and buffers, and their gradients, over a mesh. Moves the module to the device "jax" if necessary.

    Args:
        specs: Specs by fnmatch pattern of names in `named_parameters` and `named_buffers`. The last matching pattern applies; a tensor that
            none matches is replicated on each device.

    Returns:
        The module.

    Raises:
        ArgumentError: A pattern matches no name, or as in `mark_sharding`. If a spec does not fit its tensor, nothing has been sharded.
    """
    mesh = Mesh.of(mesh)
    if not all(map(storages.is_jax_tensor, _tensors(model).values())):
        model.to("jax" if mesh.is_virtual else f"jax:{mesh.devices[0]}")
    tensors = _tensors(model)
    for pattern in specs:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            names = ", ".join(list(tensors)[:20])
            raise ArgumentError(f"the pattern {pattern!r} matches no parameter or buffer", hint=f"the names are {names}")
    chosen = {name: next((spec for pattern, spec in reversed(list(specs.items())) if fnmatchcase(name, pattern)), ()) for name in tensors}
    for name, tensor in tensors.items():
        try:
            _checked(tensor, mesh, chosen[name])
        except ArgumentError as error:
            raise ArgumentError(f"{name}: {error.message}", hint=error.hint) from None
    for name, tensor in tensors.items():
        mark_sharding(tensor, mesh, chosen[name])
        if tensor.grad is not None:
            mark_sharding(tensor.grad, mesh, chosen[name])
    return model


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def sharding_of(tensor: torch.Tensor) -> jax.sharding.NamedSharding | None:
    """Returns the sharding of a tensor that fills its storage, by the tensor's dimensions; None for a tensor on a single device.

    Raises:
        UnsupportedTensor: The tensor is not on the device "jax".
    """
    _check_kind(tensor)
    return meshes.sharding_of(copies.value_of(tensor.detach()))


def local_shards(tensor: torch.Tensor) -> list[tuple[torch.device, tuple[slice, ...], torch.Tensor]]:
    """Returns the shards of a tensor on this process's devices: each one's device, its index in the tensor, and a copy on the CPU.

    Raises:
        UnsupportedTensor: The tensor is not on the device "jax".
    """
    _check_kind(tensor)
    array = copies.value_of(tensor.detach())
    numbers = {device: index for index, device in enumerate(jax.local_devices())}
    return [
        (torch.device("jax", numbers[shard.device]), shard.index, storages.to_cpu_tensor(shard.data, tensor.dtype))
        for shard in array.addressable_shards
    ]
