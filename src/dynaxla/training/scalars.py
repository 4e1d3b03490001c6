"""Python numbers that a recorded program takes as inputs: numbers of parameter groups, such as learning rates.

During a recording, such a number is a `TracedFloat`: a float with a random value that no other float has. Python arithmetic on a traced
float gives another traced float. If an ATen op gets a traced float as a plain number, the random value identifies the traced float.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Node

from ..guards.slots import Place
from ..guards.snapshot import Number
from .value_reads import in_optimizer


class TracedFloatInspected(Exception):
    """Raised when Python reads the value of a traced float, as in `if lr > 0`.

    Attributes:
        places: the places of the numbers that were read.
    """

    def __init__(self, places: Collection[Place]) -> None:
        super().__init__(f"Python reads the value of {sorted(places)}")
        self.places = places


# Returns the number, or the tuple of numbers, at a place.
Read = Callable[[Place], Any]


class TracedFloat(float):
    """A float that Python code computes with while a step is recorded; its value is random, and identifies it.

    Attributes:
        key: the number's origin: a place (a path in the step's state), or an operation and its operands' keys.
        compute: computes the true value, given a function that reads the number at a place.
        table: all traced floats of the recording.
        places: the places of the numbers that it is computed from.
        is_positive: True if the guards make sure that it is greater than 0.
    """

    key: Any
    compute: Callable[[Read], float]
    table: TracedFloats
    places: frozenset[Place] = frozenset()
    is_positive: bool = False

    def _apply(self, name: str, function: Callable[..., float], *operands: float) -> TracedFloat:
        key = name, *(operand.key if isinstance(operand, TracedFloat) else operand for operand in operands)
        places = frozenset().union(*(operand.places for operand in operands if isinstance(operand, TracedFloat)))
        return self.table.add(key, lambda read: function(*(_value(operand, read) for operand in operands)), places)

    def _inspected(self, *_: Any) -> Any:
        self.table.inspected |= self.places
        raise TracedFloatInspected(self.places)

    __int__ = __round__ = __trunc__ = __floor__ = __ceil__ = _inspected
    __hash__ = float.__hash__

    def _compared_with_zero(self, other: object, answer: bool) -> bool:
        """Returns the answer that holds for all positive numbers, if this is one and `other` is 0."""
        return answer if self.is_positive and type(other) in (int, float) and not other else self._inspected()

    def __bool__(self) -> bool:
        return self._compared_with_zero(0, True)

    def __eq__(self, other: object) -> bool:
        return self._compared_with_zero(other, False)

    def __ne__(self, other: object) -> bool:
        return self._compared_with_zero(other, True)

    def __lt__(self, other: object) -> bool:
        return self._compared_with_zero(other, False)

    def __le__(self, other: object) -> bool:
        return self._compared_with_zero(other, False)

    def __gt__(self, other: object) -> bool:
        return self._compared_with_zero(other, True)

    def __ge__(self, other: object) -> bool:
        return self._compared_with_zero(other, True)

    def __neg__(self) -> TracedFloat:
        return self._apply("neg", operator.neg, self)

    def __pos__(self) -> TracedFloat:
        return self

    def __abs__(self) -> TracedFloat:
        return self._apply("abs", abs, self)


def _read_item(place: Place, index: int, read: Read) -> float:
    return read(place)[index]


def _value(number: float, read: Read) -> float:
    return number.compute(read) if isinstance(number, TracedFloat) else number


def _arithmetic(name: str, function: Callable[[Any, Any], Any], reflected: bool) -> Callable[[TracedFloat, Any], Any]:
    def method(self: TracedFloat, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        return self._apply(name, function, *((other, self) if reflected else (self, other)))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    _function = getattr(operator, _name)
    setattr(TracedFloat, f"__{_name}__", _arithmetic(_name, _function, False))
    setattr(TracedFloat, f"__r{_name}__", _arithmetic(_name, _function, True))


class TracedFloats:
    """The traced floats of one recording.

    Attributes:
        inspected: the places of numbers whose values Python has read.
        by_value: the traced floats by their random values.
    """

    def __init__(self, seed: int) -> None:
        self.inspected: set[Place] = set()
        self._random = random.Random(seed)
        self.by_value: dict[float, TracedFloat] = {}
        self._by_key: dict[Any, TracedFloat] = {}

    def at(self, place: Place, value: Number) -> TracedFloat | tuple[TracedFloat, ...]:
        """Returns a traced float for the number `value` at a place, or one for each number of a tuple. Only learning rates may be <= 0."""
        if isinstance(value, tuple):
            return tuple(
                self.add((*place, index), functools.partial(_read_item, place, index), frozenset({place}), is_positive=True)
                for index in range(len(value))
            )
        return self.add(place, lambda read: read(place), frozenset({place}), is_positive=place[1] != "lr")

    def add(
        self, key: Any, compute: Callable[[Read], float], places: frozenset[Place] = frozenset(), is_positive: bool = False
    ) -> TracedFloat:
        """Returns the traced float with this key. The first call creates it, with the other arguments as its attributes."""
        if key not in self._by_key:
            number = TracedFloat(self._random.uniform(0.1, 0.9))
            number.key, number.compute, number.table, number.places, number.is_positive = key, compute, self, places, is_positive
            self._by_key[key] = self.by_value[float.__float__(number)] = number
        return self._by_key[key]

    def find(self, value: Any) -> TracedFloat | None:
        """Returns the traced float that has this value, or None. C++ code passes a traced float on as a plain float."""
        return self.by_value.get(float.__float__(value)) if isinstance(value, float) else None


def mark_number(placeholder: Node) -> None:
    """Marks a placeholder of a recorded graph as a Python number."""
    placeholder.meta[_MARK] = True


def is_number(placeholder: Node) -> bool:
    """True if a placeholder is a Python number, not a tensor."""
    return _MARK in placeholder.meta


_MARK = "traced number"


def _multiply(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    return x * _in_dtype_of(number, x)


def _in_dtype_of(number: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns a scalar that does not change x's dtype in arithmetic, and is at least as precise as the op's accumulation dtype."""
    if x.dtype in (torch.float16, torch.bfloat16) and x.dim():
        return number.to(torch.float32)
    return number.to(x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype())


def _scaled(x: torch.Tensor, factor: Any) -> torch.Tensor:
    return _multiply(x, factor) if isinstance(factor, torch.Tensor) else x * factor


def _operand(x: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
    """Returns alpha * other. Either may be a float64 tensor of rank 0 that stands for a traced float. The result does not change the
    dtype of `x` in arithmetic."""
    if isinstance(alpha, torch.Tensor):
        return _scaled(other, alpha) if isinstance(other, torch.Tensor) else _in_dtype_of(alpha, x) * other
    if isinstance(other, torch.Tensor) and not other.dim() and other.dtype == torch.float64:
        other = _in_dtype_of(other, x)
    return other if alpha == 1 else other * alpha


def _lerp(x: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x + _multiply(end - x, weight)


def number_to_power(number: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Returns number ** exponent for a Python number, as a float64 tensor of rank 0.

    For an optimizer's step count the result is float64: eager mode computes decay ** step count with Python floats, and in float32,
    1 - 0.999 ** 1 has only three correct digits.
    """
    if in_optimizer() and not exponent.dim() and exponent.dtype == torch.float32:
        return number ** exponent.to(torch.float64)
    return _in_dtype_of(number, exponent) ** exponent


# A function with the op's arguments, by the op's name or by the name of an overload. Traced floats among the arguments are float64 tensors
# of rank 0.
_TRACED_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, other, alpha=1: x + _operand(x, other, alpha),
    "sub": lambda x, other, alpha=1: x - _operand(x, other, alpha),
    "rsub": lambda x, other, alpha=1: _operand(x, other) - _scaled(x, alpha),
    "mul": lambda x, other: x * _operand(x, other),
    "div": lambda x, other: x / _operand(x, other),
    "addcmul": lambda x, y, z, value=1: x + _scaled(y, value) * z,
    "addcdiv": lambda x, y, z, value=1: x + _scaled(y, value) / z,
    "lerp": _lerp,
    "pow": lambda x, exponent: x ** _in_dtype_of(exponent, x),
    "pow.Scalar": number_to_power,
    "_foreach_pow.ScalarAndTensor": number_to_power,
    "fill": lambda x, value: _in_dtype_of(value, x).expand(x.shape),
    "full_like": lambda x, value, **settings: torch.zeros_like(x, **settings).fill_(value),
}


def op_with_traced_floats(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Returns a function that computes an op with traced floats among its arguments, in place for an in-place op.

    Returns None for an op that is not in `_TRACED_OPS`. The function's attribute `stands_for` is the op.
    """
    name = op._schema.name.partition("::")[2]
    is_foreach = name.startswith("_foreach_")
    inplace = name.endswith("_")
    function = _TRACED_OPS.get(f"{name}.{op._overloadname}", _TRACED_OPS.get(name.removeprefix("_foreach_").removesuffix("_")))
    if function is None or op.namespace != "aten" or "out" in op._overloadname or "mode" in op._overloadname:
        return None
    if not inplace:
        variant = function
    else:

        def variant(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return x.copy_(function(x, *args, **kwargs))

    traced_op: Any = _for_each(variant) if is_foreach else _new_function(variant)
    traced_op.stands_for = op
    return traced_op


def _new_function(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns a function of its own, so that `stands_for` is not set on the shared one."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def _for_each(function: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        def item(value: Any, index: int) -> Any:
            return value[index] if isinstance(value, (list, tuple)) else value

        count = next(len(value) for value in args if isinstance(value, (list, tuple)))
        return [
            function(*(item(value, index) for value in args), **{key: item(value, index) for key, value in kwargs.items()})
            for index in range(count)
        ]

    return run
