"""The tables of `dynaxla ops`: how each ATen op is computed."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch._ops import OpOverload

from ..capture.decompositions import decompositions
from ..lowering import registry
from ..runtime import private


@dataclass(frozen=True)
class Way:
    """How an op is computed.

    Attributes:
        op: the overload.
        kind: "lowering", "decomposition" (into ops with a lowering), or "kernel" (torch's own, called by the program).
        where: the place of the lowering as module:line, or "".
    """

    op: OpOverload
    kind: str
    where: str = ""


def ways(platform: str) -> list[Way]:
    """Returns, for every functional overload of ATen and prims and every other op with a lowering, how it is computed.

    Args:
        platform: JAX's name.
    """
    table = decompositions(platform)
    found = []
    for op in sorted(set(_functional_overloads()) | registry.ops(), key=str):
        if rule := registry.find(op, platform):
            found.append(Way(op, "lowering", rule.location.removeprefix("dynaxla.lowering.ops.")))
        elif op in table or op._can_decompose():
            found.append(Way(op, "decomposition"))
        else:
            found.append(Way(op, "kernel"))
    return found


def _functional_overloads() -> Iterator[OpOverload]:
    for name in private.op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace not in ("aten", "prims") or name.endswith("_out"):
            continue
        try:
            op = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        except AttributeError:  # a TorchScript op, or an op that this build of torch names but does not have
            continue
        takes_tensors = any("Tensor" in str(argument.type) for argument in (*op._schema.arguments, *op._schema.returns))
        if takes_tensors and not op._schema.is_mutable:
            yield op


def totals_table(every: Sequence[Way]) -> Table:
    """Returns a table with the number of ops for each way to compute them."""
    core = [way for way in every if torch.Tag.core in way.op.tags]
    table = Table("way", "ops", "of PyTorch's core set")
    totals, core_totals = Counter(way.kind for way in every), Counter(way.kind for way in core)
    for kind in ("lowering", "decomposition", "kernel"):
        table.add_row(kind, str(totals[kind]), str(core_totals[kind]))
    table.add_row("together", str(len(every)), str(len(core)))
    return table


def table_of_ops(found: Sequence[Way]) -> Table:
    """Returns a table with a row for each op."""
    table = Table("op", "way", "where")
    for way in found:
        table.add_row(str(way.op), way.kind, way.where)
    return table


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True if an op's name, with or without its namespace and its overload, matches one of the patterns."""
    parts = (name, name.partition(".")[2], name.split(".")[1])
    return any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in patterns)
