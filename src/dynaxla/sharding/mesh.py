"""Meshes: devices with named axes, over which tensors are sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import torch

from ..device import pjrt_devices
from ..errors import ArgumentError
from ..lowering.ops import sharding_constraints


class Mesh:
    """A grid of devices "jax:0", "jax:1", ... Each axis of the grid has a size and a name.

    Attributes:
        sizes: The axes' sizes.
        names: The axes' names.
        devices: The devices' indices, in row-major order: 3 is "jax:3"; negative numbers are virtual devices.
        is_virtual: True if the devices do not exist.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        names: Sequence[str],
        devices: Sequence[int | str | torch.device] | None = None,
        *,
        virtual: bool = False,
    ) -> None:
        """Creates a mesh.

        Args:
            sizes: The axes' sizes.
            names: The axes' names.
            devices: The devices, in row-major order; by default as many as needed, starting at "jax:0".
            virtual: True for a mesh of devices that do not exist. `mark_sharding` leaves tensors where they are. Code that runs ignores the
                mesh. `dynaxla.sharding.report` with `run=False` compiles programs for it.

        Raises:
            ArgumentError: The sizes and names define no mesh, or there are too few devices.
            RuntimeError: A device does not exist.
        """
        self.sizes, self.names = tuple(int(size) for size in sizes), tuple(names)
        count = math.prod(self.sizes)
        description = f"a mesh of sizes {self.sizes} with axes {self.names}"
        if not self.sizes or len(self.sizes) != len(self.names) or min(self.sizes) < 1:
            raise ArgumentError(
                f"{description}: each axis needs a positive size and a name", hint='write for example Mesh((2, 4), ("fsdp", "tp"))'
            )
        if len(set(self.names)) < len(self.names) or not all(isinstance(name, str) and name.isidentifier() for name in self.names):
            raise ArgumentError(
                f"{description}: the names must be different identifiers", hint='write for example Mesh((2, 4), ("fsdp", "tp"))'
            )
        self.is_virtual = virtual
        if virtual:
            if devices is not None:
                raise ArgumentError(
                    f"{description} is virtual, and was given the devices {list(devices)}",
                    hint="leave devices out: a virtual mesh has its own",
                )
            self.devices = tuple(range(-count, 0))
            sharding_constraints.mesh(self.sizes, self.names, self.devices)  # from now on, calls of programs check for sharded arrays
            return
        self.devices = tuple(range(count)) if devices is None else tuple(pjrt_devices.parse_device(device).index for device in devices)
        available = len(pjrt_devices.devices())
        if len(self.devices) != count or len(set(self.devices)) < count:
            raise ArgumentError(
                f"{description} needs {count} different devices, not {list(self.devices)}",
                hint="give as many devices as the product of the sizes",
            )
        if max(self.devices) >= available:
            raise ArgumentError(
                f"{description} needs {count} devices, and JAX has {available} here",
                hint=f"use a smaller mesh; to try it on a CPU, start Python with XLA_FLAGS=--xla_force_host_platform_device_count={count}",
            )
        sharding_constraints.mesh(self.sizes, self.names, self.devices)

    @staticmethod
    def of(mesh: Any) -> Mesh:
        """Returns the mesh for a `Mesh` or for torch's DeviceMesh, whose ranks become the devices' indices.

        Raises:
            ArgumentError: The argument is another object, or a DeviceMesh without names.
        """
        if isinstance(mesh, Mesh):
            return mesh
        names, ranks = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "mesh", None)
        if not isinstance(ranks, torch.Tensor):
            hint = "create one with dynaxla.sharding.Mesh(sizes, names), or pass a torch DeviceMesh"
            raise ArgumentError(f"{mesh!r} is not a mesh", hint=hint)
        if names is None:
            raise ArgumentError(f"{mesh!r} has no names for its dimensions", hint="create the DeviceMesh with mesh_dim_names")
        return Mesh(tuple(ranks.shape), names, ranks.flatten().tolist())

    @property
    def jax(self) -> jax.sharding.Mesh:
        """The same mesh as a mesh of JAX."""
        return sharding_constraints.mesh(self.sizes, self.names, self.devices)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))
        return f"Mesh({axes}; virtual)" if self.is_virtual else f"Mesh({axes}; devices {list(self.devices)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self.sizes, self.names, self.devices) == (other.sizes, other.names, other.devices)

    def __hash__(self) -> int:
        return hash((self.sizes, self.names, self.devices))
