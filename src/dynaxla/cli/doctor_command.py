"""`dynaxla doctor`: checks the environment."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Also call it broken if torch or JAX sees no NVIDIA GPU.")] = False,
) -> None:
    """Show versions, devices and fast paths, what is wrong with this environment, and how to fix it.

    The exit code is 1 if something is broken.
    """
    from .. import doctor as examinations

    console = Console()
    findings = examinations.examine(gpu)
    examinations.show(findings, console if console.is_terminal else Console(width=160))
    if any(finding.state is examinations.Status.BROKEN for finding in findings):
        raise typer.Exit(1)
