"""The command `dynaxla`. Each command imports torch and JAX only when it runs: help and `--version` need neither."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .bench import bench, table_command
from .doctor_command import doctor
from .explain_command import ScriptCommand, explain
from .export_command import export
from .ops import ops
from .terminal import Command, CommandGroup
from .tune import tune

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, add_completion=False)
app.command("doctor", cls=Command)(doctor)
app.command("explain", cls=ScriptCommand)(explain)
app.command("export", cls=Command)(export)
app.command("ops", cls=Command)(ops)
app.command("tune", cls=Command)(tune)
app.command("bench", cls=Command)(bench)
# `dynaxla NAME` runs `python -m benchmarks PART`.
for _name, _part in {"bench-cpu": "cpu", "bench-gpu": "gpu", "bench-device": "device", "overhead": "overhead"}.items():
    app.command(
        _name,
        cls=Command,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        rich_help_panel="Benchmarks (only in a checkout of dynaxla)",
    )(table_command(_name, _part))


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
    # `app()` would also install Typer's sys.excepthook. Exceptions of a script run by `dynaxla explain` must be shown as Python shows them.
    typer.main.get_command(app)()
