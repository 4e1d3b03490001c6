"""Arrays that are sharded over a mesh of devices: their shardings, copies to a device or mesh, and compilation without execution."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..errors import ArgumentError, DeviceMismatch, UnsupportedTensor
from . import clients, topologies
from .topologies import Topology

# The devices on which a program runs: one device, or all devices of a mesh (given as the mesh's replicated sharding).
DeviceOrMesh: TypeAlias = jax.Device | NamedSharding

# True after `expect_sharded_arrays`.
_expected = False


def expect_sharded_arrays() -> None:
    """Makes all later calls of programs check for sharded arrays. Must be called before the process creates its first mesh."""
    global _expected
    _expected = True


def may_have_sharded_arrays() -> bool:
    """True if `expect_sharded_arrays` was called. Otherwise each array of this process is on one device."""
    return _expected


class _CompileOnly(threading.local):
    is_active = False
    topology: Topology | None = None


_compile_only = _CompileOnly()


def is_compile_only() -> bool:
    """True if this thread compiles programs for inspection only, and runs none."""
    return _compile_only.is_active


def topology() -> Topology | None:
    """Returns the topology for which this thread compiles programs instead of for the tensors' devices; None outside of `compile_only`."""
    return _compile_only.topology


@contextlib.contextmanager
def compile_only(topology: Topology | None = None) -> Iterator[None]:
    """A context in which this thread compiles the programs of tensors on the device "jax", and does not run them.

    So the mesh may be virtual: its devices need not exist. With a topology, programs are compiled for the topology's devices: a program on
    a mesh for all of them, whose number must be the mesh's size, and any other program for the first one.
    """
    before = _compile_only.is_active, _compile_only.topology
    _compile_only.is_active, _compile_only.topology = True, topology
    try:
        yield
    finally:
        _compile_only.is_active, _compile_only.topology = before


def for_compilation(sharding: NamedSharding | None) -> NamedSharding | None:
    """Returns a sharding like this one over the devices for which this thread compiles; the sharding itself if these are its devices.

    If this thread has no topology, virtual devices of the CPU stand for the devices of a topology.

    Raises: ArgumentError if the mesh and the topology have different numbers of devices.
    """
    if sharding is None:
        return None
    mesh, target = sharding.mesh, _compile_only.topology
    if target is None and not topologies.has(mesh.devices.flat[0]):
        return sharding
    if target is not None and mesh.devices.flat[0] in target.devices:
        return sharding
    return NamedSharding(_mesh_over(target, mesh), sharding.spec)


def avals_for_compilation(avals: Iterable[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """Returns the arguments of a program. With a topology, arguments without a sharding are placed on its first device."""
    if _compile_only.topology is None:
        return list(avals)
    sharding = SingleDeviceSharding(_compile_only.topology.devices[0])
    return [aval if aval.sharding is not None else jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding) for aval in avals]


@functools.lru_cache(maxsize=64)
def _mesh_over(target: Topology | None, mesh: Mesh) -> Mesh:
    """Returns a mesh like `mesh` over the devices of a topology, or over virtual devices of the CPU."""
    if target is None:
        devices = np.array(clients.virtual_devices(mesh.size)).reshape(mesh.devices.shape)
    elif mesh.size != len(target.devices):
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise ArgumentError(
            f"the mesh ({axes}) has {mesh.size} devices, and the topology {target} has {len(target.devices)}",
            hint="create a virtual mesh with as many devices as the topology has, or choose another topology",
        )
    else:
        devices = mesh_utils.create_device_mesh(mesh.devices.shape, list(target.devices), allow_split_physical_axes=True)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def sharding_of(array: jax.Array | None) -> NamedSharding | None:
    """Returns the sharding of an array on several devices; None for an array on one device, and for None.

    Raises: UnsupportedTensor for an array on several devices whose sharding is not a NamedSharding.
    """
    if array is None:
        return None
    sharding = array.sharding
    if type(sharding) is SingleDeviceSharding or len(sharding.device_set) == 1:
        return None
    if not isinstance(sharding, NamedSharding):
        raise UnsupportedTensor(
            f"an array is on {len(sharding.device_set)} devices with the sharding {sharding}, which is not a NamedSharding",
            hint="call jax.device_put(array, jax.sharding.NamedSharding(mesh, spec)) first",
        )
    return sharding


def common(shardings: Iterable[NamedSharding | None]) -> NamedSharding | None:
    """Returns the replicated sharding of the mesh that the arrays of a program share; None if no array is on a mesh.

    Args:
        shardings: The result of `sharding_of` for each array.

    Raises: DeviceMismatch if two arrays are on meshes of different devices, or of the same devices in different orders.
    """
    mesh: Mesh | None = None
    for sharding in shardings:
        if sharding is None or sharding.mesh is mesh:
            continue
        if mesh is None:
            mesh = sharding.mesh
        elif tuple(mesh.devices.flat) != tuple(sharding.mesh.devices.flat):
            raise DeviceMismatch(
                f"tensors of one program are on two meshes: {describe(mesh)} and {describe(sharding.mesh)}",
                hint="create both meshes from the same devices in the same order, or move one tensor by dynaxla.sharding.mark_sharding",
            )
    return None if mesh is None else replicated(mesh)


@functools.lru_cache(maxsize=64)
def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that are complete on each device of a mesh. Equal meshes get the same object."""
    return NamedSharding(mesh, PartitionSpec())


def describe(mesh: Mesh) -> str:
    """Describes a mesh by its axes and devices, for messages."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"Mesh({axes}) over the devices {list(_device_ids(mesh))}"


@functools.lru_cache(maxsize=64)
def _device_ids(mesh: Mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.flat)


def as_sharding(device_or_mesh: DeviceOrMesh) -> Sharding:
    """Returns the sharding of an array that is complete on the device, or on each device of the mesh."""
    return device_or_mesh if isinstance(device_or_mesh, NamedSharding) else SingleDeviceSharding(device_or_mesh)


def device_key(device_or_mesh: DeviceOrMesh) -> object:
    """Returns a hashable key of a device or mesh. Equal devices, and equal meshes, have equal keys."""
    return device_or_mesh if isinstance(device_or_mesh, NamedSharding) else device_or_mesh.id


def device_put(value: Any, device_or_sharding: jax.Device | Sharding) -> jax.Array:
    """Returns a NumPy array or number as an array on a device or mesh, with its own dtype (even 64 bits), also while JAX traces."""
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jax.device_put(value, device_or_sharding)


def copy_to(array: jax.Array, device_or_mesh: DeviceOrMesh) -> jax.Array:
    """Returns a copy of an array on another device or mesh.

    The copy shares no memory with the array. `device_put` alone would alias shards that stay on their device. A program that writes to one
    of the two arrays in place would then change the other array.
    """
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jax.device_put(jax.device_put(array, may_alias=False), device_or_mesh)
