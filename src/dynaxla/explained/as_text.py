"""Formats an explanation as text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import formatting
from .explanation import CapturedGraph, Explanation, Graph

_WIDTH = 120


def text(found: Explanation) -> str:
    """Returns the explanation as plain text, without colours."""
    console = Console(width=_WIDTH, no_color=True, highlight=False, force_terminal=False, force_jupyter=False, legacy_windows=False)
    with console.capture() as capture:
        _print(found, console)
    return "\n".join(row.rstrip() for row in capture.get().splitlines())


def _print(found: Explanation, console: Console) -> None:
    def heading(what: str) -> None:
        console.print()
        console.print(Text(what))
        console.print(Text("-" * len(what)))

    def say(what: str, indent: int = 2) -> None:
        for index, row in enumerate(Text(what).wrap(console, _WIDTH - indent - 2)):
            console.print(Text(" " * (indent if index == 0 else indent + 2) + row.plain.rstrip()))

    console.print(Text(f"dynaxla explains {found.name}"))
    console.print(Text(found.versions))
    if found.error:
        say(f"It failed: {found.error}", 0)
    console.print(_table((), formatting.summary(found)))
    heading("What to do next")
    for index, item in enumerate(found.advice, 1):
        say(f"{index}. {item.what}")
        say(item.why + (f" [{item.line}]" if item.line is not None else ""), 5)
    if not found.advice:
        say("Nothing was found.")
    if found.costs:
        heading("The costliest lines, " + ("of all runs" if found.is_script else "of a later call"))
        rows = [
            (f"{cost.share:.1%}", formatting.seconds(cost.seconds), str(cost.line), cost.line.source, ", ".join(cost.what))
            for cost in found.costs
        ]
        console.print(_table(("share", "time", "line", "source", "mostly"), rows))
        say(f"{found.unplaced:.1%} of this time is of no line of yours that is known.")
    if found.breaks:
        heading("Breaks")
    for end in found.breaks:
        say(f"{end.line}" + (f" ({end.count} times)" if end.count > 1 else "") + f": {end.reason}")
        if end.line is not None and end.line.source:
            say(end.line.source, 6)
    if found.recompilations:
        heading("Captured again")
    for again in found.recompilations:
        say(f"{again.line}: {again.reason}")
    heading("Phases of " + ("the script" if found.is_script else "the first call"))
    whole = max(found.seconds, sum(found.phases.values())) or 1.0
    phases = [(name, formatting.seconds(spent), "#" * round(40 * spent / whole)) for name, spent in found.phases.items()]
    console.print(_table((), phases))
    for captured in found.captured:
        _captured(captured, console, heading, say)
    for title, items in (("Steps", found.ways), ("Notes", found.notes)):
        if items:
            heading(title)
        for note in items:
            say(note)


def _captured(captured: CapturedGraph, console: Console, heading: Callable[[str], None], say: Callable[..., None]) -> None:
    heading(formatting.title(captured))
    say(formatting.ended(captured))
    for fallback in captured.fallbacks:
        say(f"torch computes {fallback.op} ({fallback.count}): {fallback.reason} [{fallback.where}]")
    if captured.rewrites:
        console.print(_table(formatting.REWRITE, [formatting.rewrite_row(rewrite) for rewrite in captured.rewrites]))
    for graph in captured.graphs:
        _graph(graph, console, say)


def _graph(graph: Graph, console: Console, say: Callable[..., None]) -> None:
    console.print()
    say(f"{graph.name} ({graph.phase})")
    console.print(_table((), formatting.facts(graph), indent=4))
    for columns, rows in (
        (formatting.PROGRAM, [formatting.program_row(program) for program in graph.programs]),
        (formatting.IMPLEMENTATION, [formatting.implementation_row(item) for item in graph.implementations]),
        (formatting.REWRITE, [formatting.rewrite_row(rewrite) for rewrite in graph.rewrites]),
        (formatting.COPY, [formatting.copy_row(copy) for copy in graph.copies]),
        (("op", "count", "by torch, because", "line"), [(f.op, str(f.count), f.reason, f.where) for f in graph.fallbacks]),
    ):
        if rows:
            console.print(_table(columns, rows, indent=4))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], indent: int = 2) -> Table:
    table = Table(box=None, show_header=bool(columns), pad_edge=True, padding=(0, 1, 0, indent if not columns else 1))
    count = len(columns) or max((len(row) for row in rows), default=0)
    for index in range(count):
        table.add_column(columns[index] if columns else "", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
