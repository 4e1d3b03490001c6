"""The custom op behind `dynaxla.sharding.mark_sharding`, which constrains the sharding of a value inside a graph, and its lowering."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from torch.fx import Graph

from ...runtime import clients, meshes
from ..registry import lowers


@torch.library.custom_op(
    "dynaxla::sharding_constraint",
    mutates_args=(),
    schema="(Tensor x, int[] sizes, str[] names, int[] devices, str[] spec) -> Tensor",
)
def sharding_constraint(x: torch.Tensor, sizes: Sequence[int], names: Sequence[str], devices: Sequence[int], spec: Sequence[str]) -> Any:
    """Returns a copy of x, sharded over a mesh.

    Args:
        x: The tensor.
        sizes: The sizes of the mesh axes.
        names: The names of the mesh axes.
        devices: Indices into JAX's local devices. Negative indices are virtual devices, for programs that are compiled but not run.
        spec: For each dimension, the names of mesh axes separated by commas, or "".
    """
    return x.clone()


@sharding_constraint.register_fake
def _(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _save_arguments(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.arguments = inputs[1:]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return SHARDING_CONSTRAINT(grad, *ctx.arguments), None, None, None, None


sharding_constraint.register_autograd(_backward, setup_context=_save_arguments)
SHARDING_CONSTRAINT = torch.ops.dynaxla.sharding_constraint.default


@functools.lru_cache(maxsize=256)
def mesh(sizes: tuple[int, ...], names: tuple[str, ...], devices: tuple[int, ...]) -> Mesh:
    """Returns the mesh over the local devices with the indices `devices`, or over virtual devices if they are negative."""
    meshes.expect_sharded_arrays()
    available = clients.virtual_devices(len(devices)) if is_virtual(devices) else jax.local_devices()
    mesh_devices = np.array([available[index] for index in devices]).reshape(sizes)
    return Mesh(mesh_devices, names, axis_types=(AxisType.Auto,) * len(names))


def is_virtual(devices: Sequence[int]) -> bool:
    return devices[0] < 0


def _applies(devices: Sequence[int]) -> bool:
    """True if a constraint over these devices applies. A constraint over virtual devices applies only in `meshes.compile_only`."""
    return meshes.is_compile_only() or not is_virtual(devices)


def sharding_of(sizes: Sequence[int], names: Sequence[str], devices: Sequence[int], spec: Sequence[str]) -> NamedSharding:
    """Returns the sharding that the arguments of the constraint op describe."""
    dims = [None if not axes else axes if "," not in axes else tuple(axes.split(",")) for axes in spec]
    while dims and dims[-1] is None:  # XLA's normal form of a PartitionSpec
        dims.pop()
    return NamedSharding(mesh(tuple(sizes), tuple(names), tuple(devices)), PartitionSpec(*dims))


def sharding_of_call(op: Any, args: Sequence[Any]) -> NamedSharding | None:
    """Returns the sharding that a call of the constraint op describes. None for other ops, and for constraints that do not apply."""
    return meshes.for_compilation(sharding_of(*args[1:])) if op is SHARDING_CONSTRAINT and _applies(args[3]) else None


def shardings_in(graph: Graph) -> list[NamedSharding]:
    """Returns the shardings of all constraints in a graph that apply (see `_applies`)."""
    nodes = graph.find_nodes(op="call_function", target=SHARDING_CONSTRAINT)
    return [sharding for node in nodes if (sharding := sharding_of_call(SHARDING_CONSTRAINT, node.args)) is not None]


@lowers(SHARDING_CONSTRAINT)
def _lower(x: Array, sizes: Sequence[int], names: Sequence[str], devices: Sequence[int], spec: Sequence[str]) -> Array:
    sharding = sharding_of_call(SHARDING_CONSTRAINT, (x, sizes, names, devices, spec))
    return x if sharding is None else lax.with_sharding_constraint(x, sharding)
