"""Lowerings do not ask for which platform a program is.

Forms and registered lowerings declare where they exist, what only XLA:CPU needs lies in lowering/cpu/, and what eager mode does on one
platform alone has names in lowering/eager.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from platform import machine
from typing import Any

import jax
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dynaxla
from dynaxla.lowering import Interpreter
from dynaxla.lowering.forms import expected
from dynaxla.lowering.function import Function

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


aten = torch.ops.aten
X86 = machine().lower() in ("x86_64", "amd64")


def traced(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], platform: str) -> str:
    """The program for a platform, which need not be here."""
    module = make_fx(lambda *tensors: (function(*tensors),), tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    program = Function(Interpreter(module, platform), choose=expected)
    with jax.enable_x64(True):
        return str(jax.make_jaxpr(program)([jax.ShapeDtypeStruct(spec.shape, spec.jax_dtype) for spec in program.specs.values()]))


@pytest.mark.parametrize(
    ("function", "inputs", "operation", "platforms"),
    [
        pytest.param(torch.remainder, (torch.arange(4), torch.arange(4)), "reduce_and", ["cpu"], id="zero divisors are refused"),
        pytest.param(lambda x: x / 7, (torch.ones(4),), "optimization_barrier", ["cpu"], id="division is exact"),
        pytest.param(
            lambda x, y, z: aten._addmm_activation(x, y, z, use_gelu=True),
            (torch.ones(4), torch.ones(3, 2), torch.ones(2, 4)),
            "tanh",
            ["cuda"],
            id="a fused GELU is the one by tanh",
        ),
        pytest.param(lambda x: x.to(torch.int32), (torch.ones(4),), "select_n", ["cpu"] if X86 else [], id="integers wrap as on x86"),
        pytest.param(
            lambda x: aten.max_pool2d_with_indices(x, [2, 2])[0], (torch.ones(1, 2, 8, 8),), "reduce_window", ["cuda"], id="windows"
        ),
    ],
)
def test_programs_differ(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], operation: str, platforms: list[str]) -> None:
    assert [name for name in ("cpu", "cuda") if operation in traced(function, inputs, name)] == platforms
