"""The processes that compile, one after another. Each process compiles the cells of one group."""

from __future__ import annotations

import itertools
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support import json_lines

from . import results
from .results import Results


def compile_all(
    wanted: Sequence[Any],
    group_of: Callable[[Any], str],
    path: Path,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path | None = None,
) -> Results:
    """Returns the results of these cells, including results of earlier runs. Each result is written to `path` at once.

    If a process dies, its current cell counts as failed. This failure is not written, so the next run tries the cell again.

    Args:
        wanted: The cells. The name of a cell is its `str`.
        group_of: Returns the name of a cell's group. The cells of a group are neighbors in `wanted`, and share a process.
        path: The file of results.
        command: The command of a process, to which the path and the cells' names are added.
        environment: The environment variables of the processes.
        log: The file for the standard error of a process; if the process dies, the cell's error is taken from it. None for no file.
    """
    json_lines.open_to_append(path).close()  # ends a line that a killed run has left unfinished
    known, died = results.load(path), {}
    for name, cells in itertools.groupby((cell for cell in wanted if str(cell) not in known), group_of):
        names = [str(cell) for cell in cells]
        while names:
            started = time.monotonic()
            status = call([*command, str(path), *names], environment, log)
            known = results.load(path)
            left = [name for name in names if name not in known]
            print(f"{name}: {len(names) - len(left)} of {len(names)} in {time.monotonic() - started:.0f} seconds", flush=True)
            if left:
                reason = f": {last_words(log.read_text())}" if log is not None else ""
                died[left[0]] = {"error": f"its process ended with {status}{reason}", "seconds": 0.0}
            names = left[1:]
    known |= died
    return {str(cell): known[str(cell)] for cell in wanted}


def call(command: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> int:
    """Runs a command, and returns its exit status. Its standard error replaces the contents of the file `log`, if one is given."""
    if log is None:
        return subprocess.run(command, env=environment).returncode
    with log.open("w") as errors:
        return subprocess.run(command, env=environment, stderr=errors).returncode


# The last messages of a process that C++ code ends: a fatal log line, matched without date and thread, or the report of a signal.
_FATAL = re.compile(r"^(?:F\d{4} \S+ +\d+ |\*\*\* (?=SIG))(.*?) *$", re.MULTILINE)


def last_words(log: str) -> str:
    """Returns the message with which C++ code ended a process; else the last line, with the indented lines of a Python error after it."""
    fatal = _FATAL.findall(log)
    return (fatal[0] if fatal else " ".join(re.split(r"\n(?=\S)", log.strip())[-1].split()))[:300]
