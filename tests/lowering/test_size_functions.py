"""Expressions of sizes as functions: each has the value that sympy computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dynaxla.lowering import SymbolValues
from dynaxla.lowering.size_functions import size_function

s, t = sympy.symbols("s t", integer=True, positive=True)


def symbolic_expression(function: Callable[[torch.SymInt, torch.SymInt], Any]) -> tuple[Any, list[Any]]:
    """Returns torch's expression of a computation with two sizes, and the symbols of these sizes."""
    environment = ShapeEnv()
    tensor = torch._subclasses.FakeTensorMode(shape_env=environment).from_tensor(torch.empty(7, 5))
    return function(*tensor.shape).node.expr, [size.node.expr for size in tensor.shape]


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: a * b - 3,
        lambda a, b: (a + 1) // 2 * b + a**2,
        lambda a, b: (a * b) % 4 + torch.sym_max(a, b - 7),
        lambda a, b: torch.sym_min(a, 6) - (a // b) // 3,
        lambda a, b: torch.sym_ite(a < 2 * b, a, b),
        lambda a, b: a // -2 + b,
    ],
    ids=range(6),
)
def test_expressions_that_torch_makes(function: Callable[..., Any]) -> None:
    expression, symbols = symbolic_expression(function)
    for sizes in ((7, 5), (2, 9), (64, 3)):
        values = dict(zip(symbols, sizes, strict=True))
        found = size_function(expression)(values)
        assert (found, type(found)) == (int(expression.xreplace(values)), int)
        assert SymbolValues(values).number(expression) == found


@pytest.mark.parametrize("expression", [s * (s - 1) / 2, sympy.ceiling(s / 3) + t, sympy.Rational(2, 3) * s * t * 3, sympy.Integer(-4)])
def test_fractions_are_exact(expression: Any) -> None:
    for sizes in ((3, 7), (10**9 + 3, 10**9 + 7)):
        assert size_function(expression)({s: sizes[0], t: sizes[1]}) == int(expression.subs({s: sizes[0], t: sizes[1]}))


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (sympy.Eq(s % 4, 0), lambda s, t: s % 4 == 0),
        (sympy.Ne(s, t), lambda s, t: s != t),
        (sympy.And(s < t, sympy.Or(t >= 5, sympy.Eq(s, 1))), lambda s, t: s < t and (t >= 5 or s == 1)),
        (sympy.Not(sympy.Eq(s, t)), lambda s, t: s != t),
        (s < sympy.oo, lambda s, t: True),
        (sympy.true, lambda s, t: True),
        (s > sympy.Symbol("unknown", integer=True), lambda s, t: False),
    ],
    ids=range(7),
)
def test_conditions(condition: Any, expected: Callable[[int, int], bool]) -> None:
    for sizes in ((1, 1), (4, 6), (8, 3)):
        assert size_function(condition)({s: sizes[0], t: sizes[1]}) is expected(*sizes)


def test_value_of_a_subexpression_replaces_those_of_its_symbols() -> None:
    assert size_function(2 * s + t)({2 * s: 10, t: 3}) == 13
