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

from ..artifact.stablehlo import scope_of
from ..errors import CaptureError
from ..lowering.graphs import user_line
from ..lowering.metadata import SymbolValues, TensorSpec
from ..runtime import private


@dataclass(frozen=True)
class _OrderedSpec(TensorSpec):
    """A TensorSpec with an explicit memory order, which symbolic strides do not always determine.

    Attributes:
        places: The dimensions from the slowest-varying in memory to the fastest.
    """

    places: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        return self.places


class _Arithmetic(private.SizeArithmetic):
    """Minimum and maximum of JAX's symbolic dimensions."""

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return core.min_dim(a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return core.max_dim(a, b)


class SymbolicSizes(SymbolValues):
    """The symbols of a graph as JAX's symbolic dimensions.

    Attributes:
        dimensions: By name, the smallest size and the largest; None for no limit.
    """

    def __init__(self, names: Mapping[sympy.Symbol, str], dimensions: Mapping[str, tuple[int, int | None]]) -> None:
        self.dimensions = dict(dimensions)
        scope = scope_of(dimensions)
        super().__init__({symbol: export.symbolic_shape(name, scope=scope)[0] for symbol, name in names.items()})

    def examples(self) -> SymbolValues:
        """Returns the same symbols with example sizes within their limits, all different where the limits allow it."""
        limits = self.dimensions.values()
        sizes = [max(low, 8 + index if high is None else min(high, 8 + index)) for index, (low, high) in enumerate(limits)]
        return SymbolValues(dict(zip(self.values, sizes, strict=True)))

    def number(self, expression: Any) -> Any:
        """Returns the value of an expression: a number, or JAX's expression of symbolic dimensions."""
        if (known := self._expressions.get(expression)) is None:
            known = self._expressions[expression] = private.evaluate_size(_Arithmetic, self.values, expression)
        return known

    def integer(self, value: Any) -> Any:
        return value if isinstance(value, int) else self.number(value.node.expr)

    def spec(self, fake: torch.Tensor) -> TensorSpec:
        found = super().spec(fake)
        if isinstance(found, _OrderedSpec) or all(isinstance(step, int) for step in found.stride):
            return found
        strides = [_example(step) for step in fake.stride()]
        places = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
        ordered = _OrderedSpec(found.shape, found.stride, found.dtype, found.device, found.offset, places)
        self._specs[id(fake)] = fake, ordered
        return ordered


def _example(size: int | torch.SymInt) -> int:
    """Returns the size that a dimension had at export."""
    return size if isinstance(size, int) else int(size.node.hint)


def symbolic_sizes(program: ExportedProgram, dynamic_shapes: Any, arguments: Iterable[tuple[str, torch.Tensor]]) -> SymbolicSizes:
    """Returns the dynamic dimensions of an exported program.

    Their names are those given in `dynamic_shapes`, or are derived from the input's name and the dimension's index.

    Args:
        arguments: The inputs that are tensors, with their names.

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
    given = _given_names(program, dynamic_shapes)
    names: dict[sympy.Symbol, str] = {}
    for argument, fake in arguments:
        for dim, size in enumerate(fake.shape):
            symbols = sorted(size.node.expr.free_symbols, key=str) if isinstance(size, torch.SymInt) else []
            for symbol in symbols:
                names.setdefault(symbol, given.get(symbol) or _free(f"{_identifier(argument)}_{dim}", names.values()))
    dimensions = {}
    for symbol, name in names.items():
        limits = program.range_constraints.get(symbol)
        low = 1 if limits is None or not limits.lower.is_Integer else max(1, int(limits.lower))
        high = None if limits is None or not sympy.sympify(limits.upper).is_Integer else int(limits.upper)
        dimensions[name] = (low, high)
    return SymbolicSizes(names, dimensions)


def _given_names(program: ExportedProgram, dynamic_shapes: Any) -> dict[sympy.Symbol, str]:
    """Returns the user's names of dimensions (of torch.export.Dim), by symbol."""
    found: dict[sympy.Symbol, str] = {}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    fakes = [node.meta.get("val") for node in placeholders[len(placeholders) - len(program.graph_signature.user_inputs) :]]
    specs = _leaves(dynamic_shapes)
    if len(specs) != len(fakes):
        return found
    for fake, spec in zip(fakes, specs, strict=True):
        dims = spec.items() if isinstance(spec, Mapping) else enumerate(spec or ())
        for dim, wanted in dims:
            name = getattr(wanted, "__name__", None)
            size = fake.shape[dim] if isinstance(fake, torch.Tensor) else None
            if name and isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                found.setdefault(size.node.expr, _free(_identifier(name), found.values()))
    return found


def _leaves(spec: Any) -> list[Any]:
    """Returns the leaves of nested `dynamic_shapes`, one for each tensor: a dict by dimension, a sequence of dimensions, or None."""

    def is_leaf(item: Any) -> bool:
        if isinstance(item, Mapping):
            return all(isinstance(key, int) for key in item)
        return item is None or (isinstance(item, (tuple, list)) and all(not isinstance(part, (Mapping, tuple, list)) for part in item))

    if isinstance(spec, Mapping) and all(isinstance(key, str) for key in spec):
        return [leaf for item in spec.values() for leaf in _leaves(item)]
    return pytree.tree_leaves(spec, is_leaf=is_leaf) if isinstance(spec, (tuple, list, Mapping)) else []


def _identifier(name: str) -> str:
    """Returns a name that JAX accepts for a dimension."""
    name = re.sub(r"\W", "_", name)
    return name if name[:1].isalpha() and name not in ("mod", "floordiv", "max", "min") else f"d{name}"


def _free(name: str, taken: Iterable[str]) -> str:
    while name in taken:
        name += "_"
    return name
