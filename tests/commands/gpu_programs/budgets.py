"""The figures that must not grow: budgets.json has, for each program, those that were last accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .results import Results

PATH = Path(__file__).with_name("budgets.json")

# XLA's assignment of memory is not stable to the byte: so much more, relative and in MiB, is no change.
_SLACK, _SLACK_MIB = 0.02, 0.5


def load(path: Path = PATH) -> Results:
    return json.loads(path.read_text()) if path.exists() else {}


def save(found: Results, path: Path = PATH) -> None:
    """These, and what is there already of other cells."""
    kept = load(path) | {cell: {"programs": result["programs"]} for cell, result in found.items() if "programs" in result}
    lines = [f"{json.dumps(cell)}: {json.dumps(kept[cell])}" for cell in sorted(kept)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def exceeded(found: Results, budgets: Results) -> Iterator[str]:
    """A line for each figure above its budget, each custom call that is not in it, and each program without one."""
    for cell, result in found.items():
        if "error" in result:
            yield f"{cell}: {result['error'].strip().splitlines()[-1]}"
            continue
        for kind, figures in result["programs"].items():
            budget = budgets.get(cell, {}).get("programs", {}).get(kind)
            if budget is None:
                yield f"{cell} {kind}: it has no budget"
                continue
            for name in ("kernels", "moves"):
                if figures[name] > budget[name]:
                    yield f"{cell} {kind}: {figures[name]} {name}, at most {budget[name]} are allowed"
            if figures["memory_mib"] > budget["memory_mib"] * (1 + _SLACK) + _SLACK_MIB:
                yield f"{cell} {kind}: {figures['memory_mib']} MiB of temporary memory, at most {budget['memory_mib']} are allowed"
            for call in figures["calls"].keys() - budget["calls"].keys():
                yield f"{cell} {kind}: it calls {call}, which its budget does not have"
