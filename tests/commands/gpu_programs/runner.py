"""The processes that compile, one model after another."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from commands.compiled_programs import processes
from commands.compiled_programs.results import Results
from support.paths import TESTS

from .errors import GpuProgramsError
from .guard import FOLDER
from .models import Cell

# If this variable is not set, JAX looks for a driver when it loads the plugin.
UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
COMMAND = (sys.executable, "-m", "commands.gpu_programs.child")


def plugin_folder() -> Path:
    """Returns the folder in which `make gpu-programs` installs XLA's CUDA plugin for this version of JAX."""
    return FOLDER / f"plugin-{version('jaxlib')}"


def environment(plugin: Path) -> dict[str, str]:
    """Returns the environment of a process that compiles. Raises: GpuProgramsError if the plugin is not installed."""
    if not (plugin / "jax_plugins").is_dir():
        raise GpuProgramsError(f"no CUDA plugin of JAX's in {plugin}: `make gpu-programs` installs it; or give --plugin FOLDER")
    paths = [str(plugin), str(TESTS), str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {UNCHECKED: "1", "JAX_PLATFORMS": "cpu", "DYNAXLA_CACHE": ""}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)}


def compile_all(wanted: Sequence[Cell], path: Path, plugin: Path, command: Sequence[str] = COMMAND) -> Results:
    """Returns the results of these cells; see `processes.compile_all`. Each process compiles the cells of one model."""
    return processes.compile_all(wanted, lambda cell: cell.model, path, command, environment(plugin))
