"""`dynaxla ops`: shows how each ATen op is computed."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..bench import choices as known
from ..bench.benchmark_error import BenchmarkError
from ..bench.requests import check_names
from .bench import bad_requests_shown
from .op_names import check_patterns
from .terminal import Json, console_for


def ops(
    patterns: Annotated[list[str] | None, typer.Argument(help="Show the ops whose names match, e.g. 'linalg*' or cumsum.")] = None,
    platform: Annotated[str, typer.Option(help=f"JAX's name of the platform: {', '.join(known.PLATFORMS)}.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Show how each op is computed: by a lowering, a decomposition, or torch's own kernel. `dynaxla explain` shows the ops of a script."""
    with bad_requests_shown():
        check_names("platform", [platform], known.PLATFORMS)  # before torch and JAX are imported
        check_patterns(patterns or ())
    from . import op_table

    every = op_table.ways(platform)
    found = [way for way in every if not patterns or op_table.matches(str(way.op), patterns)]
    with bad_requests_shown():
        if not found:
            raise BenchmarkError(f"no op matches {' or '.join(patterns or ())}")
    console = console_for(160)
    if as_json:
        typer.echo(json.dumps([{"op": str(way.op), "way": way.kind, "where": way.where} for way in found], indent=2))
    elif patterns:
        console.print(op_table.table_of_ops(found))
    else:
        console.print(op_table.totals_table(found))
        console.print("dynaxla ops PATTERN lists ops by name; dynaxla explain SCRIPT shows which way a script's own ops went")
