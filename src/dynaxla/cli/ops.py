"""`dynaxla ops`: shows how each ATen op is computed."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def ops(
    patterns: Annotated[list[str] | None, typer.Argument(help="Show the ops whose names match, e.g. 'linalg*' or cumsum.")] = None,
    platform: Annotated[str, typer.Option(help="JAX's name of the platform: cpu, cuda, rocm, tpu.")] = "cpu",
) -> None:
    """Show how each op is computed: by a lowering, a decomposition, or torch's own kernel. `dynaxla explain` shows the ops of a script."""
    from . import op_table as found

    console = Console()
    if not patterns:
        console.print(found.totals_table(platform))
        console.print("dynaxla ops PATTERN lists ops by name; dynaxla explain SCRIPT shows which way a script's own ops went")
        return
    table = found.table_of_ops(platform, patterns)
    if not table.row_count:
        raise typer.BadParameter(f"no op matches {' or '.join(patterns)}")
    console.print(table)
