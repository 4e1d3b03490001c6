"""Assertions that a graph carries. Those about sizes and metadata were decided when the graph was captured."""

from __future__ import annotations

from typing import Any

import torch
from jax import Array

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert
from ..registry import lowers
from .bounds import refuse_unless


@lowers(aten._assert_async.default)
def assert_async(condition: Array, ctx: Context) -> None:
    """The program's call raises unless the condition, a tensor of one element, is true."""
    require(condition, "Expected Tensor with single nonzero value, but got zero", ctx)


@lowers(aten._assert_async.msg)
def require(condition: Array, message: str, ctx: Context) -> None:
    """The program's call raises RuntimeError(message) unless the condition, a tensor of one element, is true."""
    refuse_unless(ctx, condition.size == 1, RuntimeError, f"Boolean value of Tensor with {condition.size} values is ambiguous")
    ctx.require(convert(condition, dtypes.to_jax(torch.bool)), RuntimeError, message)


@lowers(aten._functional_assert_async.msg)
def functional_assert_async(condition: Array, message: str, token: Array, ctx: Context) -> Array:
    """As `require`; returns the token, by which AOTAutograd orders such ops."""
    require(condition, message, ctx)
    return token


@lowers(aten._assert_scalar.default)
def assert_scalar(condition: Any, message: str, ctx: Context) -> None:
    """As `require`, of a number that is known while the program is traced."""
    refuse_unless(ctx, bool(condition), RuntimeError, message)


@lowers(aten._assert_tensor_metadata.default)
def assert_metadata(*_: Any) -> None:
    """Nothing: the graph was captured for tensors that have this metadata."""
    return None
