"""Numbers that record the arithmetic and the comparisons of Python code as formulas.

For example, if Python code computes `lr * 0.9 if step > 10 else lr` with tracers of `lr` and `step`, the result has the formula lr * 0.9,
and the recording has the condition that step > 10 is true (or false). A comparison returns the outcome for the values in the recorded call.
The recording is valid for all numbers for which every condition has the same outcome. Any other access to a value ends the recording.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np


class Input(NamedTuple):
    """The formula of an input, which has a name."""

    name: Any


@dataclass(frozen=True)
class Constant:
    """The formula of a constant. Constants are compared by their texts, so that 1, 1.0 and True differ, and 0.0 and -0.0 differ, too."""

    value: Any = field(compare=False)
    text: str


# An `Input`, a `Constant`, or a tuple of a function and the formulas of its operands. Formulas are hashable.
Formula = Any
# Called with the name of an input; returns the input's value.
Read = Callable[[Any], Any]


def evaluate(formula: Formula, read: Read) -> Any:
    """Returns the value of a formula for the inputs that `read` returns. Raises: ArithmeticError, as Python's arithmetic does."""
    if type(formula) is Input:
        return read(formula.name)
    if type(formula) is Constant:
        return formula.value
    return formula[0](*[evaluate(operand, read) for operand in formula[1:]])


def inputs_of(formula: Formula) -> Iterator[Any]:
    """Yields the names of a formula's inputs."""
    if type(formula) is Input:
        yield formula.name
    elif type(formula) is not Constant:
        for operand in formula[1:]:
            yield from inputs_of(operand)


def formula_of(operand: Any) -> Formula:
    """Returns the formula of a tracer or of a number."""
    return operand.dynaxla_formula if is_tracer(operand) else Constant(operand, f"{type(operand).__name__} {operand!r}")


def is_tracer(value: Any) -> bool:
    """True if a value is a tracer. (`isinstance` would see the class of the number, see `NumberTracer.__class__`.)"""
    return issubclass(type(value), NumberTracer)


def value_of(operand: Any) -> Any:
    """Returns the value of a tracer in the recorded call; any other value unchanged."""
    return operand.dynaxla_value if is_tracer(operand) else operand


class NumberTrace:
    """One recording. Subclasses implement `inspect`, and override `is_recording` if the recording can end.

    Attributes:
        conditions: The outcome of each comparison, by the comparison's formula.
    """

    def __init__(self) -> None:
        self.conditions: dict[Formula, bool] = {}

    def is_recording(self) -> bool:
        """True until the recording ends. Afterwards, tracers behave like plain numbers."""
        return True

    def inspect(self, *formulas: Formula) -> NoReturn:
        """Ends the recording, because Python code reads the values of these formulas. Raises: an exception of the subclass, always."""
        raise NotImplementedError

    def compare(self, function: Callable[..., Any], *operands: Any) -> bool:
        """Compares tracers and numbers, and records the outcome as a condition."""
        outcome = bool(function(*map(value_of, operands)))
        if self.is_recording():
            self.conditions[function, *map(formula_of, operands)] = outcome
        return outcome


class NumberTracer:
    """A number in a recording. `isinstance(tracer, int)` or `isinstance(tracer, float)` is true, as for its value.

    The class is no subclass of int or float, because code written in C, such as the slicing of a list, would read the value of a subclass
    unnoticed.

    Attributes (with a prefix that other classes do not use):
        dynaxla_trace: The recording.
        dynaxla_formula: The formula.
        dynaxla_value: The value in the recorded call.
    """

    __array_ufunc__ = None  # makes NumPy leave arithmetic with this class to the methods below
    __slots__ = ("dynaxla_formula", "dynaxla_trace", "dynaxla_value")

    def __init__(self, trace: Any, formula: Formula, value: Any) -> None:
        self.dynaxla_trace, self.dynaxla_formula, self.dynaxla_value = trace, formula, value

    __class__ = property(lambda self: type(self.dynaxla_value))

    def dynaxla_apply(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Returns a tracer of an operation's result; after the end of the recording, the result itself."""
        value = function(*map(value_of, operands))
        if not self.dynaxla_trace.is_recording():
            return value
        if function is operator.pow and not self.dynaxla_has_fixed_type(*operands):
            self.dynaxla_inspect()
        return type(self)(self.dynaxla_trace, (function, *map(formula_of, operands)), value)

    def dynaxla_has_fixed_type(self, base: Any, exponent: Any) -> bool:
        """True if base ** exponent has the same type whenever the conditions hold. Adds conditions (e.g. base > 0) that ensure it."""
        compare = self.dynaxla_trace.compare
        is_positive = compare(operator.gt, base, 0)
        return is_positive and (isinstance(base, float) or isinstance(exponent, float) or compare(operator.ge, exponent, 0))

    def dynaxla_inspect(self) -> None:
        """Ends the recording, if it has not ended, because Python code reads the value."""
        if self.dynaxla_trace.is_recording():
            self.dynaxla_trace.inspect(self.dynaxla_formula)

    def dynaxla_is_operand(self, value: Any) -> bool:
        """True if arithmetic and comparisons with this value are recorded: for tracers, ints, floats and bools, but not for subclasses."""
        return type(value) in (type(self), int, float, bool)

    def __getattr__(self, name: str) -> Any:
        if hasattr(self.dynaxla_value, name):  # a method of numbers
            self.dynaxla_inspect()
        return getattr(self.dynaxla_value, name)

    def __bool__(self) -> bool:
        return bool(self.dynaxla_trace.compare(operator.truth, self))

    def __neg__(self) -> Any:
        return self.dynaxla_apply(operator.neg, self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self.dynaxla_apply(abs, self)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def _arithmetic(function: Callable[[Any, Any], Any], is_reflected: bool) -> Callable[[NumberTracer, Any], Any]:
    """Returns a special method that records an arithmetic operation, such as `__add__`, or `__radd__` if it is reflected."""

    def method(self: NumberTracer, other: Any) -> Any:
        if not self.dynaxla_is_operand(other):
            return NotImplemented
        return self.dynaxla_apply(function, *((other, self) if is_reflected else (self, other)))

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[NumberTracer, Any], Any]:
    """Returns a special method that records a comparison, such as `__lt__`."""

    def method(self: NumberTracer, other: Any) -> Any:
        if self.dynaxla_is_operand(other):
            return self.dynaxla_trace.compare(function, self, other)
        if isinstance(other, (numbers.Number, np.generic)):  # complex numbers, NumPy's numbers, decimals and fractions
            self.dynaxla_inspect()
            return function(self.dynaxla_value, other)
        return NotImplemented

    return method


def _reader(name: str) -> Callable[..., Any]:
    """Returns a special method that reads the number's value, such as `__int__`, and so ends the recording."""

    def method(self: NumberTracer, *args: Any) -> Any:
        self.dynaxla_inspect()
        return getattr(self.dynaxla_value, name)(*args)

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    setattr(NumberTracer, f"__{_name}__", _arithmetic(getattr(operator, _name), False))
    setattr(NumberTracer, f"__r{_name}__", _arithmetic(getattr(operator, _name), True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(NumberTracer, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in (
    *("hash", "int", "float", "index", "complex", "array", "round", "trunc", "floor", "ceil", "repr", "str", "format", "reduce_ex"),
    *("invert", "divmod", "rdivmod", "and", "or", "xor", "lshift", "rshift", "rand", "ror", "rxor", "rlshift", "rrshift"),
):
    setattr(NumberTracer, f"__{_name}__", _reader(f"__{_name}__"))
