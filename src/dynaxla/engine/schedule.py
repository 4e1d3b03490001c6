"""A schedule: the steps that compute a graph, in order, when one program is not enough or some work is not a program's."""

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
        PROGRAM: A compiled program.
        KERNELS: Ops that no program can contain, run by torch's kernels. Copies between devices are among them.
        WRITE: Writes to inputs. Nothing can fail after them.
        PYTHON: Python code that reads no values of tensors.
    """

    PROGRAM = "program"
    KERNELS = "kernels"
    WRITE = "write"
    PYTHON = "python"


@dataclass(frozen=True)
class Step:
    """A step of a schedule. Each value has a name: any hashable object, such as a node of a graph.

    Attributes:
        kind: The kind of work.
        run: Takes the list of the step's inputs, which it may clear, and returns the outputs. For a program, it is a runner.
        inputs: The names of the values that the step takes.
        outputs: The names of the values that the step returns.
        module: The graph that the step computes, for the kinds PROGRAM and KERNELS.
    """

    kind: StepKind
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
        name: The graph's name.
        inputs: The names of the graph's inputs, in order.
        steps: The steps, in order.
        outputs: The names of the graph's outputs, or constants.
    """

    def __init__(self, name: str, inputs: Sequence[Hashable], steps: Sequence[Step], outputs: Sequence[Hashable]) -> None:
        self._boxed_call = True
        self.name, self.steps = name, tuple(steps)
        constants = [output for output in outputs if isinstance(output, ConstantOutput)]
        slots: dict[Hashable, int] = {}  # the index of each value in the list of all values
        for value in [*inputs, *(value for step in steps for value in step.outputs), *constants]:
            slots.setdefault(value, len(slots))
        self._output_slots = [slots[output] for output in outputs]
        # The initial values of the slots after the inputs'.
        self._more: list[Any] = [None] * (len(slots) - len(inputs))
        for constant in constants:
            self._more[slots[constant] - len(inputs)] = constant.value
        last_use = {value: index for index, step in enumerate(steps) for value in step.inputs}
        kept = {*outputs}
        dead = [[slots[value] for value, last in last_use.items() if last == index and value not in kept] for index in range(len(steps))]
        # For each step: its function, and the slots of its inputs, of its outputs, and of the values that no later step takes.
        self._runs = [
            (step.run, [slots[value] for value in step.inputs], [slots[value] for value in step.outputs], dead[index])
            for index, step in enumerate(steps)
        ]
        self._is_one_program = [step.kind for step in steps if step.kind in (StepKind.PROGRAM, StepKind.KERNELS)] == [StepKind.PROGRAM]

    def __call__(self, args: list[Any]) -> list[Any]:
        if dry_run.threads and not self._is_one_program:
            dry_run.stop_if_dry_run(self, args)
        values = [*args, *self._more]
        args.clear()
        for run, input_slots, output_slots, dead in self._runs:
            inputs = [values[slot] for slot in input_slots]
            for slot in dead:
                values[slot] = None
            outputs = run(inputs)
            for slot, value in zip(output_slots, outputs, strict=True):
                values[slot] = value
        return [values[slot] for slot in self._output_slots]

    def executables(self) -> list[Executable]:
        runners = [step.run for step in self.steps if step.kind is StepKind.PROGRAM]
        return [executable for runner in runners for executable in runner.executables()]  # type: ignore[attr-defined]
