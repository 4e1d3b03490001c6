"""Ops on tensors of several processes, and their lowerings, for one program that XLA partitions (see passes/aten/global_view.py).

A global tensor has one value for all processes, and may be sharded over them. A local tensor has a value in each process, and these values
may differ. The program holds them in one array. In the ops below, the array has a dimension for each mesh axis, sharded over that axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..context import Context
from ..registry import lowers


@torch.library.custom_op("dynaxla::reshard", mutates_args=(), schema="(Tensor x, str[] spec, str[] grad_spec) -> Tensor")
def reshard(x: torch.Tensor, spec: Sequence[str], grad_spec: Sequence[str]) -> Any:
    """A copy of a global tensor with another sharding.

    Args:
        x: The global tensor.
        spec: The sharding of the result: for each dimension, the names of the mesh's axes separated by commas, or "".
        grad_spec: The sharding of the gradient, in the same form.
    """
    return x.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "dynaxla::replicated_to_local", mutates_args=(), schema="(Tensor x, int dim, int size, str axis, str grad_reduction) -> Tensor"
)
def replicated_to_local(x: torch.Tensor, dim: int, size: int, axis: str, grad_reduction: str) -> Any:
    """x with a new dimension, which holds a local copy for each process along a mesh axis.

    Args:
        x: The global tensor.
        dim: The position of the new dimension.
        size: The size of the mesh axis.
        axis: The name of the mesh axis.
        grad_reduction: The gradient of x: the "sum" or "avg" of the gradients of the processes, or "same" if these are equal.
    """
    return torch.stack([x] * size, dim)


@torch.library.custom_op("dynaxla::local_to_replicated", mutates_args=(), schema="(Tensor x, int dim, str axis) -> Tensor")
def local_to_replicated(x: torch.Tensor, dim: int, axis: str) -> Any:
    """The global value of a local tensor that is equal in all processes along `dim`, without that dimension. Equality is not checked.

    Args:
        x: The tensor with one value for each process.
        dim: The dimension of the processes.
        axis: The name of the mesh axis along which `dim` is sharded.
    """
    return x.select(dim, 0).contiguous()


def _empty_with_shape(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=x.dtype, device=x.device)


reshard.register_fake(lambda x, spec, grad_spec: _empty_with_shape(x, x.shape))
replicated_to_local.register_fake(lambda x, dim, size, axis, grad_reduction: _empty_with_shape(x, (*x.shape[:dim], size, *x.shape[dim:])))
local_to_replicated.register_fake(lambda x, dim, axis: _empty_with_shape(x, (*x.shape[:dim], *x.shape[dim + 1 :])))
RESHARD, REPLICATED_TO_LOCAL, LOCAL_TO_REPLICATED = (
    getattr(torch.ops.dynaxla, name).default for name in ("reshard", "replicated_to_local", "local_to_replicated")
)


def _save_arguments(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.arguments = inputs[1:]
    ctx.shape = inputs[0].shape


def _reshard_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    spec, grad_spec = ctx.arguments
    return RESHARD(grad, grad_spec, spec), None, None


def _replicated_to_local_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    dim, _, axis, grad_reduction = ctx.arguments
    grad_x = (
        LOCAL_TO_REPLICATED(grad, dim, axis) if grad_reduction == "same" else grad.sum(dim) if grad_reduction == "sum" else grad.mean(dim)
    )
    return grad_x, None, None, None, None


def _local_to_replicated_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    dim, axis = ctx.arguments
    return REPLICATED_TO_LOCAL(grad, dim, ctx.shape[dim], axis, "same"), None, None


reshard.register_autograd(_reshard_backward, setup_context=_save_arguments)
replicated_to_local.register_autograd(_replicated_to_local_backward, setup_context=_save_arguments)
local_to_replicated.register_autograd(_local_to_replicated_backward, setup_context=_save_arguments)


def partition_spec(spec: Sequence[str]) -> PartitionSpec:
    """Returns JAX's PartitionSpec for the argument `spec` of `reshard`."""
    dims = [tuple(axes.split(",")) if axes else None for axes in spec]
    while dims and dims[-1] is None:  # XLA drops trailing Nones too, so equal shardings compare equal
        dims.pop()
    return PartitionSpec(*dims)


def _mesh(ctx: Context) -> Mesh:
    assert ctx.replicated is not None, "this op occurs only in programs that XLA partitions over several processes"
    return ctx.replicated.mesh


def _spec_along(dim: int, axis: str) -> PartitionSpec:
    return PartitionSpec(*[None] * dim, axis)


@lowers(RESHARD)
def _reshard(x: Array, spec: Sequence[str], grad_spec: Sequence[str], *, ctx: Context) -> Array:
    return lax.with_sharding_constraint(x, NamedSharding(_mesh(ctx), partition_spec(spec)))


@lowers(REPLICATED_TO_LOCAL)
def _replicated_to_local(x: Array, dim: int, size: int, axis: str, grad_reduction: str, *, ctx: Context) -> Array:
    add_dim = jax.shard_map(
        lambda x: lax.expand_dims(x, [dim]), mesh=_mesh(ctx), in_specs=PartitionSpec(), out_specs=_spec_along(dim, axis),
        axis_names={axis}, check_vma=False,
    )  # fmt: skip
    return add_dim(x)


@lowers(LOCAL_TO_REPLICATED)
def _local_to_replicated(x: Array, dim: int, axis: str, *, ctx: Context) -> Array:
    drop_dim = jax.shard_map(
        lambda x: lax.squeeze(x, [dim]), mesh=_mesh(ctx), in_specs=_spec_along(dim, axis), out_specs=PartitionSpec(),
        axis_names={axis}, check_vma=False,
    )  # fmt: skip
    return drop_dim(x)
