"""Converts torch.export's dynamic dimensions to JAX's symbolic dimensions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from jax import core, export
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ..artifact.stablehlo import symbolic_scope
from ..errors import CaptureError
from ..lowering.graphs import user_line
from ..lowering.metadata import SymbolValues, TensorSpec
from ..runtime import private


@dataclass(frozen=True)
class _OrderedSpec(TensorSpec):
    """A TensorSpec with an explicit memory order, since symbolic strides cannot always be sorted.

    Attributes:
        memory_order: The dimensions by decreasing stride.
    """

    memory_order: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        return self.memory_order


class _SymbolicArithmetic(private.SizeArithmetic):
    """Arithmetic on numbers and on JAX's symbolic dimensions, for which Python's `min` and `max` do not work."""

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return core.min_dim(a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return core.max_dim(a, b)


class SymbolicSizes(SymbolValues):
    """JAX's symbolic dimensions as the values of a graph's symbols.

    Args:
        names: The name of the JAX dimension for each of torch's symbols.
        dimensions: The minimum and the maximum size of each JAX dimension, by name. The maximum is None if there is no limit.
    """

    def __init__(self, names: Mapping[sympy.Symbol, str], dimensions: Mapping[str, tuple[int, int | None]]) -> None:
        self.dimensions = dict(dimensions)
        scope = symbolic_scope(dimensions)
        super().__init__({symbol: export.symbolic_shape(name, scope=scope)[0] for symbol, name in names.items()})

    def examples(self) -> SymbolValues:
        """Returns integers as example values of the symbols: 8, 9, 10, ..., each clamped to the limits of its dimension."""
        limits = self.dimensions.values()
        sizes = [max(low, 8 + index if high is None else min(high, 8 + index)) for index, (low, high) in enumerate(limits)]
        return SymbolValues(dict(zip(self.values, sizes, strict=True)))

    def number(self, expression: Any) -> Any:
        """Returns the value of torch's expression of symbols: an integer, or JAX's expression of symbolic dimensions."""
        if (value := self._expressions.get(expression)) is None:
            value = self._expressions[expression] = private.evaluate_size(_SymbolicArithmetic, self.values, expression)
        return value

    def integer(self, value: Any) -> Any:
        return value if isinstance(value, int) else self.number(value.node.expr)

    def spec(self, fake: torch.Tensor) -> TensorSpec:
        spec = super().spec(fake)
        if isinstance(spec, _OrderedSpec) or all(isinstance(stride, int) for stride in spec.stride):
            return spec
        strides = [_example(stride) for stride in fake.stride()]
        memory_order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
        ordered = _OrderedSpec(spec.shape, spec.stride, spec.dtype, spec.device, spec.offset, memory_order)
        self._specs[id(fake)] = fake, ordered
        return ordered


def _example(size: int | torch.SymInt) -> int:
    """Returns the value of a size or stride for the example inputs of the export."""
    return size if isinstance(size, int) else int(size.node.hint)


def symbolic_sizes(program: ExportedProgram, dynamic_shapes: Any, arguments: Iterable[tuple[str, torch.Tensor]]) -> SymbolicSizes:
    """Returns the dynamic dimensions of an exported program, as JAX's symbolic dimensions.

    The name of a dimension is the name of the user's `torch.export.Dim`, or else made of the input's name and the dimension's index: "x_0".

    Args:
        program: The exported program.
        dynamic_shapes: The user's argument of torch.export; its `torch.export.Dim`s have names.
        arguments: The name and the fake tensor of each input that is a tensor.

    Raises:
        CaptureError: A size depends on the values of tensors.
    """
    for node in program.graph.nodes:
        if free_unbacked_symbols(node.meta.get("val")):
            raise CaptureError(
                f"the size or value of {node.target} depends on the values of a tensor",
                op=str(node.target),
                where=user_line(node),
                hint="select with torch.where: in an exported program, sizes depend only on the sizes of the inputs",
            )
    user_names = _names_from_user(program, dynamic_shapes)
    names: dict[sympy.Symbol, str] = {}
    used = set(user_names.values())
    for argument, fake in arguments:
        for dim, size in enumerate(fake.shape):
            symbols = sorted(size.node.expr.free_symbols, key=str) if isinstance(size, torch.SymInt) else []
            for symbol in symbols:
                if symbol not in names:
                    names[symbol] = user_names.get(symbol) or _unused_name(f"{_identifier(argument)}_{dim}", used)
                    used.add(names[symbol])
    dimensions = {}
    for symbol, name in names.items():
        limits = program.range_constraints.get(symbol)
        low = 1 if limits is None or not limits.lower.is_Integer else max(1, int(limits.lower))
        high = None if limits is None or not sympy.sympify(limits.upper).is_Integer else int(limits.upper)
        dimensions[name] = (low, high)
    return SymbolicSizes(names, dimensions)


def _names_from_user(program: ExportedProgram, dynamic_shapes: Any) -> dict[sympy.Symbol, str]:
    """Returns the names of `torch.export.Dim`s by symbol, as JAX accepts them; {} unless `dynamic_shapes` has one item per input."""
    names: dict[sympy.Symbol, str] = {}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    fakes = [node.meta.get("val") for node in placeholders[len(placeholders) - len(program.graph_signature.user_inputs) :]]
    specs = _dynamic_shapes_by_input(dynamic_shapes)
    if len(specs) != len(fakes):
        return names
    for fake, spec in zip(fakes, specs, strict=True):
        dims = spec.items() if isinstance(spec, Mapping) else enumerate(spec or ())
        for dim, export_dim in dims:
            name = getattr(export_dim, "__name__", None)
            size = fake.shape[dim] if isinstance(fake, torch.Tensor) else None
            if name and isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                names.setdefault(size.node.expr, _unused_name(_identifier(name), names.values()))
    return names


def _dynamic_shapes_by_input(spec: Any) -> list[Any]:
    """Flattens `dynamic_shapes` to one item per input: a dict by dimension, a sequence with an item per dimension, or None."""

    def is_leaf(item: Any) -> bool:
        if isinstance(item, Mapping):
            return all(isinstance(key, int) for key in item)
        return item is None or (isinstance(item, (tuple, list)) and all(not isinstance(part, (Mapping, tuple, list)) for part in item))

    if isinstance(spec, Mapping) and all(isinstance(key, str) for key in spec):
        return [leaf for item in spec.values() for leaf in _dynamic_shapes_by_input(item)]
    return pytree.tree_leaves(spec, is_leaf=is_leaf) if isinstance(spec, (tuple, list, Mapping)) else []


def _identifier(name: str) -> str:
    """Converts a name to a name that JAX accepts for a dimension."""
    name = re.sub(r"\W", "_", name)
    return name if name[:1].isalpha() and name not in ("mod", "floordiv", "max", "min") else f"d{name}"


def _unused_name(name: str, used: Iterable[str]) -> str:
    """Returns a name, with underscores appended while it is in `used`."""
    while name in used:
        name += "_"
    return name
