"""What has to be there, looked at without torch and JAX; and the package's metadata where it is not installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).parents[2]
# Modules by what they are for; each name is also what pip installs. pytest-timeout is used where it is there.
NEEDED = {
    "dynaxla": ("torch", "jax", "numpy", "rich", "typer"),
    "its tests": ("pytest", "hypothesis"),
    "the table's models": ("torchvision", "transformers"),
}


def missing() -> list[str]:
    """A sentence for each module that is not there."""
    return [
        f"{module} is missing, which {purpose} need{'s' if purpose == 'dynaxla' else ''}: pip install {module}"
        for purpose, modules in NEEDED.items()
        for module in modules
        if importlib.util.find_spec(module) is None
    ]


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def variables(metadata: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of what is run: the source on the import path, and no cache of an earlier run.

    metadata: an empty directory. torch.compile finds a backend by its package's entry points, so where dynaxla is not installed, what an
    installation would write of them is written there.
    """
    path = [PROJECT / "src", PROJECT / "tests"]
    try:
        importlib.metadata.version("dynaxla")
    except importlib.metadata.PackageNotFoundError:
        _write_metadata(metadata)
        path.append(metadata)
    before = environment.get("PYTHONPATH")
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *([before] if before else [])]),
        "PYTHONUNBUFFERED": "1",
        "DYNAXLA_CACHE": "",
    }


def _write_metadata(directory: Path) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    folder = directory / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *[f"{name} = {target}" for name, target in points.items()]]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
