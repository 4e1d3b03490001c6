"""Tests of engine/schedule.py: steps take and return values by name, in order, and values are freed as early as possible."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from dynaxla.engine.dry_run import first_program
from dynaxla.engine.schedule import FixedValue, Schedule, Step, StepKind

pytestmark = pytest.mark.quick


def add(values: list[Any]) -> list[Any]:
    return [sum(values)]


def step(kind: StepKind, inputs: str, outputs: str, run: Any = add) -> Step:
    return Step(kind, run, inputs, outputs)


def test_values_have_names() -> None:
    steps = [step(StepKind.PYTHON, "ab", "c"), step(StepKind.KERNELS, "cc", "d"), step(StepKind.WRITE, "d", "", lambda values: ())]
    schedule = Schedule("graph", "abx", steps, ["d", FixedValue([7]), "a", FixedValue(None)])
    args = [1, 2, 100]
    assert schedule(args) == [6, [7], 1, None]
    assert args == []
    assert schedule([3, 4, 0])[0] == 14


def test_constant_is_an_input_of_several_steps() -> None:
    ten = FixedValue(10)
    steps = [Step(StepKind.PYTHON, add, ["a", ten], ["b"]), Step(StepKind.PYTHON, add, ["b", ten, FixedValue(3)], ["c"])]
    schedule = Schedule("graph", "a", steps, ["c", ten])
    assert [schedule([number]) for number in (1, 2)] == [[24, 10], [25, 10]]


def test_value_is_freed_before_its_last_step_runs() -> None:
    alive = []

    def note(values: list[Any]) -> list[Any]:
        values.clear()  # as a program does
        alive.append((first() is not None, second() is not None))
        return [0]

    steps = [step(StepKind.PROGRAM, "a", "c", note), step(StepKind.PROGRAM, "ab", "d", note)]
    schedule = Schedule("graph", "ab", steps, ["d"])
    args = [torch.ones(1), torch.ones(2)]
    first, second = map(weakref.ref, args)
    schedule(args)
    assert alive == [(True, True), (False, False)]
    returning = Schedule("graph", "ab", steps[:1], ["a", "b"])
    assert [len(value) for value in returning([torch.ones(1), torch.ones(2)])] == [1, 2]


def test_dry_run_stops_at_several_programs_but_enters_one() -> None:
    entered = []
    program = step(StepKind.PROGRAM, "a", "b", lambda values: entered.append(1) or [1])
    single = Schedule("one", "a", [step(StepKind.PYTHON, "a", "c"), program], ["b"])
    several = Schedule("several", "a", [program, step(StepKind.KERNELS, "b", "c")], ["c"])
    assert first_program(lambda: single([1])) is None
    assert entered == [1]
    found = first_program(lambda: several([5]))
    assert found is not None
    assert (found.program, found.inputs, entered) == (several, [5], [1])


def test_step_with_wrong_number_of_results_raises() -> None:
    for count in (0, 2):
        schedule = Schedule("graph", "a", [step(StepKind.PROGRAM, "a", "b", lambda values, count=count: [1] * count)], ["b"])
        with pytest.raises(ValueError, match="zip"):
            schedule([1])
