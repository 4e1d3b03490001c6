"""The inputs of a graph: checks that XLA can hold its tensors, and the sources of its symbolic sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..errors import UnsupportedTensor
from ..lowering import SymbolValues
from ..lowering.dtypes import is_supported


class Sizes:
    """Finds the values of a graph's symbolic sizes among the inputs of a call: int inputs, or dimensions of tensor inputs.

    Attributes:
        numbers: the positions of the inputs that are numbers.
        is_static: True if no input is a number and no size is symbolic.
    """

    def __init__(self, placeholders: Sequence[Node]) -> None:
        """placeholders: the placeholders of AOTAutograd's or TorchDynamo's graph."""
        values = [node.meta["val"] if "val" in node.meta else node.meta.get("example_value") for node in placeholders]
        self.numbers = [index for index, value in enumerate(values) if not isinstance(value, torch.Tensor)]
        # By expression (mostly a single symbol): the position of the input with the expression's value and, for a tensor, the dimension.
        self._sources: dict[Any, tuple[int, int | None]] = {}
        dims: list[tuple[Any, tuple[int, int]]] = []
        for index, value in enumerate(values):
            if isinstance(value, torch.SymInt):
                self._sources.setdefault(value.node.expr, (index, None))
            elif isinstance(value, torch.Tensor):
                dims += [(size.node.expr, (index, dim)) for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]
        for expression, source in sorted(dims, key=lambda item: not item[0].is_symbol):
            if not expression.free_symbols <= self._sources.keys():
                self._sources.setdefault(expression, source)
        self._dims = [(index, dim) for index, dim in self._sources.values() if dim is not None]
        self.is_static = not self.numbers and not self._dims

    def key(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the type and value of each number, and each symbolic size: calls with equal keys can share an executable of the graph."""
        numbers = [(type(args[index]), args[index]) for index in self.numbers]
        return (*numbers, *[args[index].shape[dim] for index, dim in self._dims])

    def sources(self) -> dict[Any, tuple[int, int | None]]:
        """Returns, by expression (mostly a symbol), the position of the input that has the value, and the dimension of a tensor or None."""
        return dict(self._sources)

    def values(self, args: Sequence[Any]) -> SymbolValues:
        """Returns the values of the graph's symbols in a call."""
        return SymbolValues(
            {expression: args[index] if dim is None else args[index].shape[dim] for expression, (index, dim) in self._sources.items()}
        )


def check_tensor(tensor: torch.Tensor, role: str) -> None:
    """Raises UnsupportedTensor for a tensor that XLA cannot hold."""
    described = f"{role}: {tensor.dtype} of shape {list(tensor.shape)}"
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(
            f"{described} is sparse ({tensor.layout})", hint="make it dense with .to_dense() before the compiled region"
        )
    if tensor.is_quantized:
        raise UnsupportedTensor(f"{described} is quantized", hint="make it a float tensor with .dequantize() before the compiled region")
    if tensor.device.type == "meta":
        raise UnsupportedTensor(f"{described} is on the meta device: it has no data", hint="allocate it with .to_empty(device=...)")
    if not is_supported(tensor.dtype):
        raise UnsupportedTensor(f"{described} has a dtype that JAX does not have", hint="convert it before the compiled region")
