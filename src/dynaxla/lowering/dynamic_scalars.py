"""Python numbers that are inputs of a program instead of constants, so that a new value needs no new compilation.

A lowering gets an `OpenNumber` where the graph has a float or an int. Where the lowering converts it to an array (`promotion.number`), the
program gets an input of that dtype. Where the lowering compares it with another number, the comparison becomes a guard: the program is
valid for all numbers with the same outcomes, so `alpha == 1` causes two programs, not one for each alpha. Arithmetic on the number is
recorded. Any other access to the value raises `NumberInspected`, and the number has to be compiled in as a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array, lax

Formula = Any  # a number; ("input", position); or a function and its operands' formulas


class NumberInspected(Exception):
    """A lowering needs to know a number's value."""


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
    """Returns the value of a formula. `numbers`: the values of the open numbers, by position."""
    if type(formula) is not tuple:
        return formula
    if formula[0] == "input":
        return numbers[formula[1]]
    return formula[0](*[evaluate(operand, numbers) for operand in formula[1:]])


class NumberTrace:
    """The record of one trace of a function with open numbers.

    Attributes:
        numbers: The present values of the open numbers.
        guards: The comparisons so far.
        wanted: The inputs that the program needs, as known so far.
        looked: True if a lowering had to know a value.
    """

    def __init__(self, numbers: Sequence[Any]) -> None:
        self.numbers = tuple(numbers)
        self.guards: list[Guard] = []
        self.wanted: list[ScalarInput] = []
        self.looked = False
        self._places: dict[Any, int] = {}
        self._inputs: Sequence[Array] = ()

    def begin(self, inputs: Sequence[Array]) -> None:
        """Starts a trace.

        Args:
            inputs: One array for each entry of `wanted`. Empty in a first trace, which determines `wanted`.
        """
        self._inputs = inputs
        self.guards.clear()

    def number(self, position: int) -> OpenNumber:
        return OpenNumber(self, ("input", position), type(self.numbers[position]))

    def compare(self, compare: Callable[[Any, Any], bool], left: Formula, right: Formula) -> bool:
        outcome = bool(compare(evaluate(left, self.numbers), evaluate(right, self.numbers)))
        self.guards.append(Guard(compare, left, right, outcome))
        return outcome

    def cast(self, formula: Formula, dtype: Any) -> Array:
        """Returns the program's input for the value of a formula in a dtype; in a first trace, a placeholder array."""
        key = repr(formula), np.dtype(dtype)  # by repr, since 1, 1.0 and True are equal
        place = self._places.setdefault(key, len(self.wanted))
        if place == len(self.wanted):
            self.wanted.append(ScalarInput(formula, np.dtype(dtype)))
        return self._inputs[place] if place < len(self._inputs) else lax.full((), 0, np.dtype(dtype))

    def refuse(self) -> NumberInspected:
        self.looked = True
        return NumberInspected("a lowering needs to know the value of a number that is to be an input")


class Variant(NamedTuple):
    """The conditions under which a program is valid, and the inputs that it computes from the open numbers."""

    guards: tuple[Guard, ...]
    wanted: tuple[ScalarInput, ...]

    def inputs(self, numbers: Sequence[Any]) -> list[Any] | None:
        """Returns the program's inputs for these numbers as (value, dtype) for `promotion.number`; None if a guard fails."""
        try:
            for guard in self.guards:
                if bool(guard.compare(evaluate(guard.left, numbers), evaluate(guard.right, numbers))) is not guard.outcome:
                    return None
            return [(evaluate(formula, numbers), dtype) for formula, dtype in self.wanted]
        except ArithmeticError:  # such as 1 / 0
            return None


class OpenNumber:
    """A number whose value the program does not know. It passes `isinstance` as a float or an int."""

    __array_ufunc__ = None  # NumPy leaves arithmetic with it to its own methods

    def __init__(self, watch: NumberTrace, formula: Formula, kind: type) -> None:
        self.watch, self.formula, self._kind = watch, formula, kind

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind

    def cast(self, dtype: Any) -> Array:
        """Returns the number as an array of rank 0."""
        return self.watch.cast(self.formula, dtype)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self.watch.refuse()

    __float__ = __int__ = __index__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = __hash__ = __array__ = _refuse
    __repr__ = __str__ = __format__ = __reduce_ex__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._kind, name):
            raise self.watch.refuse()
        raise AttributeError(name)

    def __bool__(self) -> bool:
        return self.watch.compare(operator.ne, self.formula, 0)


def is_open(value: Any) -> bool:
    """True if a value is an open number, which `isinstance` cannot determine."""
    return type(value) is OpenNumber


def _formula(value: Any) -> Formula:
    """Returns the formula of an operand; None if the operand is no number."""
    if is_open(value):
        return value.formula
    return value if isinstance(value, (bool, int, float, np.number, np.bool_)) else None


def _comparing(compare: Callable[[Any, Any], bool]) -> Callable[[OpenNumber, Any], Any]:
    def method(self: OpenNumber, other: Any) -> Any:
        formula = _formula(other)
        return NotImplemented if formula is None else self.watch.compare(compare, self.formula, formula)

    return method


def _arithmetic(function: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def method(self: OpenNumber, *others: Any) -> Any:
        operands = [self.formula, *map(_formula, others)]
        if None in operands[1:]:
            return NotImplemented
        formula = (function, *(reversed(operands) if reflected else operands))
        return OpenNumber(self.watch, formula, type(evaluate(formula, self.watch.numbers)))

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(OpenNumber, f"__{_name}__", _comparing(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "neg", "abs", "pos"):
    setattr(OpenNumber, f"__{_name}__", _arithmetic(getattr(operator, _name), False))
    if _name in ("add", "sub", "mul", "truediv"):
        setattr(OpenNumber, f"__r{_name}__", _arithmetic(getattr(operator, _name), True))
