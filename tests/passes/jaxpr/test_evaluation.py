"""Tests of passes/jaxpr/evaluation.py: an evaluation with wrapped values gives the same results, and inlines calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from dynaxla.lowering.cpu.materialize import in_memory
from dynaxla.passes.jaxpr.evaluation import Evaluation, bind


class Boxed:
    def __init__(self, array: Any) -> None:
        self.array = array


class Boxes(Evaluation[Boxed]):
    """Evaluates a program with each array in a box.

    Attributes:
        equations: the name and the numbers of uses of the results of each evaluated equation.
    """

    def __init__(self, platform: str = "cpu") -> None:
        super().__init__(platform)
        self.equations: list[tuple[str, list[int]]] = []

    def wrap(self, array: Any) -> Boxed:
        return Boxed(array)

    def unwrap(self, value: Boxed) -> Any:
        return value.array

    def in_memory(self, value: Boxed) -> Boxed:
        self.equations.append(("in memory", []))
        return value

    def apply(self, equation: Any, operands: list[Boxed]) -> Sequence[Boxed]:
        self.equations.append((equation.primitive.name, list(self.uses)))
        return [Boxed(array) for array in bind(equation, [self.unwrap(operand) for operand in operands])]


FUNCTIONS: dict[str, Callable[[Array], Any]] = {
    "constants": lambda x: x * 2 + jnp.asarray([1.0, 2.0, 3.0]),
    "structures": lambda x: {"a": x, "b": (x + 1, 3.0)},
    "inner functions": lambda x: jax.jit(lambda y: jax.nn.relu(y) + 1)(x) + jnp.where(x > 0, x, 0.0),
    "branches": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "several results": lambda x: lax.top_k(x, 2),
    "loops": lambda x: lax.fori_loop(0, 3, lambda _, value: value * 2, x),
    "in memory": lambda x: in_memory(x * 2) + 1,
    "platforms": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_results(name: str) -> None:
    function, x = FUNCTIONS[name], jnp.asarray([0.5, -1.0, 2.0])
    expected, found = jax.jit(function)(x), jax.jit(Boxes().transform(function))(x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def evaluated(function: Callable[[Array], Any], platform: str = "cpu") -> list[tuple[str, list[int]]]:
    boxes = Boxes(platform)
    jax.jit(boxes.transform(function)).trace(jnp.ones(3))
    return boxes.equations


def test_calls_are_inlined() -> None:
    assert evaluated(FUNCTIONS["in memory"]) == [("mul", [1]), ("in memory", []), ("add", [1])]
    assert [name for name, _ in evaluated(lambda x: jax.jit(lambda y: jax.nn.relu(y))(x))] == ["max"]


def test_only_branch_of_platform_is_evaluated() -> None:
    assert [name for name, _ in evaluated(FUNCTIONS["platforms"], "cpu")] == ["sin"]
    assert [name for name, _ in evaluated(FUNCTIONS["platforms"], "cuda")] == ["cos"]
    assert "cond" in [name for name, _ in evaluated(FUNCTIONS["branches"])]


def test_uses_are_counted() -> None:
    def function(x: Array) -> Any:
        y = x * 2
        return y + y, y

    assert evaluated(function) == [("mul", [3]), ("add", [1])]
