"""`dynaxla ops`: which way each ATen op goes, and which way the ops of a user's own script went."""

from __future__ import annotations

import fnmatch
import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch._ops import OpOverload

from .capture.decompositions import decompositions
from .lowering import registry
from .observe import ops as observed


@dataclass(frozen=True)
class Way:
    """How an op is computed: "lowering", "decomposition" (into ops that have one), or "kernel" (torch's own, inside the program).

    where: the place of the lowering, as module:line; else "".
    """

    op: OpOverload
    kind: str
    where: str = ""


def ways(platform: str) -> list[Way]:
    """Every functional overload of ATen and prims that a graph can hold, and every other op that has a lowering.

    platform: JAX's name of it.
    """
    table = decompositions(platform)
    found = []
    for op in sorted(set(_functional_overloads()) | registry.ops(), key=str):
        if rule := registry.find(op, platform):
            found.append(Way(op, "lowering", rule.where.removeprefix("dynaxla.lowering.ops.")))
        elif op in table or op._can_decompose():
            found.append(Way(op, "decomposition"))
        else:
            found.append(Way(op, "kernel"))
    return found


def _functional_overloads() -> Iterator[OpOverload]:
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace not in ("aten", "prims") or name.endswith("_out"):
            continue
        try:
            op = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        except AttributeError:  # an op of TorchScript's, or one that this build of torch only names
            continue
        takes_tensors = any("Tensor" in str(argument.type) for argument in (*op._schema.arguments, *op._schema.returns))
        if takes_tensors and not op._schema.is_mutable:
            yield op


def ops(
    patterns: Annotated[list[str] | None, typer.Argument(help="Show the ops whose names match, e.g. 'linalg*' or cumsum.")] = None,
    platform: Annotated[str, typer.Option(help="JAX's name of the platform: cpu, cuda, rocm, tpu.")] = "cpu",
    run: Annotated[Path | None, typer.Option(help="Run this Python script, then show which way the ops of its graphs went.")] = None,
) -> None:
    """Which way each op goes: by a lowering, a decomposition, or torch's own kernel."""
    console = Console()
    if run is not None:
        _run(run)
        console.print(_observed_table())
        return
    every = ways(platform)
    if patterns:
        table = Table("op", "way", "where")
        shown = [way for way in every if any(_matches(way.op, pattern) for pattern in patterns)]
        if not shown:
            raise typer.BadParameter(f"no op matches {' or '.join(patterns)}")
        for way in shown:
            table.add_row(str(way.op), way.kind, way.where)
        console.print(table)
        return
    core = [way for way in every if torch.Tag.core in way.op.tags]
    table = Table("way", "ops", "of PyTorch's core set")
    totals, core_totals = Counter(way.kind for way in every), Counter(way.kind for way in core)
    for kind in ("lowering", "decomposition", "kernel"):
        table.add_row(kind, str(totals[kind]), str(core_totals[kind]))
    table.add_row("together", str(len(every)), str(len(core)))
    console.print(table)
    console.print("dynaxla ops PATTERN lists ops by name; dynaxla ops --run SCRIPT shows which way a script's own ops went")


def _matches(op: OpOverload, pattern: str) -> bool:
    name = str(op)
    return any(fnmatch.fnmatchcase(part, pattern) for part in (name, name.partition(".")[2], name.split(".")[1]))


def _run(script: Path) -> None:
    if not script.is_file():
        raise typer.BadParameter(f"{script} is not a file")
    saved = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [str(script)], [str(script.parent)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = saved


def _observed_table() -> Table:
    counts = observed.snapshot()
    caption = "nodes of the graphs that were traced, one trace per executable"
    table = Table("op", "nodes lowered", "nodes by torch's kernel", caption=caption)
    for name, count in sorted(counts.items(), key=lambda item: (-item[1]["fallback"], -item[1]["lowered"], item[0])):
        table.add_row(name, str(count["lowered"]), str(count["fallback"]))
    table.add_section()
    table.add_row("together", *(str(sum(count[kind] for count in counts.values())) for kind in ("lowered", "fallback")))
    return table
