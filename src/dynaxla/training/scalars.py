"""Python numbers that a recorded program takes as inputs: a learning rate may change without a new program.

During a recording, such a number is a `TracedFloat`: a float with a random value that no other float has. Python arithmetic on a traced
float gives another traced float. If an ATen op gets a traced float as a plain number, the random value identifies the traced float.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..guards.slots import Place


class TracedFloatInspected(Exception):
    """Raised when Python reads the value of a traced float, as in `if lr > 0`."""


Read = Callable[[Place], float]


class TracedFloat(float):
    """A float that Python code computes with while a step is recorded; its value is random, and identifies it.

    Attributes:
        key: the number's origin: a place (a path in the step's state), or an operation and its operands' keys.
        compute: computes the true value, given a function that reads the number at a place.
        table: all traced floats of the recording.
    """

    key: Any
    compute: Callable[[Read], float]
    table: TracedFloats

    def _apply(self, name: str, function: Callable[..., float], *operands: float) -> TracedFloat:
        key = name, *(operand.key if isinstance(operand, TracedFloat) else operand for operand in operands)
        return self.table.add(key, lambda read: function(*(_value(operand, read) for operand in operands)))

    def _inspected(self, *_: Any) -> Any:
        self.table.is_inspected = True
        raise TracedFloatInspected

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __int__ = __round__ = __trunc__ = __floor__ = __ceil__ = _inspected
    __hash__ = float.__hash__

    def __neg__(self) -> TracedFloat:
        return self._apply("neg", operator.neg, self)

    def __pos__(self) -> TracedFloat:
        return self

    def __abs__(self) -> TracedFloat:
        return self._apply("abs", abs, self)


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
        is_inspected: True if Python has read the value of a traced float.
        by_value: the traced floats by their random values.
    """

    def __init__(self, seed: int) -> None:
        self.is_inspected = False
        self._random = random.Random(seed)
        self.by_value: dict[float, TracedFloat] = {}
        self._by_key: dict[Any, TracedFloat] = {}

    def at(self, place: Place) -> TracedFloat:
        """Returns the traced float of the number at a place."""
        return self.add(place, lambda read: read(place))

    def add(self, key: Any, compute: Callable[[Read], float]) -> TracedFloat:
        """Returns the traced float with this key. The first call creates it."""
        if key not in self._by_key:
            number = TracedFloat(self._random.uniform(0.1, 0.9))
            number.key, number.compute, number.table = key, compute, self
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


# A function with the op's arguments, by the op's name. Traced floats among the arguments are float64 tensors of rank 0.
_TRACED_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, other, alpha=1: x + _operand(x, other, alpha),
    "sub": lambda x, other, alpha=1: x - _operand(x, other, alpha),
    "rsub": lambda x, other, alpha=1: _operand(x, other) - _scaled(x, alpha),
    "mul": lambda x, other: x * _operand(x, other),
    "div": lambda x, other: x / _operand(x, other),
    "addcmul": lambda x, y, z, value=1: x + _scaled(y, value) * z,
    "addcdiv": lambda x, y, z, value=1: x + _scaled(y, value) / z,
    "lerp": _lerp,
    "fill": lambda x, value: _in_dtype_of(value, x).expand(x.shape),
    "full_like": lambda x, value, **settings: torch.zeros_like(x, **settings).fill_(value),
}


def op_with_traced_floats(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Returns a function that computes an op with traced floats among its arguments, in place for an in-place op.

    Returns None for an op that is not in `_TRACED_OPS`. The function's attribute `stands_for` is the op.
    """
    name = op._schema.name.partition("::")[2]
    is_foreach = name.startswith("_foreach_")
    name = name.removeprefix("_foreach_")
    inplace = name.endswith("_")
    function = _TRACED_OPS.get(name.removesuffix("_"))
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
    def run(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        def item(value: Any, index: int) -> Any:
            return value[index] if isinstance(value, (list, tuple)) else value

        return [
            function(tensor, *(item(value, index) for value in args), **{key: item(value, index) for key, value in kwargs.items()})
            for index, tensor in enumerate(tensors)
        ]

    return run
