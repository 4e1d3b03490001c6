"""`dynaxla doctor`: checks the environment."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .terminal import Json, console_for


def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Also report as broken that torch or JAX sees no NVIDIA GPU.")] = False,
    as_json: Json = False,
) -> None:
    """Show versions, devices and fast paths, what is wrong with this environment, and how to fix it.

    The exit code is 1 if something is broken.
    """
    from .. import doctor as checks

    findings = checks.examine(gpu)
    if as_json:
        typer.echo(json.dumps([checks.as_dict(finding) for finding in findings], indent=2))
    else:
        checks.show(findings, console_for(160))
    if any(finding.status is checks.Status.BROKEN for finding in findings):
        raise typer.Exit(1)
