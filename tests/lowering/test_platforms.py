"""Lowerings do not ask for which platform a program is.

Implementations and registered lowerings declare where they exist, what only XLA:CPU needs lies in lowering/cpu/, and what eager mode does
on one platform alone has names in lowering/eager.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dynaxla

LOWERING = Path(dynaxla.__file__).parent / "lowering"
NAMES = frozenset({"cpu", "cuda", "rocm", "tpu"})


def comparisons(source: str, names: frozenset[str]) -> list[int]:
    """The lines on which something is compared with one of these names, or a collection that has one."""
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
def test_nobody_else_compares_a_platform(path: Path) -> None:
    """Outside lowerings one setting is for CUDA alone."""
    names = NAMES if path.parent == LOWERING / "ops" else NAMES - {"cuda"}
    assert not comparisons(path.read_text(), names)


@pytest.mark.parametrize(
    "planted",
    [
        'def f(ctx):\n    return 1 if ctx.platform == "cpu" else 2',
        'def f(problem):\n    return problem.size > 3 and "cpu" != problem.platform',
        'def f(platform):\n    if platform in ("tpu", "cpu"):\n        return 1',
        'def f(platform):\n    match platform:\n        case "cpu":\n            return 1',
    ],
)
def test_a_comparison_is_seen(planted: str) -> None:
    assert comparisons(planted, frozenset({"cpu"}))


@pytest.mark.parametrize("declared", ['@lowers(op, platforms=["cpu"])\ndef f(): ...', 'x = torch.ones(3, device="cpu")'])
def test_what_declares_is_no_comparison(declared: str) -> None:
    assert not comparisons(declared, NAMES)
