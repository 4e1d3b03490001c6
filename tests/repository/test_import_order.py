"""Checks of the order of the sources: layers and their imports, names of modules and classes, lengths of functions."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import dynaxla

ROOT = Path(dynaxla.__file__).parent
# The layers, lowest first. A module may import its own and lower layers.
LAYERS = [
    "user_frames", "cache_folder", "errors", "torch_ops", "forks", "artifact", "observe", "runtime", "config", "lowering", "capture",
    "passes", "buffers", "guards", "tuning", "engine", "autoselect", "partitioning", "aot", "backend", "training", "device", "sharding",
    "interop", "explained", "doctor", "bench", "cli",
]  # fmt: skip


def imports(path: Path) -> set[str]:
    """Returns the layers that a module imports, in functions too."""
    package = path.relative_to(ROOT.parent).parts[:-1]
    layers: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            names = [*base, *(node.module or "").split(".")] if node.module else [*base, node.names[0].name]
            names_of = [names] if node.module else [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names_of = [(node.module or "").split(".")]
        elif isinstance(node, ast.Import):
            names_of = [alias.name.split(".") for alias in node.names]
        else:
            continue
        layers.update(names[1] for names in names_of if names[0] == "dynaxla" and len(names) > 1)
    return {name for name in layers if not name.startswith("__")}


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_imports_only_lower_layers(layer: str) -> None:
    paths = [ROOT / f"{layer}.py"] if (ROOT / f"{layer}.py").exists() else sorted((ROOT / layer).rglob("*.py"))
    paths = [path for path in paths if path.stem != "__main__"]  # such a module is a command
    assert paths
    for path in paths:
        higher = {name for name in imports(path) if LAYERS.index(name) > LAYERS.index(layer)}
        assert not higher, f"{path.relative_to(ROOT)} imports {sorted(higher)}"


def test_all_modules_have_a_layer() -> None:
    modules = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__"} == set(LAYERS)


# Several packages have a module `protocol` for the interface of their modules.
SHARED_NAMES = {"__init__", "protocol"}


def test_no_two_modules_share_a_name() -> None:
    names = Counter(path.stem for path in ROOT.rglob("*.py"))
    assert not {name for name, count in names.items() if count > 1} - SHARED_NAMES


def definitions(*kinds: type[ast.AST]) -> list[tuple[Path, ast.AST]]:
    """Returns the definitions of these kinds in the library, with their files."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    return [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, kinds)]


def test_no_two_classes_share_a_name() -> None:
    names = Counter(node.name for _, node in definitions(ast.ClassDef))
    assert names
    assert not {name for name, count in names.items() if count > 1}


def test_no_function_has_more_than_60_lines() -> None:
    functions = definitions(ast.FunctionDef, ast.AsyncFunctionDef)
    assert functions
    assert not [f"{path.relative_to(ROOT)}: {node.name}" for path, node in functions if node.end_lineno - node.lineno + 1 > 60]
