"""torch's device meshes of processes, in the form that XLA's partitioner and clients need."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from . import clients, private_processes


@dataclass(frozen=True)
class ProcessMesh:
    """A mesh of processes.

    Attributes:
        mesh: torch's DeviceMesh.
        sizes: The sizes of its axes.
        axes: The names of its axes in programs.
        ranks: torch's ranks, in the mesh's order.
        group: The name of a process group with exactly these ranks, in this order.
    """

    mesh: Any
    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    group: str

    @staticmethod
    def of(mesh: Any) -> ProcessMesh:
        """Returns the ProcessMesh of a DeviceMesh. Raises: ValueError, with the reason, for a mesh that XLA's partitioner cannot use."""
        sizes, ranks = tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist())
        if mesh.device_type != "cpu":
            raise ValueError(f"its device mesh is on {mesh.device_type}, not on the CPU")
        if list(ranks) != sorted(ranks):
            raise ValueError(f"the ranks of its device mesh, {list(ranks)}, are not in ascending order")
        groups = private_processes.named_groups()
        names = [name for name, group in groups.items() if tuple(torch.distributed.get_process_group_ranks(group)) == ranks]
        if not names:
            raise ValueError(f"no process group has the ranks {list(ranks)} of its device mesh (torch.distributed.new_group creates one)")
        return ProcessMesh(mesh, sizes, tuple(f"m{index}" for index in range(len(sizes))), ranks, names[0])

    @property
    def size(self) -> int:
        """The number of processes."""
        return math.prod(self.sizes)

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The replicated sharding on a JAX mesh of virtual devices, for which programs are lowered. They run on the processes' devices."""
        devices = np.array(clients.virtual_devices(self.size)).reshape(self.sizes)
        return NamedSharding(Mesh(devices, self.axes, axis_types=(AxisType.Auto,) * len(self.axes)), PartitionSpec())
