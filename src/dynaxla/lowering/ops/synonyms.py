"""Lowerings of ops that are another op under another name."""

from __future__ import annotations

from jax import lax
from jax import numpy as jnp

from ...torch_ops import aten
from ..registry import lower_table
from .creation import view_dtype
from .reductions import aminmax
from .scans import logcumsumexp
from .shape import stack

lower_table(
    {
        aten.detach_copy.default: lambda x: x,
        aten._lazy_clone.default: lambda x: x,
        aten._conj_copy.default: jnp.conj,
        aten._neg_view_copy.default: lax.neg,
        aten._reshape_alias.default: lambda x, size, stride: lax.reshape(x, size),
        aten._reshape_alias_copy.default: lambda x, size, stride: lax.reshape(x, size),
        aten.view_copy.dtype: view_dtype,
        aten._stack.default: stack,
        aten._aminmax.default: lambda x, *, ctx: aminmax(x, ctx=ctx),
        aten._aminmax.dim: lambda x, dim, keepdim=False, *, ctx: aminmax(x, dim=dim, keepdim=keepdim, ctx=ctx),
        aten._logcumsumexp.default: logcumsumexp,
        aten._is_all_true.default: lambda x: lax.reduce_and(x, range(x.ndim)),
        aten._is_any_true.default: lambda x: lax.reduce_or(x, range(x.ndim)),
    }
)
