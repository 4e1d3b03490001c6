"""Formats an explanation as text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import formatting
from .explanation import CapturedGraph, Explanation, Graph

_WIDTH = 120


def text(explanation: Explanation) -> str:
    """Returns the explanation as plain text, without colours."""
    console = Console(width=_WIDTH, no_color=True, highlight=False, force_terminal=False, force_jupyter=False, legacy_windows=False)
    with console.capture() as capture:
        _print(explanation, console)
    return "\n".join(row.rstrip() for row in capture.get().splitlines())


def _print(explanation: Explanation, console: Console) -> None:
    def heading(title: str) -> None:
        console.print()
        console.print(Text(title))
        console.print(Text("-" * len(title)))

    def write(sentence: str, indent: int = 2) -> None:
        for index, row in enumerate(Text(sentence).wrap(console, _WIDTH - indent - 2)):
            console.print(Text(" " * (indent if index == 0 else indent + 2) + row.plain.rstrip()))

    console.print(Text(f"dynaxla explains {explanation.name}"))
    console.print(Text(explanation.versions))
    if explanation.error:
        write(f"It failed: {explanation.error}", 0)
    console.print(_table((), formatting.summary(explanation)))
    heading("What to do next")
    for index, item in enumerate(explanation.advice, 1):
        write(f"{index}. {item.action}")
        write(item.reason + (f" [{item.line}]" if item.line is not None else ""), 5)
    if not explanation.advice:
        write("No advice: nothing was found that could be improved.")
    if explanation.costs:
        heading("The costliest lines, " + ("of all runs" if explanation.is_script else "of a later call"))
        rows = [
            (f"{cost.share:.1%}", formatting.seconds(cost.seconds), str(cost.line), cost.line.source, ", ".join(cost.kinds))
            for cost in explanation.costs
        ]
        console.print(_table(("share", "time", "line", "source", "mostly"), rows))
        write(formatting.unplaced_sentence(explanation))
    if explanation.breaks:
        heading("Breaks")
    for graph_break in explanation.breaks:
        times = f" ({graph_break.count} times)" if graph_break.count > 1 else ""
        write(f"{graph_break.line}{times}: {graph_break.reason}")
        if graph_break.line is not None and graph_break.line.source:
            write(graph_break.line.source, 6)
    if explanation.recompilations:
        heading("Captured again")
    for recompilation in explanation.recompilations:
        write(f"{recompilation.line}: {recompilation.reason}")
    heading("Phases of " + ("the script" if explanation.is_script else "the first call"))
    total = max(explanation.seconds, sum(explanation.phases.values())) or 1.0
    phases = [(name, formatting.seconds(spent), "#" * round(40 * spent / total)) for name, spent in explanation.phases.items()]
    console.print(_table((), phases))
    for captured in explanation.captured:
        _captured(captured, console, heading, write)
    for title, items in (("Steps", explanation.step_modes), ("Notes", explanation.notes)):
        if items:
            heading(title)
        for sentence in items:
            write(sentence)


def _captured(captured: CapturedGraph, console: Console, heading: Callable[[str], None], write: Callable[..., None]) -> None:
    heading(formatting.title(captured))
    write(formatting.end_sentence(captured))
    for fallback in captured.fallbacks:
        write(f"torch computes {fallback.op} ({fallback.count}): {fallback.reason} [{fallback.where}]")
    if captured.rewrites:
        console.print(_table(formatting.REWRITE, [formatting.rewrite_row(rewrite) for rewrite in captured.rewrites]))
    for graph in captured.graphs:
        _graph(graph, console, write)


def _graph(graph: Graph, console: Console, write: Callable[..., None]) -> None:
    console.print()
    write(f"{graph.name} ({graph.phase})")
    console.print(_table((), formatting.facts(graph), indent=4))
    for columns, rows in formatting.tables(graph):
        console.print(_table(columns, rows))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], indent: int = 2) -> Table:
    table = Table(box=None, show_header=bool(columns), pad_edge=True, padding=(0, 1, 0, indent if not columns else 1))
    count = len(columns) or max((len(row) for row in rows), default=0)
    for index in range(count):
        table.add_column(columns[index] if columns else "", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
