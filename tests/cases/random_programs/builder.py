"""Builds a program step by step on real tensors. Operands are drawn from the values that a step accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from .choices import Choices, chance, pick
from .program import Program, Step, World
from .stepwise import Rejected, Stepwise, overlaps_itself, positions_of, storage_key, strict_warnings

T = TypeVar("T")
Condition = Callable[[torch.Tensor], bool]

# Values stay small, because combinations of ops are tested, not sizes.
MOST_ELEMENTS = 160
MOST_DIMS = 5


class NoneFits(Exception):
    """The step accepts no value of the program as an operand."""


class Builder:
    """A program under construction.

    Attributes:
        choices: the source of random decisions.
        program: the program, without outputs.
        tensors: all values so far, as in the first call.
    """

    def __init__(self, choices: Choices, program: Program) -> None:
        self.choices = choices
        self.program = program
        self.tensors: list[torch.Tensor] = []
        self._restart()

    def _restart(self) -> None:
        """Runs the program again, because a rejected step may have written to tensors."""
        world = World(self.program)
        with torch.set_grad_enabled(self.program.mode != "no_grad"):
            world.prepare(0)
            stepwise = Stepwise(self.program)
            stepwise.run(world.tensors)
        self.tensors = stepwise.values

    def append(self, step: Step) -> bool:
        """Adds the step if eager mode accepts it and defines its result. Returns True if it does."""
        operands = [self.tensors[number] for number in step.operands]
        if step.writes and not _writable(operands):
            return False
        runner = Stepwise(self.program)
        runner.values = self.tensors
        try:
            with strict_warnings(), torch.set_grad_enabled(self.program.mode != "no_grad"):
                results = runner._step(step, operands)
        except (Rejected, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, Warning):
            if step.writes:
                self._restart()
            return False
        if any(result.numel() > MOST_ELEMENTS or result.dim() > MOST_DIMS or not _plain(result) for result in results):
            if step.writes:
                self._restart()
            return False
        self.tensors += results
        self.program = _with_step(self.program, step)
        return True

    # Choices

    def integer(self, low: int, high: int) -> int:
        if low > high:
            raise NoneFits
        return self.choices.integer(low, high)

    def pick(self, options: Sequence[T]) -> T:
        if not options:
            raise NoneFits
        return pick(self.choices, options)

    def chance(self, percent: int) -> bool:
        return chance(self.choices, percent)

    def value(self, condition: Condition = lambda _: True) -> int:
        """Returns the number of a random value; half of the time, of one of the newest values."""
        fitting = [number for number, tensor in enumerate(self.tensors) if condition(tensor)]
        newest = fitting[-3:]
        return self.pick(newest if len(newest) < len(fitting) and self.chance(50) else fitting)

    def dim(self, number: int) -> int:
        """Returns a dimension of a value, counted from either end. A rank-0 tensor has the dimensions 0 and -1."""
        rank = max(self.tensors[number].dim(), 1)
        return self.integer(-rank, rank - 1)

    def dims(self, number: int, at_least: int = 1) -> list[int]:
        """Returns distinct dimensions of a value, in any order."""
        left = list(range(self.tensors[number].dim()))
        count = self.integer(at_least, len(left))
        chosen = [left.pop(self.integer(0, len(left) - 1)) for _ in range(count)]
        return [dim - self.tensors[number].dim() if self.chance(20) else dim for dim in chosen]

    def partner(self, number: int, condition: Condition = lambda _: True) -> int:
        """Returns a value that broadcasts with this value."""
        shape = self.tensors[number].shape
        return self.value(lambda tensor: condition(tensor) and _broadcast(shape, tensor.shape) is not None)

    def source(self, number: int, condition: Condition = lambda _: True) -> int:
        """Returns a value that can be broadcast and written into this value."""
        shape = self.tensors[number].shape
        return self.value(lambda tensor: condition(tensor) and _broadcast(shape, tensor.shape) == shape)

    def target(self, condition: Condition = lambda _: True) -> int:
        """Returns a value that can be written to."""
        return self.value(lambda tensor: condition(tensor) and not overlaps_itself(tensor))

    def scalar(self, tensor: torch.Tensor) -> str:
        """Returns a Python number that can be an operand together with the tensor."""
        kinds = ["integer", "float", "bool"] + (["complex"] if tensor.is_complex() else [])
        kind = self.pick(kinds)
        if kind == "integer":
            return str(self.pick([1, 2, 3, 0] if tensor.dtype in (torch.uint8, torch.bool) else [1, 2, 3, 0, -1, -2]))
        if kind == "float":
            return str(self.pick([0.5, 1.5, 2.0, -1.0, -0.25]))
        return str(self.pick([True, False])) if kind == "bool" else self.pick(["1j", "(1+2j)"])

    def number_like(self, tensor: torch.Tensor) -> str:
        """Returns a Python number that the tensor's dtype can hold."""
        if tensor.dtype == torch.bool:
            return self.pick(["True", "False"])
        if tensor.is_floating_point() or tensor.is_complex():
            return self.pick(["2", "0.5", "-1.25", "0"])
        return self.pick(["2", "0", "1"] if tensor.dtype == torch.uint8 else ["2", "0", "-1"])


def _with_step(program: Program, step: Step) -> Program:
    return replace(program, steps=(*program.steps, step))


def _writable(operands: Sequence[torch.Tensor]) -> bool:
    """True if eager mode defines a write to the first operand.

    Its elements must not overlap, and no other operand may overlap it partly.
    """
    target = operands[0]
    written = positions_of(target)
    if len(written) < target.numel():
        return False
    for other in operands[1:]:
        same = (other.shape, other.stride(), other.storage_offset()) == (target.shape, target.stride(), target.storage_offset())
        if storage_key(other) == storage_key(target) and not same and (other.dtype != target.dtype or written & positions_of(other)):
            return False
    return True


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.dtype != torch.complex32


def _broadcast(shape: torch.Size, other: torch.Size) -> torch.Size | None:
    try:
        return torch.broadcast_shapes(shape, other)
    except RuntimeError:
        return None


def is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def is_complex(tensor: torch.Tensor) -> bool:
    return tensor.is_complex()


def is_real(tensor: torch.Tensor) -> bool:
    return not tensor.is_complex()


def is_bool(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bool


def is_integer(tensor: torch.Tensor) -> bool:
    """True for integers, not for bools."""
    return not is_inexact(tensor) and not is_bool(tensor)


def is_integral(tensor: torch.Tensor) -> bool:
    return not is_inexact(tensor)


def is_number(tensor: torch.Tensor) -> bool:
    return not is_bool(tensor)


def is_real_number(tensor: torch.Tensor) -> bool:
    return is_real(tensor) and is_number(tensor)


def has_dims(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0


def has_elements(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0
