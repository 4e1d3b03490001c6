"""Lowerings of the ops that read a tensor's symbolic size, stride or offset. The results are ints when a program is traced."""

from __future__ import annotations

from typing import cast

from jax import Array

from ...torch_ops import aten
from ..context import Context
from ..metadata import TensorSpec
from ..registry import lowers


@lowers(aten.sym_size.int)
def sym_size(x: Array, dim: int) -> int:
    return x.shape[dim]


@lowers(aten.sym_numel.default)
def sym_numel(x: Array) -> int:
    return x.size


@lowers(aten.sym_stride.int)
def sym_stride(x: Array, dim: int, *, ctx: Context) -> int:
    """The stride that the tensor has in eager mode, in elements; JAX arrays have no strides."""
    return cast(TensorSpec, ctx.input(0)).stride[dim]


@lowers(aten.sym_storage_offset.default)
def sym_storage_offset(x: Array, *, ctx: Context) -> int:
    """The storage offset that the tensor has in eager mode, in elements; JAX arrays have none."""
    return cast(TensorSpec, ctx.input(0)).offset
