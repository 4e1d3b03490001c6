"""What `dynaxla ops` shows: which way each ATen op goes, and which way the ops of a user's own script went."""

from __future__ import annotations

import builtins
import fnmatch
import sys
import tokenize
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

import torch
from rich.table import Table
from torch._ops import OpOverload

from ..capture.decompositions import decompositions
from ..lowering import registry
from ..observe import coverage as observed
from ..runtime import private


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
    for name in private.op_names():
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


def totals_table(platform: str) -> Table:
    """How many ops go which way."""
    every = ways(platform)
    core = [way for way in every if torch.Tag.core in way.op.tags]
    table = Table("way", "ops", "of PyTorch's core set")
    totals, core_totals = Counter(way.kind for way in every), Counter(way.kind for way in core)
    for kind in ("lowering", "decomposition", "kernel"):
        table.add_row(kind, str(totals[kind]), str(core_totals[kind]))
    table.add_row("together", str(len(every)), str(len(core)))
    return table


def table_of_ops(platform: str, patterns: Sequence[str]) -> Table:
    """The ops whose names match one of the patterns."""
    table = Table("op", "way", "where")
    for way in ways(platform):
        if _matches(str(way.op), patterns):
            table.add_row(str(way.op), way.kind, way.where)
    return table


def observed_table(patterns: Sequence[str] | None = None) -> Table:
    """What the graphs traced so far held, the ops that match one of the patterns, if there are any."""
    counts = {op: count for op, count in observed.snapshot().items() if not patterns or _matches(op, patterns)}
    caption = "nodes of the graphs that were traced, one trace per executable"
    table = Table("op", "nodes lowered", "nodes by torch's kernel", caption=caption)
    for name, count in sorted(counts.items(), key=lambda item: (-item[1]["fallback"], -item[1]["lowered"], item[0])):
        table.add_row(name, str(count["lowered"]), str(count["fallback"]))
    table.add_section()
    table.add_row("together", *(str(sum(count[kind] for count in counts.values())) for kind in ("lowered", "fallback")))
    return table


def _matches(name: str, patterns: Sequence[str]) -> bool:
    parts = (name, name.partition(".")[2], name.split(".")[1])
    return any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in patterns)


def run_script(script: Path, arguments: Sequence[str]) -> int | str | None:
    """Run a Python script as `python script arguments...` does. Returns what it exits with, as SystemExit has it.

    An exception of the script's is shown as Python shows it, and the code is 1 (of Ctrl-C: 130).
    """
    path = script.absolute()
    module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", str(path))
    module.__dict__.update(__file__=str(path), __builtins__=builtins, __cached__=None, __loader__=loader)
    saved = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[:1] = [str(path.resolve().parent)]
    sys.modules["__main__"] = module
    try:
        with tokenize.open(path) as file:  # in the encoding that the script declares
            source = file.read()
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        return error.code
    except BaseException as error:
        trace = error.__traceback__
        trace = trace.tb_next if trace is not None else None  # without this function's frame
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = saved
    return 0
