"""Ops, and their lowerings, for tensors of several processes in one program that XLA's partitioner splits (see passes/aten/global_view.py).

A global tensor, which may be sharded over the processes, has its own dimensions. A tensor of which each process has a local value, equal or
not, has one more dimension for each axis of the mesh, and is sharded along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from ..context import Context
from ..registry import lowers


@torch.library.custom_op("dynaxla::placed", mutates_args=(), schema="(Tensor x, str[] spec, str[] back) -> Tensor")
def placed(x: torch.Tensor, spec: Sequence[str], back: Sequence[str]) -> Any:
    """A copy of a global tensor with another sharding.

    Args:
        x: The global tensor.
        spec: The sharding of the result: for each dimension, the names of the mesh's axes separated by commas, or "".
        back: The sharding of the gradient, in the same form.
    """
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("dynaxla::each_has", mutates_args=(), schema="(Tensor x, int dim, int size, str axis, str back) -> Tensor")
def each_has(x: torch.Tensor, dim: int, size: int, axis: str, back: str) -> Any:
    """A tensor with a new dimension that holds a local copy of x for each process of a mesh axis.

    Args:
        x: The global tensor.
        dim: The position of the new dimension.
        size: The size of the mesh axis.
        axis: The name of the mesh axis.
        back: The gradient of x: "sum" or "avg" of the processes' gradients, or "same" if they are equal.
    """
    return torch.stack([x] * size, dim)


@torch.library.custom_op("dynaxla::all_have", mutates_args=(), schema="(Tensor x, int dim, str axis) -> Tensor")
def all_have(x: torch.Tensor, dim: int, axis: str) -> Any:
    """The value that all processes along `dim` share, without that dimension. The caller must ensure that they are equal: no check."""
    return x.select(dim, 0).contiguous()


def _sized(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=x.dtype, device=x.device)


placed.register_fake(lambda x, spec, back: _sized(x, x.shape))
each_has.register_fake(lambda x, dim, size, axis, back: _sized(x, (*x.shape[:dim], size, *x.shape[dim:])))
all_have.register_fake(lambda x, dim, axis: _sized(x, (*x.shape[:dim], *x.shape[dim + 1 :])))
PLACED, EACH_HAS, ALL_HAVE = (getattr(torch.ops.dynaxla, name).default for name in ("placed", "each_has", "all_have"))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.how = inputs[1:]
    ctx.size = inputs[0].shape


def _placed_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    spec, back = ctx.how
    return PLACED(grad, back, spec), None, None


def _each_has_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    dim, _, axis, back = ctx.how
    found = ALL_HAVE(grad, dim, axis) if back == "same" else grad.sum(dim) if back == "sum" else grad.mean(dim)
    return found, None, None, None, None


def _all_have_back(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    dim, axis = ctx.how
    return EACH_HAS(grad, dim, ctx.size[dim], axis, "same"), None, None


placed.register_autograd(_placed_back, setup_context=_keep)
each_has.register_autograd(_each_has_back, setup_context=_keep)
all_have.register_autograd(_all_have_back, setup_context=_keep)


def partition_spec(spec: Sequence[str]) -> PartitionSpec:
    """Returns JAX's PartitionSpec of a sharding as in `placed`."""
    dims = [tuple(axes.split(",")) if axes else None for axes in spec]
    while dims and dims[-1] is None:  # XLA leaves them out too, so equal shardings compare equal
        dims.pop()
    return PartitionSpec(*dims)


def _where(ctx: Context) -> NamedSharding:
    assert ctx.replicated is not None, "values of processes stand in programs for several of them alone"
    return ctx.replicated


def _along(dim: int, axis: str) -> PartitionSpec:
    return PartitionSpec(*[None] * dim, axis)


@lowers(PLACED)
def _placed(x: Array, spec: Sequence[str], back: Sequence[str], *, ctx: Context) -> Array:
    return lax.with_sharding_constraint(x, NamedSharding(_where(ctx).mesh, partition_spec(spec)))


@lowers(EACH_HAS)
def _each_has(x: Array, dim: int, size: int, axis: str, back: str, *, ctx: Context) -> Array:
    own = jax.shard_map(
        lambda x: lax.expand_dims(x, [dim]), mesh=_where(ctx).mesh, in_specs=PartitionSpec(), out_specs=_along(dim, axis),
        axis_names={axis}, check_vma=False,
    )  # fmt: skip
    return own(x)


@lowers(ALL_HAVE)
def _all_have(x: Array, dim: int, axis: str, *, ctx: Context) -> Array:
    one = jax.shard_map(
        lambda x: lax.squeeze(x, [dim]), mesh=_where(ctx).mesh, in_specs=_along(dim, axis), out_specs=PartitionSpec(),
        axis_names={axis}, check_vma=False,
    )  # fmt: skip
    return one(x)
