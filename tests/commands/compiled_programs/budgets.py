"""Budgets: limits for the figures of programs. A file has, for each program, the figures that were last accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .results import Results


@dataclass(frozen=True)
class Limits:
    """The figures of a program that are compared with its budget.

    Attributes:
        counts: The names of figures that must not exceed the budget.
        sizes: The names of figures that may exceed the budget a little, since XLA's assignment of memory is not stable to the byte.
        calls: The name of a dict whose keys, such as names of custom calls, must all be in the budget's dict.
        slack: The fraction of the budget by which sizes may exceed it.
        least: The amount by which sizes may exceed any budget, in the unit of the sizes.
    """

    counts: Sequence[str]
    sizes: Sequence[str]
    calls: str = "calls"
    slack: float = 0.02
    least: float = 0.5

    def exceeded(self, results: Results, budgets: Results) -> Iterator[str]:
        """Yields a line for each figure above its budget, each call that the budget does not have, and each program without a budget."""
        for cell, result in results.items():
            if "error" in result:
                yield f"{cell}: {result['error'].strip().splitlines()[-1]}"
                continue
            for kind, figures in result["programs"].items():
                budget = budgets.get(cell, {}).get("programs", {}).get(kind)
                if budget is None:
                    yield f"{cell} {kind}: it has no budget"
                    continue
                for name in self.counts:
                    if figures[name] > budget[name]:
                        yield f"{cell} {kind}: {name} is {figures[name]}, and at most {budget[name]} is allowed"
                for name in self.sizes:
                    if figures[name] > budget[name] * (1 + self.slack) + self.least:
                        yield f"{cell} {kind}: {name} is {figures[name]}, and at most {budget[name]} is allowed"
                for call in figures[self.calls].keys() - budget[self.calls].keys():
                    yield f"{cell} {kind}: it calls {call}, which its budget does not have"


def load(path: Path) -> Results:
    return json.loads(path.read_text()) if path.exists() else {}


def save(found: Results, path: Path) -> None:
    """Writes the figures of these cells. The file's figures of other cells stay."""
    budgets = load(path) | {cell: {"programs": result["programs"]} for cell, result in found.items() if "programs" in result}
    lines = [f"{json.dumps(cell)}: {json.dumps(budgets[cell])}" for cell in sorted(budgets)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
