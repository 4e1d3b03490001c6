"""Arrays on several devices: their mesh, and copies of other arrays to it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..errors import DeviceMismatch, UnsupportedTensor

# The devices on which a program runs: one device, or all devices of a mesh (given as the mesh's replicated sharding).
DeviceOrMesh: TypeAlias = jax.Device | NamedSharding

_exist: list[bool] = []


def may_exist() -> None:
    """Declares that from now on an array may be on several devices, so that calls of programs check for such arrays."""
    _exist[:] = [True]


def exist() -> bool:
    """True if arrays on several devices may exist."""
    return bool(_exist)


class _Planning(threading.local):
    is_active = False


_planning = _Planning()


def is_planning() -> bool:
    """True if this thread compiles programs for inspection only, and runs none."""
    return _planning.is_active


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Makes this thread compile but not run the programs of tensors on the device jax inside the context, also for virtual meshes."""
    before, _planning.is_active = _planning.is_active, True
    try:
        yield
    finally:
        _planning.is_active = before


def sharding_of(array: jax.Array | None) -> NamedSharding | None:
    """Returns an array's sharding over several devices; None for one device. Raises: UnsupportedTensor for a sharding without a mesh."""
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
    """Returns the replicated sharding of the one mesh on which the arrays are; None if each array is on one device.

    Raises: DeviceMismatch for two meshes with different devices, or with the same devices in another order.
    """
    found: Mesh | None = None
    for sharding in shardings:
        if sharding is None or sharding.mesh is found:
            continue
        if found is None:
            found = sharding.mesh
        elif tuple(found.devices.flat) != tuple(sharding.mesh.devices.flat):
            raise DeviceMismatch(
                f"tensors of one program are on two meshes: {describe(found)} and {describe(sharding.mesh)}",
                hint="create both meshes from the same devices in the same order, or move one tensor by dynaxla.sharding.mark_sharding",
            )
    return None if found is None else replicated(found)


@functools.lru_cache(maxsize=64)
def replicated(mesh: Mesh) -> NamedSharding:
    """Returns a mesh's replicated sharding."""
    return NamedSharding(mesh, PartitionSpec())


def describe(mesh: Mesh) -> str:
    """Returns the text of a mesh in messages."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"Mesh({axes}) over the devices {list(_device_ids(mesh))}"


@functools.lru_cache(maxsize=64)
def _device_ids(mesh: Mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.flat)


def as_sharding(where: DeviceOrMesh) -> Sharding:
    """Returns the sharding of an array that is complete on each of these devices."""
    return where if isinstance(where, NamedSharding) else SingleDeviceSharding(where)


def key_of(where: DeviceOrMesh) -> object:
    """Returns a hashable key, equal for equal devices or meshes."""
    return where if isinstance(where, NamedSharding) else where.id


def copied_to(array: jax.Array, where: DeviceOrMesh) -> jax.Array:
    """Returns a copy of an array on another device or mesh.

    The copy shares no memory with the array: `device_put` alone would alias shards that stay on their device, and a program that writes in
    place to one array would change the other.
    """
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jax.device_put(jax.device_put(array, may_alias=False), where)
