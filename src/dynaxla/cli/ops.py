"""`dynaxla ops`: shows how each ATen op is computed."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..bench import choices
from ..bench.argument_checks import check_names
from ..bench.benchmark_error import BenchmarkError
from .bench import exit_on_errors
from .op_names import check_patterns
from .terminal import Json, console_for


def ops(
    patterns: Annotated[list[str] | None, typer.Argument(help="Show the ops whose names match, e.g. 'linalg*' or cumsum.")] = None,
    platform: Annotated[str, typer.Option(help=f"JAX's name of the platform: {', '.join(choices.PLATFORMS)}.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Show how each op is computed: by a lowering, a decomposition, or torch's own kernel. `dynaxla explain` shows the ops of a script."""
    with exit_on_errors():
        check_names("platform", [platform], choices.PLATFORMS)  # before torch and JAX are imported
        check_patterns(patterns or ())
    from . import op_table

    all_ops = op_table.op_support(platform)
    listed = [item for item in all_ops if not patterns or op_table.matches(str(item.op), patterns)]
    with exit_on_errors():
        if not listed:
            raise BenchmarkError(f"no op matches {' or '.join(patterns or ())}")
    console = console_for(160)
    if as_json:
        typer.echo(json.dumps([{"op": str(item.op), "way": item.kind, "where": item.where} for item in listed], indent=2))
    elif patterns:
        console.print(op_table.ops_table(listed))
    else:
        console.print(op_table.totals_table(listed))
        console.print("dynaxla ops PATTERN lists ops by name; dynaxla explain SCRIPT shows how the ops of a script are computed")
