"""The packages that the report needs, found without importing torch or JAX, and the environment of its processes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from support.paths import ROOT

# Modules by purpose. Each name is also the name of the package for pip. pytest-timeout is used if it is installed.
NEEDED = {
    "dynaxla": ("torch", "jax", "numpy", "rich", "typer"),
    "its tests": ("pytest", "hypothesis"),
    "the table's models": ("torchvision", "transformers"),
}


def missing() -> list[str]:
    """Returns a sentence for each module that is missing."""
    return [
        f"{module} is missing, which {purpose} need{'s' if purpose == 'dynaxla' else ''}: pip install {module}"
        for purpose, modules in NEEDED.items()
        for module in modules
        if importlib.util.find_spec(module) is None
    ]


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def variables(scratch: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the processes: the sources on the import path, and shared caches that are empty at first.

    torch.compile finds a backend by its package's entry points. If dynaxla is not installed, the metadata of an installation is written to
    scratch/metadata.

    Args:
        scratch: An empty directory.
        environment: The environment of this process.
    """
    path = [ROOT / "src", ROOT / "tests"]
    try:
        importlib.metadata.version("dynaxla")
    except importlib.metadata.PackageNotFoundError:
        _write_metadata(scratch / "metadata")
        path.append(scratch / "metadata")
    before = environment.get("PYTHONPATH")
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *([before] if before else [])]),
        "PYTHONUNBUFFERED": "1",
        "DYNAXLA_CACHE": "",
        "TF_CPP_MIN_LOG_LEVEL": environment.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        **caches(scratch, environment),
    }


def caches(scratch: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for caches that the processes share: XLA's autotuning results, and JAX's compiled programs."""
    tuned, compiled = scratch / "autotuned", scratch / "compiled"
    tuned.mkdir()
    compiled.mkdir()
    return {
        "XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} --xla_gpu_per_fusion_autotune_cache_dir={tuned}".strip(),
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }


def _write_metadata(directory: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = (ROOT / "src" / "dynaxla" / "__init__.py").read_text()
    version = next(line.split('"')[1] for line in source.splitlines() if line.startswith("__version__ ="))
    folder = directory / f"{project['name']}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *[f"{name} = {target}" for name, target in points.items()]]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
