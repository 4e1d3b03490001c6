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
        run: Called with the list of the step's inputs, which it may clear; returns the outputs. For the kind PROGRAM it is a runner.
        inputs: The names of the step's inputs.
        outputs: The names of the step's outputs.
        module: The graph that the step computes, for the kinds PROGRAM and KERNELS.
    """

    kind: StepKind
    run: Callable[[list[Any]], Sequence[Any]]
    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]
    module: GraphModule | None = None


@dataclass(frozen=True, eq=False)
class ConstantOutput:
    """An output of a graph that is the same in each call, such as None."""

    value: Any


class Schedule:
    """The runner (see `protocol.Runner`) of a list of steps.

    The schedule drops its reference to a value before the last step that takes the value runs, so that the step can free the memory.

    Args:
        name: The graph's name.
        inputs: The names of the graph's inputs, in order.
        steps: The steps, in order.
        outputs: The names of the graph's outputs; a `ConstantOutput` for an output that is a constant.
    """

    def __init__(self, name: str, inputs: Sequence[Hashable], steps: Sequence[Step], outputs: Sequence[Hashable]) -> None:
        self._boxed_call = True
        self.name, self.steps = name, tuple(steps)
        constants = [output for output in outputs if isinstance(output, ConstantOutput)]
        # A call keeps all values in one list: the inputs, the outputs of the steps, and the constants. These are the indices in that list.
        index_of: dict[Hashable, int] = {}
        for value in [*inputs, *(value for step in steps for value in step.outputs), *constants]:
            index_of.setdefault(value, len(index_of))
        self._output_indices = [index_of[value] for value in outputs]
        # The values after the inputs, at the start of a call.
        self._initial_values: list[Any] = [None] * (len(index_of) - len(inputs))
        for constant in constants:
            self._initial_values[index_of[constant] - len(inputs)] = constant.value
        last_use = {value: number for number, step in enumerate(steps) for value in step.inputs}
        returned = {*outputs}
        dead = [
            [index_of[value] for value, last in last_use.items() if last == number and value not in returned]
            for number in range(len(steps))
        ]
        # For each step: its function, and the indices of its inputs, of its outputs, and of the values that no later step takes.
        self._indexed_steps = [
            (step.run, [index_of[value] for value in step.inputs], [index_of[value] for value in step.outputs], dead[number])
            for number, step in enumerate(steps)
        ]
        self._is_one_program = [step.kind for step in steps if step.kind in (StepKind.PROGRAM, StepKind.KERNELS)] == [StepKind.PROGRAM]

    def __call__(self, args: list[Any]) -> list[Any]:
        if dry_run.threads and not self._is_one_program:
            dry_run.stop_if_dry_run(self, args)
        values = [*args, *self._initial_values]
        args.clear()
        for run, input_indices, output_indices, dead in self._indexed_steps:
            inputs = [values[index] for index in input_indices]
            for index in dead:
                values[index] = None
            outputs = run(inputs)
            for index, value in zip(output_indices, outputs, strict=True):
                values[index] = value
        return [values[index] for index in self._output_indices]

    def executables(self) -> list[Executable]:
        runners = [step.run for step in self.steps if step.kind is StepKind.PROGRAM]
        return [executable for runner in runners for executable in runner.executables()]  # type: ignore[attr-defined]
