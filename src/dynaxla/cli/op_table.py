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
class OpSupport:
    """How an op is computed on a platform.

    Attributes:
        op: the overload.
        kind: "lowering", "decomposition" (into other ops), or "kernel" (torch's own, called by the program or between two programs).
        where: the place of the lowering as module:line, or "".
    """

    op: OpOverload
    kind: str
    where: str = ""


def op_support(platform: str) -> list[OpSupport]:
    """Returns an `OpSupport` for each functional overload of ATen and prims with tensors, and for each other op with a lowering.

    Args:
        platform: JAX's name of the platform.
    """
    table = decompositions(platform)
    listed = []
    for op in sorted(set(_functional_overloads()) | registry.ops(), key=str):
        if rule := registry.find(op, platform):
            listed.append(OpSupport(op, "lowering", rule.location.removeprefix("dynaxla.lowering.ops.")))
        elif op in table or op._can_decompose():
            listed.append(OpSupport(op, "decomposition"))
        else:
            listed.append(OpSupport(op, "kernel"))
    return listed


def _functional_overloads() -> Iterator[OpOverload]:
    for name in private.op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace not in ("aten", "prims") or name.endswith("_out"):
            continue
        try:
            op = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        except AttributeError:  # a TorchScript op, or an op that torch lists and this build does not include
            continue
        takes_tensors = any("Tensor" in str(argument.type) for argument in (*op._schema.arguments, *op._schema.returns))
        if takes_tensors and not op._schema.is_mutable:
            yield op


def totals_table(all_ops: Sequence[OpSupport]) -> Table:
    """Returns a table with the number of ops of each kind of support."""
    core = [item for item in all_ops if torch.Tag.core in item.op.tags]
    table = Table("computed by", "ops", "of PyTorch's core ops")
    totals, core_totals = Counter(item.kind for item in all_ops), Counter(item.kind for item in core)
    for kind in ("lowering", "decomposition", "kernel"):
        table.add_row(kind, str(totals[kind]), str(core_totals[kind]))
    table.add_row("total", str(len(all_ops)), str(len(core)))
    return table


def ops_table(listed: Sequence[OpSupport]) -> Table:
    """Returns a table with a row for each op."""
    table = Table("op", "computed by", "where")
    for item in listed:
        table.add_row(str(item.op), item.kind, item.where)
    return table


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True if an op's name, with or without its namespace and its overload, matches one of the patterns."""
    parts = (name, name.partition(".")[2], name.split(".")[1])
    return any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in patterns)
