"""The table of steps that can be drawn."""

from __future__ import annotations

from collections.abc import Callable

from .builder import Builder, Condition
from .program import Step

Draw = Callable[[Builder], Step]

FAMILIES: dict[str, dict[str, Draw]] = {}


def draws(family: str) -> Callable[[Draw], Draw]:
    """Registers a function that draws one step."""

    def decorate(function: Draw) -> Draw:
        table = FAMILIES.setdefault(family, {})
        assert function.__name__ not in table, function.__name__
        table[function.__name__] = function
        return function

    return decorate


def unary(family: str, name: str, code: str, condition: Condition, requires: str = "", results: int = 1) -> None:
    """Registers a step with one operand."""

    def draw(builder: Builder) -> Step:
        return Step(name, code, (builder.value(condition),), results, requires=requires)

    draw.__name__ = name
    draws(family)(draw)
