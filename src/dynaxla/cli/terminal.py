"""Parts that all commands have in common: the format of the help, the console, the option --json."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")]


class _PlainFlags:
    """A mixin for commands whose help shows no type next to an option that takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command of `dynaxla`."""


class CommandGroup(_PlainFlags, TyperGroup):
    """The command `dynaxla` itself."""


def console_for(width: int) -> Console:
    """Returns the console of a command's output. It has the width of the terminal, or of the variable COLUMNS.

    Args:
        width: the width if the output is not a terminal, and COLUMNS is not set.
    """
    console = Console()
    return console if console.is_terminal or os.environ.get("COLUMNS", "").isdigit() else Console(width=width)
