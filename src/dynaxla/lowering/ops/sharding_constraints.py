"""How a value inside a program lies on a mesh, where the user says so (`dynaxla.mark_sharding`)."""

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
    """A copy of x, sharded over a mesh of these sizes and names.

    devices: by their numbers among JAX's local devices; negative ones are virtual, for programs that are compiled and not run. spec: by
    dimension, the names of axes with commas between them, or "".
    """
    return x.clone()


@sharding_constraint.register_fake
def _(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.how = inputs[1:]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return OP(grad, *ctx.how), None, None, None, None


sharding_constraint.register_autograd(_backward, setup_context=_save)
OP = torch.ops.dynaxla.sharding_constraint.default


@functools.lru_cache(maxsize=256)
def mesh(sizes: tuple[int, ...], names: tuple[str, ...], devices: tuple[int, ...]) -> Mesh:
    """Of JAX's local devices by their numbers, or of virtual ones."""
    meshes.may_exist()
    there = clients.virtual_devices(len(devices)) if is_virtual(devices) else jax.local_devices()
    found = np.array([there[index] for index in devices]).reshape(sizes)
    return Mesh(found, names, axis_types=(AxisType.Auto,) * len(names))


def is_virtual(devices: Sequence[int]) -> bool:
    return devices[0] < 0


def _counts(devices: Sequence[int]) -> bool:
    """Whether a constraint over these devices means something now: programs that run are not for virtual ones."""
    return meshes.is_planning() or not is_virtual(devices)


def sharding_of(sizes: Sequence[int], names: Sequence[str], devices: Sequence[int], spec: Sequence[str]) -> NamedSharding:
    """What the op's arguments say."""
    dims = [None if not axes else axes if "," not in axes else tuple(axes.split(",")) for axes in spec]
    while dims and dims[-1] is None:  # so XLA writes what is the same
        dims.pop()
    return NamedSharding(mesh(tuple(sizes), tuple(names), tuple(devices)), PartitionSpec(*dims))


def sharding_of_call(op: Any, args: Sequence[Any]) -> NamedSharding | None:
    """What an op's arguments say if it is this one; else None."""
    return sharding_of(*args[1:]) if op is OP and _counts(args[3]) else None


def shardings_in(graph: Graph) -> list[NamedSharding]:
    """What a graph's constraints say."""
    return [sharding_of(*node.args[1:]) for node in graph.find_nodes(op="call_function", target=OP) if _counts(node.args[3])]


@lowers(OP)
def _lower(x: Array, sizes: Sequence[int], names: Sequence[str], devices: Sequence[int], spec: Sequence[str]) -> Array:
    return lax.with_sharding_constraint(x, sharding_of(sizes, names, devices, spec)) if _counts(devices) else x
