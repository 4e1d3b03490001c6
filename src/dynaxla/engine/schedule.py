"""A schedule: the steps that compute a graph, in order, when one program is not enough or some work is not a program's."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.fx import GraphModule

from . import dry_run
from .executable import Executable


class Kind(Enum):
    """The kind of work of a step.

    PROGRAM  a compiled program
    KERNELS  ops that no program can contain, which torch's kernels run; copies between devices are among them
    WRITE    writes to inputs, after which nothing can fail
    PYTHON   Python code that reads no values of tensors
    """

    PROGRAM = "program"
    KERNELS = "kernels"
    WRITE = "write"
    PYTHON = "python"


@dataclass(frozen=True)
class Step:
    """A step of a schedule. Values have names, which any hashable object can be, such as the nodes of a graph.

    Attributes:
        kind: the kind of work.
        run: takes the list of the step's inputs, which it may clear, and returns its outputs. A runner for a program.
        inputs: the names of the values that it takes.
        outputs: the names of the values that it returns.
        module: the graph that it computes, if it is of kind PROGRAM or KERNELS.
    """

    kind: Kind
    run: Callable[[list[Any]], Sequence[Any]]
    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]
    module: GraphModule | None = None


@dataclass(frozen=True, eq=False)
class ConstantOutput:
    """An output of a graph that is the same in each call."""

    value: Any


class Schedule:
    """The runner (see `protocol.Runner`) of a list of steps. A value is freed before the last step that takes it runs.

    Args:
        name: the graph's name.
        inputs: the names of the graph's inputs, in order.
        steps: the steps, in order.
        outputs: the names of the graph's outputs, or constants.
    """

    def __init__(self, name: str, inputs: Sequence[Hashable], steps: Sequence[Step], outputs: Sequence[Hashable]) -> None:
        self._boxed_call = True
        self.name, self.steps = name, tuple(steps)
        constants = [output for output in outputs if isinstance(output, ConstantOutput)]
        places: dict[Hashable, int] = {}
        for value in [*inputs, *(value for step in steps for value in step.outputs), *constants]:
            places.setdefault(value, len(places))
        self._results = [places[output] for output in outputs]
        self._more: list[Any] = [None] * (len(places) - len(inputs))
        for constant in constants:
            self._more[places[constant] - len(inputs)] = constant.value
        last_use = {value: index for index, step in enumerate(steps) for value in step.inputs}
        kept = {*outputs}
        dead = [[places[value] for value, last in last_use.items() if last == index and value not in kept] for index in range(len(steps))]
        self._turns = [
            (step.run, [places[value] for value in step.inputs], [places[value] for value in step.outputs], dead[index])
            for index, step in enumerate(steps)
        ]
        self._is_one_program = [step.kind for step in steps if step.kind in (Kind.PROGRAM, Kind.KERNELS)] == [Kind.PROGRAM]

    def __call__(self, args: list[Any]) -> list[Any]:
        if dry_run.threads and not self._is_one_program:
            dry_run.stop_if_dry_run(self, args)
        values = [*args, *self._more]
        args.clear()
        for run, taken, returned, dead in self._turns:
            given = [values[place] for place in taken]
            for place in dead:
                values[place] = None
            results = run(given)
            for place, value in zip(returned, results, strict=True):
                values[place] = value
        return [values[place] for place in self._results]

    def executables(self) -> list[Executable]:
        runners = [step.run for step in self.steps if step.kind is Kind.PROGRAM]
        return [executable for runner in runners for executable in runner.executables()]  # type: ignore[attr-defined]
