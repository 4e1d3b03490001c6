"""Tables of engines' times by model, with ratios and their means, as lines of Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def circumstances(environment: Mapping[str, str]) -> str:
    versions = ", ".join(f"{name} {environment[name]}" for name in ("python", "torch", "jax", "jaxlib") if name in environment)
    machine = "; ".join(environment[name] for name in ("gpu", "cpu") if name in environment)
    return f"{environment['date']}; {versions}; {machine}."


def all_circumstances(measured: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each day and machine on which models were measured. Each item of `measured` has `environment`."""
    found = [dict(item["environment"]) for item in measured if item["environment"]]
    return sorted({circumstances({**environment, "date": environment["date"].partition(" ")[0]}) for environment in found})


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def heading(cells: Sequence[str]) -> list[str]:
    """Returns the heading of a table whose first column is text, and whose others are numbers."""
    return [line(cells), line(["---", *["---:"] * (len(cells) - 1)])]


def times(engines: Sequence[str], ratios: Sequence[tuple[str, str]], models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a table of times and ratios.

    Args:
        engines: the engines that are shown.
        ratios: pairs of engines; the first one's time over the second's is shown.
        models: by model and engine `good`, and `ms` or `failure`.
    """
    lines = heading(["model", *[f"{name} ms" for name in engines], *[f"{one} / {other}" for one, other in ratios]])
    collected: list[list[float]] = [[] for _ in ratios]
    for model, rows in models.items():
        good = {name: row["ms"] for name, row in rows.items() if row["good"]}
        cells = [f"{good[name]:.4g}" if name in good else absent(rows.get(name)) for name in engines]
        for values, (one, other) in zip(collected, ratios, strict=True):
            if one in good and other in good:
                values.append(good[one] / good[other])
                cells.append(f"{values[-1]:.2f}")
            else:
                cells.append("-")
        lines.append(line([model, *cells]))
    blanks = [""] * len(engines)
    lines.append(line(["**geometric mean**", *blanks, *[f"**{mean(values):.2f}**" if values else "-" for values in collected]]))
    lines.append(line(["**minimum**", *blanks, *[f"**{min(values):.2f}**" if values else "-" for values in collected]]))
    return lines


def absent(row: Mapping[str, Any] | None) -> str:
    """Returns why there is no time. A table that was measured earlier may lack an engine."""
    return "not measured" if row is None else f"failed: {row['failure']}"


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
