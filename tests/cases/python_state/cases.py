"""A case: a function, the state that it reads, and one change of this state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dynaxla.guards.object_walker import walk
from dynaxla.guards.observation import observe
from dynaxla.training import compile_step

from .choices import Choices
from .places import Change, Maker, Readable

X = torch.ones(())


@dataclass
class Case:
    """A function and a change.

    Attributes:
        function: the function.
        arguments: its arguments.
        change: a name of the change, and a function that makes it.
        text: the function's source.
        compare_first: True if the guards are also checked before the change.
    """

    function: Callable[..., Any]
    arguments: list[Any]
    change: Change
    text: str
    compare_first: bool


def draw_case(choices: Choices) -> Case:
    maker = Maker(choices)
    items = [maker.make(choices.integer(0, 4)) for _ in range(choices.integer(1, 3))]
    expressions, changes, arguments = [], [], []
    for index, item in enumerate(items):
        kind = choices.among(("global", "global", "default", "argument"))
        expressions.append(item.read(f"value_{index}"))
        if kind == "global":
            maker.space[f"value_{index}"] = item.value
            changes += item.changes(_setter(maker.space, f"value_{index}"))
        else:
            arguments.append((index, kind, item))
    parameters = [f"value_{index}" for index, kind, _ in arguments if kind == "argument"]
    defaults = [(f"value_{index}", item.value) for index, kind, item in arguments if kind == "default"]
    signature = ", ".join([*parameters, *(f"{name}=None" for name, _ in defaults)])
    text = f"def function({signature}):\n    return [{', '.join(expressions)}]"
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


def _changes_of_an_argument(item: Readable, values: list[Any]) -> list[Change]:
    index = next(number for number, value in enumerate(values) if value is item.value)
    return item.changes(lambda new: values.__setitem__(index, new))


def _changes_of_a_default(item: Readable, function: Any, defaults: list[tuple[str, Any]]) -> list[Change]:
    index = next(number for number, (_, value) in enumerate(defaults) if value is item.value)

    def replace(new: Any) -> None:
        old = function.__defaults__
        function.__defaults__ = (*old[:index], new, *old[index + 1 :])

    return item.changes(replace)


@dataclass
class Verdict:
    """The outcome of a case.

    Attributes:
        problem: "" if there is none.
        differs: True if the result of eager mode differs after the change.
        refused: True if the guards do not support the function.
    """

    problem: str
    differs: bool
    refused: bool = False


def judge(case: Case, with_observation: bool) -> Verdict:
    """Checks that the guards detect the change if it affects eager mode."""
    before, executed_code = repr(case.function(*case.arguments)), None
    if with_observation:
        _, observation = observe(case.function, case.arguments, {})
        executed_code = observation.executed_code
        if not observation.is_pure:
            return Verdict("", False, True)
    function_graph = walk({"step": case.function}, None, executed_code)
    argument_graph = walk({"args": case.arguments}, function_graph, executed_code)
    if executed_code is not None and (
        function_graph.incomparable or argument_graph.incomparable or argument_graph.unreached(executed_code)
    ):
        return Verdict("", False, True)
    facts = function_graph.facts(), argument_graph.facts()
    if case.compare_first and not (function_graph.is_unchanged() and argument_graph.is_unchanged()):
        return Verdict("the guards report a change before there is one", False)
    if _facts(case, executed_code) != facts:
        return Verdict("facts differ before the change", False)
    case.change[1]()
    differs = repr(case.function(*case.arguments)) != before
    if differs and function_graph.is_unchanged() and argument_graph.is_unchanged():
        return Verdict("is_unchanged misses the change", True)
    if differs and _facts(case, executed_code) == facts:
        return Verdict("the facts miss the change", True)
    return Verdict("", differs)


def _facts(case: Case, executed_code: Any) -> Any:
    function_graph = walk({"step": case.function}, None, executed_code)
    return function_graph.facts(), walk({"args": case.arguments}, function_graph, executed_code).facts()


def judge_compiled(case: Case) -> Verdict:
    """Checks that a compiled step has the results of eager mode, before and after the change."""

    function = case.function  # a reference to `case` would make all code that generates cases reachable

    def step(x: torch.Tensor, values: list[Any]) -> torch.Tensor:
        return x * torch.tensor([float(number) for number in function(*values)], dtype=torch.float64)

    compiled = compile_step(step)
    for number in range(6):  # three calls before and three after the change, so that eager mode and a program run
        when = "before" if number < 3 else "after"
        expected = step(X, case.arguments)
        actual = compiled(X, case.arguments)
        if not torch.equal(expected, actual) or not torch.equal(expected.signbit(), actual.signbit()):
            return Verdict(f"{actual.tolist()} instead of {expected.tolist()} {when} the change", True)
        if number == 2:
            case.change[1]()
    return Verdict("", True)
