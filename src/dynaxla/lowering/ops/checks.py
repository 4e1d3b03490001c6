"""Assertions that a graph carries. A compiled program cannot raise: those about values are dropped, as they are on a GPU's stream until
it synchronises; those about sizes and metadata were decided when the graph was captured."""

from __future__ import annotations

from typing import Any

import torch
from jax import Array

from ..registry import lowers

aten = torch.ops.aten


@lowers(aten._assert_async.default, aten._assert_async.msg)
def assert_async(*_: Any) -> None:
    return None


@lowers(aten._functional_assert_async.msg)
def functional_assert_async(condition: Array, message: str, token: Array) -> Array:
    return token


@lowers(aten._assert_tensor_metadata.default, aten._assert_scalar.default)
def assert_metadata(*_: Any) -> None:
    return None
