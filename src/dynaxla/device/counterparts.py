"""Finds the functional op that computes the values which an op writes or returns."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from ..torch_ops import aten

# Ops that take Python numbers in place of tensors.
# Source: torch/csrc/jit/frontend/schema_matching and python_arg_parser, allow_numbers_as_tensors
_TAKE_NUMBERS = frozenset(["add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide"])
# Arguments about the storage of a result, which ops that write to a tensor do not have.
_STORED = ("dtype", "layout", "device", "pin_memory", "memory_format")
# Ops whose functional counterpart has another name.
_NAMES = {"normal_": "normal_functional"}
_OVERLOADS = {aten.bernoulli_.float: aten.bernoulli.p}

# Ops whose Python numbers affect only the values of the result: neither its shape nor whether torch's kernels accept the operands. Their
# programs take the numbers as inputs.
_OF_NUMBERS = frozenset([
    "add", "sub", "rsub", "mul", "multiply", "subtract", "div", "divide", "true_divide", "floor_divide", "remainder", "fmod", "pow",
    "addcmul", "addcdiv", "lerp", "clamp", "clamp_min", "clamp_max", "clip", "fill", "full_like", "masked_fill", "where",
    "eq", "ne", "lt", "le", "gt",
    "ge", "addmm", "addmv", "addr", "addbmm", "baddbmm", "xlogy", "leaky_relu", "threshold", "hardtanh", "elu", "softplus", "nan_to_num",
])  # fmt: skip
# The types of arguments that may be such a number. Sizes and dimensions (int) are not among them.
_NUMBERS = frozenset(["number", "float", "Tensor", "Optional[number]", "Optional[float]", "Optional[Tensor]"])


@dataclass(frozen=True)
class FunctionalOp:
    """An op and its functional counterpart.

    Attributes:
        op: the overload.
        functional: the op that returns the values as new tensors; `op` itself if it writes nothing; None if there is no such op.
        written: the names of the arguments that `op` writes to, in the order of the functional op's results.
        dropped: the names of the arguments that the functional op does not take.
        gives_dtype: the functional op takes the dtype of the result as an argument, where `op` takes that of the tensor it writes to.
        is_view: `op` only returns a view or changes the metadata of a tensor.
    """

    op: OpOverload
    functional: OpOverload | None
    written: tuple[str, ...]
    dropped: frozenset[str]
    gives_dtype: bool
    is_view: bool

    @functools.cached_property
    def tensors(self) -> tuple[int, ...]:
        """The positions of the arguments that are tensors in the op's schema; Python callers may pass numbers there."""
        return tuple(index for index, item in enumerate(self.op._schema.arguments) if str(item.type) == "Tensor")

    @functools.cached_property
    def name(self) -> str:
        """The functional op's name in ATen, without the namespace; "" if there is no such op."""
        return "" if self.functional is None else self.functional._schema.name.removeprefix("aten::")

    @functools.cached_property
    def numbers(self) -> frozenset[int | str]:
        # The positions and the names of the arguments whose Python numbers the program takes as inputs.
        if self.name not in _OF_NUMBERS:
            return frozenset()
        found = [(index, item.name) for index, item in enumerate(self.op._schema.arguments) if str(item.type) in _NUMBERS]
        return frozenset(place for places in found for place in places)


@functools.cache
def form_of(op: OpOverload) -> FunctionalOp:
    schema = op._schema
    written = tuple(item.name for item in schema.arguments if item.alias_info is not None and item.alias_info.is_write)
    is_view = bool(schema.returns) and all(item.alias_info is not None for item in schema.returns)
    if torch.Tag.inplace_view in op.tags or (not written and is_view):
        return FunctionalOp(op, None, (), frozenset(), False, True)
    if not written:
        return FunctionalOp(op, op, (), frozenset(), False, False)
    outs = frozenset(item.name for item in schema.arguments if item.is_out)
    functional = _OVERLOADS.get(op) or _counterpart(op, outs)
    results = [] if functional is None else [item for item in functional._schema.returns if "Tensor" in str(item.type)]
    if functional is None or len(results) != len(written) or (outs and set(written) != outs):
        return FunctionalOp(op, None, written, frozenset(), False, False)
    names = {item.name for item in schema.arguments}
    gives_dtype = any(item.name == "dtype" and item.name not in names for item in functional._schema.arguments)
    return FunctionalOp(op, functional, written, outs, gives_dtype, False)


@functools.cache
def for_numbers(op: OpOverload, positions: tuple[int, ...]) -> OpOverload:
    """Returns the overload that takes Python numbers where an op has tensors; the op itself if there is none, or if it takes numbers.

    ATen wraps such numbers as rank-0 tensors that count as numbers in type promotion. Python kernels get them as numbers, which few of
    these overloads accept.

    Args:
        positions: the arguments that are numbers.
    """
    if op._schema.name.removeprefix("aten::").removesuffix("_") in _TAKE_NUMBERS:
        return op
    wanted = [(item.name, "number" if index in positions else str(item.type)) for index, item in enumerate(op._schema.arguments)]
    for overload in op.overloadpacket.overloads():
        found = getattr(op.overloadpacket, overload)
        if [(item.name, str(item.type)) for item in found._schema.arguments] == wanted:
            return found
    return op


def _counterpart(op: OpOverload, outs: frozenset[str]) -> OpOverload | None:
    """Returns the overload with the same arguments that writes nothing, or None.

    Args:
        outs: the names of the op's `out` arguments.
    """
    namespace, _, name = op._schema.name.partition("::")
    base = name if outs else _NAMES.get(name) or name.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None or (base == name and not outs):
        return None
    wanted = _arguments(op, outs)
    for overload in packet.overloads():
        found = getattr(packet, overload)
        if found._schema.is_mutable or any(item.alias_info is not None for item in found._schema.returns):
            continue
        known = [item for item in _arguments(found, frozenset()) if item in wanted or item[0] not in _STORED]
        if known == wanted:
            return found
    return None


def _arguments(op: OpOverload, without: frozenset[str]) -> list[tuple[str, str]]:
    return [(item.name, str(item.type)) for item in op._schema.arguments if item.name not in without]
