"""Prints measurements as tables on a terminal. Only commands import this, since importing rich draws from Python's random generator."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .tuner import Measurement


def show(measurements: Iterable[Measurement], console: Console) -> None:
    """Prints a table for each op and machine, with a row for each problem: the times of its implementations, the chosen one marked."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for item in measurements:
        groups.setdefault((item.op, item.machine), []).append(item)
    for (op, machine), found in sorted(groups.items()):
        names = list(dict.fromkeys(name for item in found for name in item.seconds))
        table = Table(title=f"{op}, microseconds on {machine}", title_justify="left", header_style="bold")
        table.add_column("problem", overflow="fold")
        for name in names:
            table.add_column(name, justify="right")
        table.add_column("expected")
        for item in sorted(found, key=lambda item: item.problem):
            times = [Text(_microseconds(item, name), style="bold green" if name == item.chosen else "") for name in names]
            table.add_row(Text(item.problem), *times, Text(item.expected, style="dim" if item.expected == item.chosen else "yellow"))
        console.print(table)
    total = sum(map(len, groups.values()))
    unexpected = sum(item.chosen != item.expected for found in groups.values() for item in found)
    console.print(f"{total} problems; for {unexpected} of them another implementation than the expected one was chosen.")


def _microseconds(item: Measurement, name: str) -> str:
    if name not in item.seconds:
        return "-"
    value = item.seconds[name]
    return "refused" if value is None else f"{value * 1e6:.1f}{' *' if name == item.chosen else ''}"
