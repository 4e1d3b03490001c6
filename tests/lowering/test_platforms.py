"""Lowerings do not compare the platform of a program.

Implementations and registered lowerings declare their platforms. Code for XLA:CPU alone is in lowering/cpu/. Behavior of eager mode on one
platform has a name in lowering/eager.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dynaxla

LOWERING = Path(dynaxla.__file__).parent / "lowering"
NAMES = frozenset({"cpu", "cuda", "rocm", "tpu"})


def comparisons(source: str, names: frozenset[str]) -> list[int]:
    """The lines of comparisons with one of these names, or with a collection that contains one."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Compare, ast.MatchValue))
        if any(isinstance(part, ast.Constant) and part.value in names for part in ast.walk(node))
    ]


def paths() -> list[Path]:
    found = [path for path in sorted(LOWERING.rglob("*.py")) if LOWERING / "cpu" not in path.parents and path != LOWERING / "eager.py"]
    assert len(found) > 50
    return found


@pytest.mark.parametrize("path", paths(), ids=lambda path: str(path.relative_to(LOWERING)))
def test_module_compares_no_platform(path: Path) -> None:
    """Modules outside of `ops` may compare with "cuda": one setting exists for CUDA alone."""
    names = NAMES if path.parent == LOWERING / "ops" else NAMES - {"cuda"}
    assert not comparisons(path.read_text(), names)


@pytest.mark.parametrize(
    "source",
    [
        'def f(ctx):\n    return 1 if ctx.platform == "cpu" else 2',
        'def f(problem):\n    return problem.size > 3 and "cpu" != problem.platform',
        'def f(platform):\n    if platform in ("tpu", "cpu"):\n        return 1',
        'def f(platform):\n    match platform:\n        case "cpu":\n            return 1',
    ],
)
def test_comparison_is_found(source: str) -> None:
    assert comparisons(source, frozenset({"cpu"}))


@pytest.mark.parametrize("declared", ['@lowers(op, platforms=["cpu"])\ndef f(): ...', 'x = torch.ones(3, device="cpu")'])
def test_declaration_is_no_comparison(declared: str) -> None:
    assert not comparisons(declared, NAMES)
