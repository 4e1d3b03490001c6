"""A schedule: the steps that compute a graph, in order, if one XLA program alone cannot compute it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.fx import GraphModule

from . import dry_run
from .executable import Executable


class StepKind(Enum):
    """The kind of work of a step.

    Attributes:
        PROGRAM: A runner with one or more XLA programs.
        KERNELS: Ops that no XLA program can contain, run by torch's kernels. Copies between devices are among them.
        WRITE: Writes of torch's ops to inputs. No step that could fail follows.
        PYTHON: Python code that does not read the values of tensors.
    """

    PROGRAM = "program"
    KERNELS = "kernels"
    WRITE = "write"
    PYTHON = "python"


@dataclass(frozen=True)
class Step:
    """A step of a schedule. Each value that passes between steps has a name: any hashable object, such as a node of a graph.

    Attributes:
        kind: The kind of work.
        run: Called with the list of the step's inputs, which it may clear; returns the outputs. A `Schedule` takes only a runner for the
            kind PROGRAM.
        inputs: The names of the step's inputs. A `FixedValue` is an input that is the same in each call.
        outputs: The names of the step's outputs.
        module: The graph that the step computes, for the kinds PROGRAM and KERNELS.
    """

    kind: StepKind
    run: Callable[[list[Any]], Sequence[Any]]
    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]
    module: GraphModule | None = None


@dataclass(frozen=True, eq=False)
class FixedValue:
    """An input of a step, or an output of a graph, that is the same in each call, such as None."""

    value: Any


def in_order(inputs: Sequence[Hashable], steps: Sequence[Step], outputs: Sequence[Hashable]) -> Callable[[list[Any]], list[Any]]:
    """Returns a function that runs steps in order. It takes the list of the inputs, which it clears, and returns the outputs.

    The function drops its reference to a value before the last step that takes the value runs, so that the step can free the memory.

    Args:
        inputs: The names of the inputs, in order.
        steps: The steps.
        outputs: The names of the outputs, or constants.
    """
    constants = [value for values in (outputs, *(step.inputs for step in steps)) for value in values if isinstance(value, FixedValue)]
    # A call keeps all values in one list: the inputs, the outputs of the steps, and the constants. These are the indices in that list.
    index_of: dict[Hashable, int] = {}
    for value in [*inputs, *(value for step in steps for value in step.outputs), *constants]:
        index_of.setdefault(value, len(index_of))
    output_indices = [index_of[value] for value in outputs]
    # The values after the inputs, at the start of a call.
    initial_values: list[Any] = [None] * (len(index_of) - len(inputs))
    for constant in constants:
        initial_values[index_of[constant] - len(inputs)] = constant.value
    last_use = {value: number for number, step in enumerate(steps) for value in step.inputs}
    returned = {*outputs}
    dead = [
        [index_of[value] for value, last in last_use.items() if last == number and value not in returned] for number in range(len(steps))
    ]
    # For each step: its function, and the indices of its inputs, of its outputs, and of the values that no later step takes.
    indexed_steps = [
        (step.run, [index_of[value] for value in step.inputs], [index_of[value] for value in step.outputs], dead[number])
        for number, step in enumerate(steps)
    ]

    def run(args: list[Any]) -> list[Any]:
        values = [*args, *initial_values]
        args.clear()
        for run_step, input_indices, output_indices_of_step, dead_indices in indexed_steps:
            taken = [values[index] for index in input_indices]
            for index in dead_indices:
                values[index] = None
            for index, value in zip(output_indices_of_step, run_step(taken), strict=True):
                values[index] = value
        return [values[index] for index in output_indices]

    return run


class Schedule:
    """The runner (see `protocol.Runner`) of a list of steps.

    Args:
        name: The graph's name.
        inputs: The names of the graph's inputs, in order.
        steps: The steps, in order.
        outputs: The names of the graph's outputs, or constants.
    """

    def __init__(self, name: str, inputs: Sequence[Hashable], steps: Sequence[Step], outputs: Sequence[Hashable]) -> None:
        self._boxed_call = True
        self.name, self.steps = name, tuple(steps)
        self._run = in_order(inputs, steps, outputs)
        self._is_one_program = [step.kind for step in steps if step.kind in (StepKind.PROGRAM, StepKind.KERNELS)] == [StepKind.PROGRAM]

    def __call__(self, args: list[Any]) -> list[Any]:
        if dry_run.threads and not self._is_one_program:
            dry_run.stop_if_dry_run(self, args)
        return self._run(args)

    def executables(self) -> list[Executable]:
        runners = [step.run for step in self.steps if step.kind is StepKind.PROGRAM]
        return [executable for runner in runners for executable in runner.executables()]  # type: ignore[attr-defined]
