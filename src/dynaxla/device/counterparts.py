"""What computes the values that an op writes or returns: the op itself, or the one that it would be if it wrote nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

# How a result is stored, which ops that write to a tensor do not say.
_STORED = ("dtype", "layout", "device", "pin_memory", "memory_format")
# Ops whose counterpart has another name.
_NAMES = {"normal_": "normal_functional"}
_OVERLOADS = {aten.bernoulli_.float: aten.bernoulli.p}


@dataclass(frozen=True)
class Form:
    """An op, and how it is computed.

    Attributes: op; functional (gives the values as new tensors; None if there is no such op); written (the names of arguments that are
    written to, in the order of the functional op's results); dropped (those that the functional op does not take); gives_dtype (whether the
    functional op takes the result's dtype, which the op finds in what it writes to); is_view (whether it only makes a tensor another view).
    """

    op: OpOverload
    functional: OpOverload | None
    written: tuple[str, ...]
    dropped: frozenset[str]
    gives_dtype: bool
    is_view: bool


@functools.cache
def form_of(op: OpOverload) -> Form:
    schema = op._schema
    written = tuple(item.name for item in schema.arguments if item.alias_info is not None and item.alias_info.is_write)
    is_view = bool(schema.returns) and all(item.alias_info is not None for item in schema.returns)
    if torch.Tag.inplace_view in op.tags or (not written and is_view):
        return Form(op, None, (), frozenset(), False, True)
    if not written:
        return Form(op, op, (), frozenset(), False, False)
    outs = frozenset(item.name for item in schema.arguments if item.is_out)
    functional = _OVERLOADS.get(op) or _counterpart(op, outs)
    results = [] if functional is None else [item for item in functional._schema.returns if "Tensor" in str(item.type)]
    if functional is None or len(results) != len(written) or (outs and set(written) != outs):
        return Form(op, None, written, frozenset(), False, False)
    names = {item.name for item in schema.arguments}
    gives_dtype = any(item.name == "dtype" and item.name not in names for item in functional._schema.arguments)
    return Form(op, functional, written, outs, gives_dtype, False)


def _counterpart(op: OpOverload, outs: frozenset[str]) -> OpOverload | None:
    """The op of the same arguments that writes nothing."""
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
