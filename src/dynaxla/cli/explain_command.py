"""`dynaxla explain`: runs a script and explains the functions that it compiles."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .terminal import Command

# The key of the script's arguments in click's `Context.meta`.
_SCRIPT_ARGUMENTS_KEY = "dynaxla.explain.arguments"


class ScriptCommand(Command):
    """A command whose first argument is a script. All later arguments belong to the script, as with `python SCRIPT ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        command_arguments, script_arguments = split_arguments(args)
        ctx.meta[_SCRIPT_ARGUMENTS_KEY] = script_arguments
        return super().parse_args(ctx, command_arguments)


def split_arguments(args: list[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments into the arguments of the command, including the script, and the arguments of the script."""
    position = 0
    while position < len(args) and args[position].startswith("-"):
        position += 2 if args[position] in ("--output", "-o") else 1
    return args[: position + 1], args[position + 1 :]


def explain(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="A Python script; all further arguments belong to it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page is written.")] = Path("explain.html"),
) -> None:
    """Run a script, explain everything that it compiles with dynaxla, and write the explanation as an HTML page.

    The page has graphs and their breaks, programs, implementations, fallbacks, copies, memory, times, the costliest lines, and advice. If
    the script fails, its exception is printed as Python prints it, and the page has the graphs until then. The exit code is the script's.
    """
    if not script.is_file():
        raise typer.BadParameter(f"{script} is not a file")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"{output.parent} is not a directory")
    from ..explained.explain_script import explain_script

    output = output.absolute()  # the script may change the working directory
    explanation, code = explain_script(script, context.meta[_SCRIPT_ARGUMENTS_KEY])
    typer.echo(str(explanation))
    explanation.save(output)
    typer.echo(f"\nThe page is {output}")
    sys.exit(code)
