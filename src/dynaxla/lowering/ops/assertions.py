"""Lowerings of the assertions in a graph.

Assertions about tensor metadata were evaluated when the graph was captured. Assertions about sizes are evaluated during tracing. Assertions
about the values of tensors become checks of the program (checks.py).
"""

from __future__ import annotations

from typing import Any

import torch
from jax import Array

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert
from ..registry import lowers
from .bounds import require_static


@lowers(aten._assert_async.default)
def assert_async(condition: Array, ctx: Context) -> None:
    """Makes the compiled call raise RuntimeError unless the condition, a tensor of one element, is true."""
    assert_async_msg(condition, "Expected Tensor with single nonzero value, but got zero", ctx)


@lowers(aten._assert_async.msg)
def assert_async_msg(condition: Array, message: str, ctx: Context) -> None:
    """Makes the compiled call raise RuntimeError(message) unless the condition, a tensor of one element, is true."""
    require_static(ctx, condition.size == 1, RuntimeError, f"Boolean value of Tensor with {condition.size} values is ambiguous")
    ctx.require(convert(condition, dtypes.to_jax(torch.bool)), RuntimeError, message)


@lowers(aten._functional_assert_async.msg)
def functional_assert_async(condition: Array, message: str, token: Array, ctx: Context) -> Array:
    """Same as `assert_async_msg`. Returns `token` unchanged: AOTAutograd passes it from one assertion to the next to keep their order."""
    assert_async_msg(condition, message, ctx)
    return token


@lowers(aten._assert_scalar.default)
def assert_scalar(condition: Any, message: str, ctx: Context) -> None:
    """Same as `assert_async_msg`, for a condition that is a Python number, known during tracing."""
    require_static(ctx, bool(condition), RuntimeError, message)


@lowers(aten._assert_tensor_metadata.default)
def assert_metadata(*_: Any) -> None:
    """Does nothing: the graph was captured for tensors with this metadata."""
    return None
