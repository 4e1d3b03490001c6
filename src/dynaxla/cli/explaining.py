"""`dynaxla explain`: run a script, and tell what became of what it compiles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

_ARGUMENTS = "dynaxla.explain.arguments"


class WithScript(TyperCommand):
    """A command whose first argument is a script: what follows is the script's, as with `python SCRIPT ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        mine, scripts = divided(args)
        ctx.meta[_ARGUMENTS] = scripts
        return super().parse_args(ctx, mine)


def divided(args: list[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments with the script, and the script's."""
    position = 0
    while position < len(args) and args[position].startswith("-"):
        position += 2 if args[position] in ("--output", "-o") else 1
    return args[: position + 1], args[position + 1 :]


def explain(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="A Python script; all that follows it is the script's.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page is written.")] = Path("explain.html"),
) -> None:
    """Run a script, show what became of all that it compiles with dynaxla, and write it as an HTML page.

    Graphs and why they broke, programs, forms, fallbacks, copies, memory, times, the costliest lines, and what to do next. A script that
    fails is shown as Python shows it, and the page is of what was compiled before. The exit code is the script's.
    """
    if not script.is_file():
        raise typer.BadParameter(f"{script} is not a file")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"{output.parent} is not a directory")
    from ..explained.running import explain_script

    output = output.absolute()  # the script may go elsewhere
    found, code = explain_script(script, context.meta[_ARGUMENTS])
    typer.echo(str(found))
    found.save(output)
    typer.echo(f"\nThe page is {output}")
    sys.exit(code)
