"""Files of JSON lines, one for each result, with which an interrupted run continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


def load(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the results in a file, which need not exist. Drops a line that a killed run has left unfinished."""
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def open_to_append(path: Path) -> TextIO:
    """Opens a file for further results, which begin on a line of their own. Makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_unfinished = path.exists() and path.read_text()[-1:] not in ("", "\n")
    file = path.open("a")
    if is_unfinished:
        file.write("\n")
    return file
