"""`python -m dynaxla.bench` is `dynaxla bench`."""

from __future__ import annotations

import typer

from ..cli.bench import bench

if __name__ == "__main__":
    typer.run(bench)
