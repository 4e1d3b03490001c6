"""Metadata of a graph's values before it runs: shapes, strides, dtypes and devices, with concrete numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import dtypes
from .dtypes import DType
from .size_functions import size_function


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's metadata with concrete numbers.

    Attributes:
        shape: The sizes.
        stride: The strides in elements; empty for layouts other than strided.
        dtype: Torch's dtype.
        device: Torch's device.
        offset: The storage offset in elements.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @property
    def jax_dtype(self) -> DType:
        return dtypes.to_jax(self.dtype)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the slowest-varying in memory to the fastest."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim]))

    @property
    def is_row_major(self) -> bool:
        """True if no dimension has a larger stride than an earlier dimension. Dimensions of size 1 do not count."""
        order = [dim for dim in self.order if self.shape[dim] > 1]
        return order == sorted(order)

    def __str__(self) -> str:
        return dtypes.describe(self.dtype, self.shape)


class SymbolValues:
    """Concrete values of the symbols of a graph with dynamic shapes.

    Attributes:
        values: The values by symbol of the graph, or by expression of its symbols.
    """

    def __init__(self, values: Mapping[Any, int] | None = None) -> None:
        self.values = dict(values or {})
        self._expressions: dict[Any, int] = dict(self.values)
        # By id of the fake tensor. An entry keeps its tensor alive, so that the id is not reused.
        self._specs: dict[int, tuple[torch.Tensor, TensorSpec]] = {}

    def integer(self, value: int | torch.SymInt) -> int:
        """Returns the value of a size, stride or offset."""
        return value if isinstance(value, int) else self.number(value.node.expr)

    def number(self, expression: Any) -> int:
        """Returns the value of an expression of symbols."""
        if (value := self._expressions.get(expression)) is None:
            value = self._expressions[expression] = size_function(expression)(self.values)
        return value

    def spec(self, fake: torch.Tensor) -> TensorSpec:
        """Returns the concrete metadata of a fake tensor."""
        if (cached := self._specs.get(id(fake))) is not None:
            return cached[1]
        integer = self.integer
        spec = TensorSpec(
            tuple(map(integer, fake.shape)),
            tuple(map(integer, fake.stride())) if fake.layout == torch.strided else (),
            fake.dtype,
            fake.device,
            integer(fake.storage_offset()) if fake.layout == torch.strided else 0,
        )
        self._specs[id(fake)] = fake, spec
        return spec

    def concrete(self, value: Any) -> Any:
        """Returns a node's metadata with concrete numbers: a TensorSpec for a tensor, an int for a size, a tuple for several values."""
        if isinstance(value, torch.Tensor):
            return self.spec(value)
        if isinstance(value, (tuple, list)):
            return tuple(self.concrete(item) for item in value)
        if isinstance(value, torch.SymInt):
            return self.integer(value)
        return value
