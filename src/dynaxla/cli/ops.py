"""`dynaxla ops`: which way each ATen op goes, and which way the ops of a user's own script went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand

_ARGUMENTS = "dynaxla.ops.arguments"


class WithScript(TyperCommand):
    """A command whose option `--run SCRIPT` ends its own arguments: what follows is the script's, as with `python SCRIPT ...`.

    One `--` right behind the script is left out.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        mine, scripts = divided(args)
        ctx.meta[_ARGUMENTS] = scripts
        return super().parse_args(ctx, mine)


def divided(args: list[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and the script's."""
    for position, argument in enumerate(args):
        if argument == "--":  # only patterns follow
            break
        if argument == "--run" or argument.startswith("--run="):
            end = position + (2 if argument == "--run" else 1)
            return args[:end], args[end + 1 :] if args[end : end + 1] == ["--"] else args[end:]
    return args, []


_RUN = typer.Option(
    metavar="SCRIPT [ARGUMENTS]...",
    help="Run this Python script, then show which way the ops of its graphs went. All that follows it is the script's.",
    show_default=False,
)


def ops(
    context: typer.Context,
    patterns: Annotated[list[str] | None, typer.Argument(help="Show the ops whose names match, e.g. 'linalg*' or cumsum.")] = None,
    platform: Annotated[str, typer.Option(help="JAX's name of the platform: cpu, cuda, rocm, tpu.")] = "cpu",
    run: Annotated[Path | None, _RUN] = None,
) -> None:
    """Which way each op goes: by a lowering, a decomposition, or torch's own kernel.

    With --run the exit code is the script's.
    """
    if run is not None and not run.is_file():
        raise typer.BadParameter(f"{run} is not a file")
    from . import op_table as found

    console = Console()
    if run is not None:
        code = found.run_script(run, context.meta[_ARGUMENTS])
        console.print(found.observed_table(patterns))
        sys.exit(code)
    if not patterns:
        console.print(found.totals_table(platform))
        console.print("dynaxla ops PATTERN lists ops by name; dynaxla ops --run SCRIPT shows which way a script's own ops went")
        return
    table = found.table_of_ops(platform, patterns)
    if not table.row_count:
        raise typer.BadParameter(f"no op matches {' or '.join(patterns)}")
    console.print(table)
