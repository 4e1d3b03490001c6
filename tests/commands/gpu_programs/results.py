"""What runs have found: a file of lines of JSON, one for each cell, and which code they are of."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import dynaxla

# The kinds of programs, in the order of the report.
KINDS = ("inference", "frozen", "forward", "backward")

# By cell: "programs" with figures by kind, or "error" with a traceback; and "seconds".
Results = dict[str, dict[str, Any]]


@functools.cache
def code() -> str:
    """A hash of all that decides the figures: dynaxla's sources and these, and the versions of torch and jax."""
    folders = (Path(dynaxla.__file__).parent, Path(__file__).parent)
    digest = hashlib.blake2b(digest_size=8)
    for path in (path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".cpp")):
        digest.update(path.read_bytes())
    for name in ("torch", "jax", "jaxlib"):
        digest.update(importlib.metadata.version(name).encode())
    return digest.hexdigest()


def load(path: Path) -> Results:
    """The last line of each cell. A line that a killed run left unfinished is dropped."""
    found: Results = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        found[line.pop("cell")] = line
    return found
