"""Processes that compile, one model after the other."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from support.paths import TESTS

from . import results
from .errors import GpuProgramsError
from .guard import FOLDER
from .models import Cell
from .results import Results

# JAX looks for a driver when it loads the plugin, unless it is told not to.
UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
COMMAND = (sys.executable, "-m", "commands.gpu_programs.child")


def plugin_folder() -> Path:
    """Where `make gpu-programs` installs XLA's CUDA plugin for this version of JAX."""
    return FOLDER / f"plugin-{version('jaxlib')}"


def environment(plugin: Path) -> dict[str, str]:
    """Of a process that compiles. Raises: GpuProgramsError if the plugin is not there."""
    if not (plugin / "jax_plugins").is_dir():
        raise GpuProgramsError(f"no CUDA plugin of JAX's in {plugin}: `make gpu-programs` installs it; or give --plugin FOLDER")
    paths = [str(plugin), str(TESTS), str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    told = {UNCHECKED: "1", "JAX_PLATFORMS": "cpu", "DYNAXLA_CACHE": ""}
    return {**os.environ, **told, "PYTHONPATH": os.pathsep.join(paths)}


def compile_all(wanted: Sequence[Cell], path: Path, plugin: Path, command: Sequence[str] = COMMAND) -> Results:
    """The results of these cells, known ones included; each is written to `path` as it comes.

    The cell at which a process dies has failed, and nothing of it is written: another run tries it again.
    """
    settings = environment(plugin)
    _end_line(path)
    known, died = results.load(path), {}
    for model, group in itertools.groupby((cell for cell in wanted if str(cell) not in known), lambda cell: cell.model):
        names = [str(cell) for cell in group]
        while names:
            started = time.monotonic()
            status = subprocess.run([*command, str(path), *names], env=settings).returncode
            known = results.load(path)
            left = [name for name in names if name not in known]
            print(f"{model}: {len(names) - len(left)} of {len(names)} in {time.monotonic() - started:.0f} seconds", flush=True)
            if left:
                died[left[0]] = {"error": f"its process ended with {status}", "seconds": 0.0}
            names = left[1:]
    known |= died
    return {str(cell): known[str(cell)] for cell in wanted}


def _end_line(path: Path) -> None:
    """A killed run may have left half a line."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")
