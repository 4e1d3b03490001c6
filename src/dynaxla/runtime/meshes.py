"""Arrays on several devices: on which mesh they lie, and how others come to it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..errors import DeviceMismatch, UnsupportedTensor

# Where a program runs: on one device, or on all of a mesh (then it is the sharding of what is whole on each of them).
Where: TypeAlias = jax.Device | NamedSharding

_exist: list[bool] = []


def may_exist() -> None:
    """From now on arrays may lie on several devices: whoever runs a program asks."""
    _exist[:] = [True]


def exist() -> bool:
    """Whether there may be any."""
    return bool(_exist)


class _Planning(threading.local):
    on = False


_planning = _Planning()


def is_planning() -> bool:
    """Whether this thread compiles programs to look at them, and runs none."""
    return _planning.on


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Inside, this thread's programs of tensors on the device are compiled, for virtual meshes, too, and do not run."""
    before, _planning.on = _planning.on, True
    try:
        yield
    finally:
        _planning.on = before


def sharding_of(array: jax.Array | None) -> NamedSharding | None:
    """How an array lies on several devices; None for one device. Raises: UnsupportedTensor for a sharding without a mesh."""
    if array is None:
        return None
    sharding = array.sharding
    if type(sharding) is SingleDeviceSharding or len(sharding.device_set) == 1:
        return None
    if not isinstance(sharding, NamedSharding):
        raise UnsupportedTensor(
            f"an array lies on {len(sharding.device_set)} devices as {sharding}, which is no NamedSharding",
            hint="jax.device_put(array, jax.sharding.NamedSharding(mesh, spec)) first",
        )
    return sharding


def common(shardings: Iterable[NamedSharding | None]) -> NamedSharding | None:
    """What is whole on each device of the one mesh on which arrays lie; None if each lies on one device.

    Raises: DeviceMismatch for two meshes over different devices, or over the same ones in another order.
    """
    found: Mesh | None = None
    for sharding in shardings:
        if sharding is None or sharding.mesh is found:
            continue
        if found is None:
            found = sharding.mesh
        elif tuple(found.devices.flat) != tuple(sharding.mesh.devices.flat):
            raise DeviceMismatch(
                f"tensors of one program lie on two meshes: {described(found)} and {described(sharding.mesh)}",
                hint="make both meshes of the same devices in the same order, or have one tensor on the other's: dynaxla.mark_sharding",
            )
    return None if found is None else replicated(found)


@functools.lru_cache(maxsize=64)
def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of what is whole on each device of a mesh."""
    return NamedSharding(mesh, PartitionSpec())


def described(mesh: Mesh) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"Mesh({axes}) over the devices {list(_numbers(mesh))}"


@functools.lru_cache(maxsize=64)
def _numbers(mesh: Mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.flat)


def as_sharding(where: Where) -> Sharding:
    """Of what is whole there."""
    return where if isinstance(where, NamedSharding) else SingleDeviceSharding(where)


def key_of(where: Where) -> object:
    """Hashable: what tells programs for one place from those for another."""
    return where if isinstance(where, NamedSharding) else where.id


def moved(array: jax.Array, where: Where) -> jax.Array:
    """A copy that lies elsewhere, which shares memory with nobody: a shard that stays where it is would be the array's own else, and a
    program that writes to one in place would take the other's memory."""
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        return jax.device_put(jax.device_put(array, may_alias=False), where)
