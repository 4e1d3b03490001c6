"""The command `dynaxla`."""

from __future__ import annotations

from typing import Annotated

import typer

from . import __version__
from .bench.__main__ import bench
from .bench.cpu import bench_cpu
from .bench.overhead import overhead
from .doctor import doctor
from .ops import ops
from .tune import tune

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.command("bench")(bench)
app.command("bench-cpu")(bench_cpu)
app.command("overhead")(overhead)
app.command("doctor")(doctor)
app.command("ops")(ops)
app.command("tune")(tune)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dynaxla {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """XLA as a compiler for PyTorch."""


def main() -> None:
    app()
