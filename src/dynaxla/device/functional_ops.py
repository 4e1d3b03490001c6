"""For an op that writes to its arguments, finds the functional op that returns the same values as new tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from ..torch_ops import aten

# Ops whose tensor arguments accept Python numbers.
# Source: torch/csrc/jit/frontend/schema_matching and python_arg_parser, allow_numbers_as_tensors
_NUMBERS_FOR_TENSORS = frozenset(["add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide"])
# Arguments about the storage of a result. An op that writes to a tensor lacks them, so its functional op may have them in addition.
_STORAGE_ARGUMENTS = ("dtype", "layout", "device", "pin_memory", "memory_format")
# Ops whose functional counterpart has another name.
_FUNCTIONAL_NAMES = {"normal_": "normal_functional"}
_FUNCTIONAL_OVERLOADS = {aten.bernoulli_.float: aten.bernoulli.p}

# Ops whose Python numbers affect only the values of the result, not its shape, and not which operands torch's kernels accept. The programs
# of these ops take the numbers as inputs.
_NUMBERS_AS_INPUTS = frozenset([
    "add", "sub", "rsub", "mul", "multiply", "subtract", "div", "divide", "true_divide", "floor_divide", "remainder", "fmod", "pow",
    "addcmul", "addcdiv", "lerp", "clamp", "clamp_min", "clamp_max", "clip", "fill", "full_like", "masked_fill", "where",
    "eq", "ne", "lt", "le", "gt",
    "ge", "addmm", "addmv", "addr", "addbmm", "baddbmm", "xlogy", "leaky_relu", "threshold", "hardtanh", "elu", "softplus", "nan_to_num",
])  # fmt: skip
# The types, in schemas, of arguments that may be such a number. Sizes and dimensions (int) are not among them.
_NUMBER_TYPES = frozenset(["number", "float", "Tensor", "Optional[number]", "Optional[float]", "Optional[Tensor]"])


@dataclass(frozen=True)
class FunctionalOp:
    """An op and its functional counterpart.

    Attributes:
        op: the overload that was called.
        functional: the op that returns the values as new tensors; `op` itself if `op` writes nothing; None if there is no such op.
        written: the names of the arguments that `op` writes to, in the order of the functional op's results.
        out_arguments: the names of the `out` arguments of `op`, which the functional op does not take.
        passes_dtype: True if the functional op must be given a dtype, namely the dtype of the tensor that `op` writes to.
        is_view: True if `op` only returns a view, or changes the metadata of a tensor.
    """

    op: OpOverload
    functional: OpOverload | None
    written: tuple[str, ...]
    out_arguments: frozenset[str]
    passes_dtype: bool
    is_view: bool

    @functools.cached_property
    def tensor_positions(self) -> tuple[int, ...]:
        """The positions of the arguments that are tensors in the op's schema; Python callers may pass numbers there."""
        return tuple(index for index, item in enumerate(self.op._schema.arguments) if str(item.type) == "Tensor")

    @functools.cached_property
    def name(self) -> str:
        """The functional op's name in ATen, without the namespace; "" if there is no such op."""
        return "" if self.functional is None else self.functional._schema.name.removeprefix("aten::")

    @functools.cached_property
    def number_arguments(self) -> frozenset[int | str]:
        """The positions and the names of the arguments whose Python numbers the op's program takes as inputs."""
        if self.name not in _NUMBERS_AS_INPUTS:
            return frozenset()
        arguments = [(index, item.name) for index, item in enumerate(self.op._schema.arguments) if str(item.type) in _NUMBER_TYPES]
        return frozenset(key for argument in arguments for key in argument)


@functools.cache
def functional_op_of(op: OpOverload) -> FunctionalOp:
    """Returns an op with its functional counterpart."""
    schema = op._schema
    written = tuple(item.name for item in schema.arguments if item.alias_info is not None and item.alias_info.is_write)
    is_view = bool(schema.returns) and all(item.alias_info is not None for item in schema.returns)
    if torch.Tag.inplace_view in op.tags or (not written and is_view):
        return FunctionalOp(op, None, (), frozenset(), False, True)
    if not written:
        return FunctionalOp(op, op, (), frozenset(), False, False)
    out_arguments = frozenset(item.name for item in schema.arguments if item.is_out)
    functional = _FUNCTIONAL_OVERLOADS.get(op) or _functional_overload(op, out_arguments)
    results = [] if functional is None else [item for item in functional._schema.returns if "Tensor" in str(item.type)]
    if functional is None or len(results) != len(written) or (out_arguments and set(written) != out_arguments):
        return FunctionalOp(op, None, written, frozenset(), False, False)
    names = {item.name for item in schema.arguments}
    passes_dtype = any(item.name == "dtype" and item.name not in names for item in functional._schema.arguments)
    return FunctionalOp(op, functional, written, out_arguments, passes_dtype, False)


@functools.cache
def overload_for_numbers(op: OpOverload, positions: tuple[int, ...]) -> OpOverload:
    """Returns the overload that takes Python numbers in place of some tensors.

    Returns the op itself if there is no such overload, or if the op accepts numbers for tensors. torch converts a number in place of a
    tensor to a rank-0 tensor for ATen's kernels, but not for kernels in Python, and few lowerings of overloads for tensors accept numbers.

    Args:
        op: the overload that was called.
        positions: the positions of the arguments that are numbers in the call.
    """
    if op._schema.name.removeprefix("aten::").removesuffix("_") in _NUMBERS_FOR_TENSORS:
        return op
    signature = [(item.name, "number" if index in positions else str(item.type)) for index, item in enumerate(op._schema.arguments)]
    for overload in op.overloadpacket.overloads():
        candidate = getattr(op.overloadpacket, overload)
        if [(item.name, str(item.type)) for item in candidate._schema.arguments] == signature:
            return candidate
    return op


def _functional_overload(op: OpOverload, out_arguments: frozenset[str]) -> OpOverload | None:
    """Returns the overload that takes the same arguments and writes nothing, or None.

    Args:
        op: an op that writes to its arguments.
        out_arguments: the names of the op's `out` arguments.
    """
    namespace, _, name = op._schema.name.partition("::")
    base = name if out_arguments else _FUNCTIONAL_NAMES.get(name) or name.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None or (base == name and not out_arguments):
        return None
    arguments = _arguments(op, out_arguments)
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if candidate._schema.is_mutable or any(item.alias_info is not None for item in candidate._schema.returns):
            continue
        candidate_arguments = [
            item for item in _arguments(candidate, frozenset()) if item in arguments or item[0] not in _STORAGE_ARGUMENTS
        ]
        if candidate_arguments == arguments:
            return candidate
    return None


def _arguments(op: OpOverload, without: frozenset[str]) -> list[tuple[str, str]]:
    """Returns the names and types of an op's arguments, except the arguments with the names `without`."""
    return [(item.name, str(item.type)) for item in op._schema.arguments if item.name not in without]
