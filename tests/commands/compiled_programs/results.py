"""The results of runs: a file of JSON lines, one for each cell, and a hash of the code that computed them."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import dynaxla
from support import json_lines

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
    """Returns the last line of each cell."""
    return {line.pop("cell"): line for line in json_lines.load(path)}


def add(path: Path, line: dict[str, Any]) -> None:
    """Appends the line of a cell."""
    with json_lines.open_to_append(path) as file:
        file.write(json.dumps(line) + "\n")
