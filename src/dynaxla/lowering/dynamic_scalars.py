"""Python numbers that are inputs of a program instead of constants, so that a new value needs no new compilation.

A lowering gets a `DynamicScalar` in place of a float or an int of the graph:

- If the lowering converts it to an array (`promotion.number`), the program gets an input of that dtype.
- If the lowering compares it with another number, the comparison becomes a guard. The program is valid for all numbers with the same
  outcomes, so `alpha == 1` causes two programs, not one for each alpha.
- Arithmetic on the number is recorded as a formula.
- Any other access to the value raises `NumberInspected`, and the number has to be compiled in as a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array, lax

# A number; ("input", position) for a dynamic scalar; or (function, *formulas of its operands).
Formula = Any


class NumberInspected(Exception):
    """A lowering needs the value of a dynamic scalar at compile time."""


class Guard(NamedTuple):
    """A recorded comparison: compare(left, right) returned `outcome`."""

    compare: Callable[[Any, Any], bool]
    left: Formula
    right: Formula
    outcome: bool


class ScalarInput(NamedTuple):
    """An input of the program: the value of a formula, cast to `dtype` as ATen casts numbers."""

    formula: Formula
    dtype: np.dtype


def evaluate(formula: Formula, numbers: Sequence[Any]) -> Any:
    """Returns the value of a formula. `numbers`: the values of the dynamic scalars, by position."""
    if type(formula) is not tuple:
        return formula
    if formula[0] == "input":
        return numbers[formula[1]]
    return formula[0](*[evaluate(operand, numbers) for operand in formula[1:]])


class NumberTrace:
    """The record of one trace of a function with dynamic scalars.

    Attributes:
        numbers: The values of the dynamic scalars in the call that causes the trace.
        guards: The comparisons recorded so far.
        scalar_inputs: The scalar inputs that the program needs, as far as recorded.
        was_inspected: True if a lowering needed a value at compile time.
    """

    def __init__(self, numbers: Sequence[Any]) -> None:
        self.numbers = tuple(numbers)
        self.guards: list[Guard] = []
        self.scalar_inputs: list[ScalarInput] = []
        self.was_inspected = False
        self._positions: dict[Any, int] = {}
        self._inputs: Sequence[Array] = ()

    def begin(self, inputs: Sequence[Array]) -> None:
        """Starts a trace.

        Args:
            inputs: One array for each entry of `scalar_inputs`. Empty in a first trace, which determines `scalar_inputs`.
        """
        self._inputs = inputs
        self.guards.clear()

    def number(self, position: int) -> DynamicScalar:
        """Returns the dynamic scalar at a position of `numbers`."""
        return DynamicScalar(self, ("input", position), type(self.numbers[position]))

    def compare(self, compare: Callable[[Any, Any], bool], left: Formula, right: Formula) -> bool:
        """Compares the values of two formulas, and records the outcome as a guard."""
        outcome = bool(compare(evaluate(left, self.numbers), evaluate(right, self.numbers)))
        self.guards.append(Guard(compare, left, right, outcome))
        return outcome

    def cast(self, formula: Formula, dtype: Any) -> Array:
        """Returns the program's input for the value of a formula in a dtype; in a first trace, a placeholder array."""
        key = repr(formula), np.dtype(dtype)  # by repr, since 1, 1.0 and True are equal
        position = self._positions.setdefault(key, len(self.scalar_inputs))
        if position == len(self.scalar_inputs):
            self.scalar_inputs.append(ScalarInput(formula, np.dtype(dtype)))
        return self._inputs[position] if position < len(self._inputs) else lax.full((), 0, np.dtype(dtype))

    def inspected(self) -> NumberInspected:
        """Records that a value is needed at compile time, and returns the exception to raise."""
        self.was_inspected = True
        return NumberInspected("a lowering needs to know the value of a number that is to be an input")


class GuardedInputs(NamedTuple):
    """The guards of a program, and its scalar inputs as formulas of the dynamic scalars."""

    guards: tuple[Guard, ...]
    scalar_inputs: tuple[ScalarInput, ...]

    def inputs(self, numbers: Sequence[Any]) -> list[Any] | None:
        """Returns the scalar inputs for these numbers as (value, dtype) for `promotion.number`; None if a guard fails."""
        try:
            for guard in self.guards:
                if bool(guard.compare(evaluate(guard.left, numbers), evaluate(guard.right, numbers))) is not guard.outcome:
                    return None
            return [(evaluate(formula, numbers), dtype) for formula, dtype in self.scalar_inputs]
        except ArithmeticError:  # such as 1 / 0
            return None


class DynamicScalar:
    """A number whose value is not known at compile time. `isinstance` takes it for a float or an int."""

    __array_ufunc__ = None  # makes NumPy leave arithmetic with this class to the methods below

    def __init__(self, trace: NumberTrace, formula: Formula, kind: type) -> None:
        self.trace, self.formula, self._kind = trace, formula, kind

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind

    def cast(self, dtype: Any) -> Array:
        """Returns the number as an array of rank 0."""
        return self.trace.cast(self.formula, dtype)

    def _inspect(self, *_: Any, **__: Any) -> Any:
        raise self.trace.inspected()

    __float__ = __int__ = __index__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = __hash__ = __array__ = _inspect
    __repr__ = __str__ = __format__ = __reduce_ex__ = _inspect

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._kind, name):
            raise self.trace.inspected()
        raise AttributeError(name)

    def __bool__(self) -> bool:
        return self.trace.compare(operator.ne, self.formula, 0)


def is_dynamic(value: Any) -> bool:
    """True if a value is a dynamic scalar, which `isinstance` cannot tell."""
    return type(value) is DynamicScalar


def _formula(value: Any) -> Formula:
    """Returns the formula of an operand; None if the operand is not a number."""
    if is_dynamic(value):
        return value.formula
    return value if isinstance(value, (bool, int, float, np.number, np.bool_)) else None


def _comparing(compare: Callable[[Any, Any], bool]) -> Callable[[DynamicScalar, Any], Any]:
    def method(self: DynamicScalar, other: Any) -> Any:
        formula = _formula(other)
        return NotImplemented if formula is None else self.trace.compare(compare, self.formula, formula)

    return method


def _arithmetic(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def method(self: DynamicScalar, *others: Any) -> Any:
        operands = [self.formula, *map(_formula, others)]
        if None in operands[1:]:
            return NotImplemented
        formula = (function, *(reversed(operands) if reflected else operands))
        return DynamicScalar(self.trace, formula, type(evaluate(formula, self.trace.numbers)))

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(DynamicScalar, f"__{_name}__", _comparing(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "neg", "abs", "pos"):
    setattr(DynamicScalar, f"__{_name}__", _arithmetic(getattr(operator, _name), False))
    if _name in ("add", "sub", "mul", "truediv"):
        setattr(DynamicScalar, f"__r{_name}__", _arithmetic(getattr(operator, _name), True))
