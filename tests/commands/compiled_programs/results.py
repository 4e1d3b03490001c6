"""The results of runs: a file of JSON lines, one for each cell, and a hash of the code that computed them."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import dynaxla

# Results by cell: "programs" with figures by kind, or "error" with a traceback; and "seconds".
Results = dict[str, dict[str, Any]]


@functools.cache
def code(*sources: Path) -> str:
    """Returns a hash of the code that determines the figures: dynaxla's sources, the files in `sources`, and the versions of torch and jax.

    Args:
        sources: Folders and files.
    """
    digest = hashlib.blake2b(digest_size=8)
    for source in (Path(dynaxla.__file__).parent, Path(__file__).parent, *sources):
        for path in [source] if source.is_file() else sorted(source.rglob("*")):
            if path.suffix in (".py", ".cpp"):
                digest.update(path.read_bytes())
    for name in ("torch", "jax", "jaxlib"):
        digest.update(importlib.metadata.version(name).encode())
    return digest.hexdigest()


def load(path: Path) -> Results:
    """Returns the last line of each cell. An unfinished line of a killed run is dropped."""
    results_by_cell: Results = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        results_by_cell[line.pop("cell")] = line
    return results_by_cell


def add(path: Path, line: dict[str, Any]) -> None:
    """Appends the line of a cell."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
