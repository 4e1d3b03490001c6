"""A case: a function, what it reads, and one change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dynaxla.guards.object_walker import walk
from dynaxla.guards.observation import observe
from dynaxla.training import compile_step

from .choices import Choices
from .places import Change, Made, Maker

X = torch.ones(())


@dataclass
class Case:
    """Attributes: function; arguments; change (what it is, and what does it); text (the function's source); compare_first (whether the
    watch is asked before the change, too)."""

    function: Callable[..., Any]
    arguments: list[Any]
    change: Change
    text: str
    compare_first: bool


def draw_case(choices: Choices) -> Case:
    maker = Maker(choices)
    made = [maker.make(choices.integer(0, 4)) for _ in range(choices.integer(1, 3))]
    expressions, changes, arguments = [], [], []
    for index, item in enumerate(made):
        kind = choices.among(("global", "global", "default", "argument"))
        expressions.append(item.read(f"value_{index}"))
        if kind == "global":
            maker.space[f"value_{index}"] = item.value
            changes += item.changes(_setter(maker.space, f"value_{index}"))
        else:
            arguments.append((index, kind, item))
    given = [f"value_{index}" for index, kind, _ in arguments if kind == "argument"]
    defaults = [(f"value_{index}", item.value) for index, kind, item in arguments if kind == "default"]
    heads = ", ".join([*given, *(f"{name}=None" for name, _ in defaults)])
    text = f"def function({heads}):\n    return [{', '.join(expressions)}]"
    exec(text, maker.space)
    function = maker.space["function"]
    function.__defaults__ = tuple(value for _, value in defaults) or None
    values = [item.value for _, kind, item in arguments if kind == "argument"]
    for _, kind, item in arguments:
        if kind == "argument":
            changes += _changes_of_an_argument(item, values)
        else:
            changes += _changes_of_a_default(item, function, defaults)
    changes.append(("nothing", lambda: None))
    return Case(function, values, choices.among(changes), text, bool(choices.integer(0, 1)))


def _setter(space: dict[str, Any], name: str) -> Callable[[Any], None]:
    return lambda new: space.__setitem__(name, new)


def _changes_of_an_argument(item: Made, values: list[Any]) -> list[Change]:
    index = next(number for number, value in enumerate(values) if value is item.value)
    return item.changes(lambda new: values.__setitem__(index, new))


def _changes_of_a_default(item: Made, function: Any, defaults: list[tuple[str, Any]]) -> list[Change]:
    index = next(number for number, (_, value) in enumerate(defaults) if value is item.value)

    def replace(new: Any) -> None:
        old = function.__defaults__
        function.__defaults__ = (*old[:index], new, *old[index + 1 :])

    return item.changes(replace)


@dataclass
class Verdict:
    """Attributes: problem ("" if there is none); differs (whether eager mode gave something else after the change); refused."""

    problem: str
    differs: bool
    refused: bool = False


def judge(case: Case, with_observation: bool) -> Verdict:
    """Whether the watch sees the change, if eager mode does."""
    before, touched = repr(case.function(*case.arguments)), None
    if with_observation:
        _, observation = observe(case.function, case.arguments, {})
        touched = observation.executed_code
        if not observation.is_pure:
            return Verdict("", False, True)
    around = walk({"step": case.function}, None, touched)
    given = walk({"args": case.arguments}, around, touched)
    if touched is not None and (around.incomparable or given.incomparable or given.unreached(touched)):
        return Verdict("", False, True)
    facts = around.facts(), given.facts()
    if case.compare_first and not (around.is_unchanged() and given.is_unchanged()):
        return Verdict("a change is seen where there is none", False)
    if _facts(case, touched) != facts:
        return Verdict("facts differ where nothing has changed", False)
    case.change[1]()
    differs = repr(case.function(*case.arguments)) != before
    if differs and around.is_unchanged() and given.is_unchanged():
        return Verdict("the watch is blind", True)
    if differs and _facts(case, touched) == facts:
        return Verdict("the facts are blind", True)
    return Verdict("", differs)


def _facts(case: Case, touched: Any) -> Any:
    around = walk({"step": case.function}, None, touched)
    return around.facts(), walk({"args": case.arguments}, around, touched).facts()


def judge_compiled(case: Case) -> Verdict:
    """Whether a compiled step gives what eager mode gives, before and after the change."""

    function = case.function  # not the case, from which all that makes cases can be reached

    def step(x: torch.Tensor, values: list[Any]) -> torch.Tensor:
        return x * torch.tensor([float(number) for number in function(*values)], dtype=torch.float64)

    compiled = compile_step(step)
    for number in range(6):  # three times each: in eager mode, and as a program
        when = "before" if number < 3 else "after"
        expected = step(X, case.arguments)
        actual = compiled(X, case.arguments)
        if not torch.equal(expected, actual) or not torch.equal(expected.signbit(), actual.signbit()):
            return Verdict(f"{actual.tolist()} instead of {expected.tolist()} {when} the change", True)
        if number == 2:
            case.change[1]()
    return Verdict("", True)
