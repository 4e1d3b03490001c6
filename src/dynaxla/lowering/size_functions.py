"""Compiles expressions of sizes to Python functions. A call takes about 1 us; sympy's substitution of values takes about 100 us."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from sympy.logic.boolalg import And, BooleanAtom, BooleanFunction, Not, Or

# Python's operators and functions for torch's and sympy's operations on integers, by class name.
_OPERATORS = {"FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%", "PowByNatural": "**"}
_FUNCTIONS = {"Min": "min", "Max": "max"}


class _NotArithmetic(Exception):
    """The expression has a part that is not an integer, a symbol or an operation on integers."""


@functools.lru_cache(maxsize=1 << 14)
def size_function(expression: Any) -> Callable[[Mapping[Any, int]], int | bool]:
    """Returns a function from the values of symbols to the value of a sympy expression.

    The value is an int, or a bool for a condition. A condition that the symbols' values do not decide is False. If a symbol is not in the
    mapping, the mapping may instead contain an expression of the symbol, such as 2 * s0.
    """
    names: dict[Any, str] = {}
    try:
        source = _source(expression, names)
    except _NotArithmetic:
        return functools.partial(_substituted, expression)
    compute = eval(f"lambda values: {source}", {"min": min, "max": max, **{name: symbol for symbol, name in names.items()}})

    def evaluate(values: Mapping[Any, int]) -> int | bool:
        try:
            result: int | bool = compute(values)
        except KeyError:  # the mapping has an expression instead of a symbol
            return _substituted(expression, values)
        return result

    return evaluate


def _substituted(expression: Any, values: Mapping[Any, int]) -> int | bool:
    """Returns the value of an expression, by sympy's substitution."""
    result = expression.xreplace(values)
    is_condition = expression.is_Relational or isinstance(expression, (BooleanFunction, BooleanAtom))
    return bool(result == True) if is_condition else int(result)  # noqa: E712 (sympy's truth is no bool)


def _source(expression: Any, names: dict[Any, str]) -> str:
    """Returns Python source that computes an expression from `values`, the values by symbol.

    The source refers to each symbol by a name, which the function adds to `names`: 2 * s gives "((2) * values[s0])" with s0 for s.

    Raises: _NotArithmetic.
    """
    if expression.is_Symbol:
        return f"values[{names.setdefault(expression, f's{len(names)}')}]"
    if expression.is_Integer:
        return f"({int(expression)})"
    if isinstance(expression, BooleanAtom):
        return str(bool(expression))
    kind = type(expression).__name__
    parts = [_source(part, names) for part in expression.args]
    if expression.is_Relational:
        return f"({parts[0]} {expression.rel_op} {parts[1]})"
    if kind in _FUNCTIONS:
        return f"{_FUNCTIONS[kind]}({', '.join(parts)})"
    operator = _OPERATORS.get(kind)
    if expression.is_Add or expression.is_Mul:
        operator = "+" if expression.is_Add else "*"
    elif expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
        operator = "**"
    elif isinstance(expression, (And, Or)):
        operator = "and" if isinstance(expression, And) else "or"
    elif isinstance(expression, Not):
        return f"(not {parts[0]})"
    if operator is None or len(parts) < 2:
        raise _NotArithmetic
    return f"({f' {operator} '.join(parts)})"
