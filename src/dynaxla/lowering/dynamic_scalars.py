"""Python numbers that are inputs of a program instead of constants, so that a new value needs no new compilation.

A lowering gets a `DynamicScalar` in place of a float or an int of the graph:

- If the lowering converts the number to an array (`promotion.number`), the program gets an input of the array's dtype.
- If the lowering compares the number with another one, the comparison becomes a condition of the program. The program is valid for all
  numbers for which the comparisons have the same outcomes. So `alpha == 1` causes two programs, not one for each alpha.
- Arithmetic on the number is recorded as a formula.
- Any other access to the value raises `NumberInspected`. Then the number has to be a constant of the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jax import Array, lax

from ..runtime.number_tracer import Formula, Input, NumberTrace, NumberTracer, evaluate


class NumberInspected(Exception):
    """A lowering needs the value of a dynamic scalar at compile time."""


class ScalarInput(NamedTuple):
    """An input of the program: the value of a formula, cast to `dtype` as ATen casts numbers."""

    formula: Formula
    dtype: np.dtype


class ScalarTrace(NumberTrace):
    """The record of the traces of one function with dynamic scalars. The first trace finds the scalar inputs, later ones get their arrays.

    Attributes:
        scalar_inputs: The position of each scalar input among the program's scalar inputs. Complete at the end of the first trace.
        was_inspected: True if a lowering needed a value at compile time.
    """

    def __init__(self, numbers: Sequence[Any]) -> None:
        super().__init__()
        self.scalar_inputs: dict[ScalarInput, int] = {}
        self.was_inspected = False
        self._numbers = tuple(numbers)
        self._inputs: Sequence[Array] = ()

    def begin(self, inputs: Sequence[Array]) -> None:
        """Starts a trace.

        Args:
            inputs: One array for each entry of `scalar_inputs`. Empty in the first trace, which determines `scalar_inputs`.
        """
        self._inputs = inputs
        self.conditions.clear()

    def number(self, position: int) -> DynamicScalar:
        """Returns the dynamic scalar for the number at a position of `numbers`."""
        return DynamicScalar(self, Input(position), self._numbers[position])

    def cast(self, formula: Formula, dtype: Any) -> Array:
        """Returns the program's input for the value of a formula in a dtype; in the first trace, a zero of rank 0."""
        position = self.scalar_inputs.setdefault(ScalarInput(formula, np.dtype(dtype)), len(self.scalar_inputs))
        return self._inputs[position] if position < len(self._inputs) else lax.full((), 0, np.dtype(dtype))

    def inspect(self, *formulas: Formula) -> NoReturn:
        """Records that a value is needed at compile time.

        Raises:
            NumberInspected: Always.
        """
        self.was_inspected = True
        raise NumberInspected("a lowering needs the value of a number that is an input of the program")


class GuardedInputs(NamedTuple):
    """The conditions under which a program is valid, and its scalar inputs.

    Attributes:
        conditions: The outcome that each comparison of dynamic scalars must have, by the comparison's formula.
        scalar_inputs: The scalar inputs, as formulas of the dynamic scalars, in the program's order.
    """

    conditions: Mapping[Formula, bool]
    scalar_inputs: tuple[ScalarInput, ...]

    def inputs(self, numbers: Sequence[Any]) -> list[Any] | None:
        """Returns the scalar inputs for these numbers as (value, dtype) for `promotion.number`; None if a condition does not hold."""
        try:
            for comparison, outcome in self.conditions.items():
                if bool(evaluate(comparison, numbers.__getitem__)) is not outcome:
                    return None
            return [(evaluate(formula, numbers.__getitem__), dtype) for formula, dtype in self.scalar_inputs]
        except ArithmeticError:  # such as 1 / 0
            return None


class DynamicScalar(NumberTracer):
    """A number whose value is not known at compile time."""

    __slots__ = ()

    def dynaxla_is_operand(self, value: Any) -> bool:
        """True for a dynamic scalar, a Python number, and a NumPy scalar."""
        return super().dynaxla_is_operand(value) or isinstance(value, (np.number, np.bool_))

    def cast(self, dtype: Any) -> Array:
        """Returns the number as an array of rank 0."""
        return self.dynaxla_trace.cast(self.dynaxla_formula, dtype)


def is_dynamic(value: Any) -> bool:
    """True if a value is a dynamic scalar. For `isinstance`, a dynamic scalar is an int or a float."""
    return type(value) is DynamicScalar
