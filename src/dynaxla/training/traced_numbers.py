"""Python numbers that a recorded program takes as inputs, such as learning rates and counters.

During a recording, a `TracedNumber` stands for such a number. Python arithmetic on traced numbers gives further traced numbers. A
comparison is answered for the current value, and the answer becomes a condition for replaying the program. A function of torch that is
written in C++ gets a random float, the *stand-in*, in place of a traced number. If a stand-in then is among the arguments of an ATen op,
the recorded op gets an input of the program in its place. Any other read of the value ends the recording.
"""

from __future__ import annotations

import operator
import random
import threading
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..errors import CaptureError
from ..guards.slots import Place
from ..runtime.guards import is_not_observed
from ..runtime.number_tracer import Formula, Input, NumberTrace, NumberTracer, formula_of, inputs_of, value_of
from .value_reads import in_optimizer


class TracedNumberInspected(Exception):
    """Raised when Python reads the value of a traced number other than by arithmetic and comparisons. For example, `int(lr)` does so.

    Attributes:
        places: the places of the numbers that were read.
    """

    def __init__(self, places: Collection[Place]) -> None:
        super().__init__(f"Python reads the value of {sorted(map(str, places))}")
        self.places = places


# The maximum number of conditions of a recording. A loop whose end depends on a number makes a condition in each iteration.
_MAX_CONDITIONS = 100


class TracedNumber(NumberTracer):
    """A number that Python code computes with while a step is recorded. The inputs of its formula are places in the step's state.

    In other threads, and after the recording, a traced number behaves like the plain number.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch with stand-ins for the traced numbers among its arguments; outside the recording, with the numbers."""
        if not all(number.dynaxla_trace.is_recording() for number in traced_numbers_in((args, kwargs))):
            args, kwargs = tree_map(value_of, (args, kwargs or {}))
            return function(*args, **kwargs)
        return call_with_stand_ins(function, args, kwargs or {}) if takes_stand_ins(function) else NotImplemented


def inspect(numbers: Sequence[TracedNumber]) -> NoReturn:
    """Ends the recording, because code needs the values of these numbers, of which there is at least one. Raises: TracedNumberInspected."""
    numbers[0].dynaxla_trace.inspect(*(number.dynaxla_formula for number in numbers))
    raise AssertionError


def takes_stand_ins(function: Any) -> bool:
    """True for a function of torch that may get stand-ins: a function that is written in C++, or an operator of torch.Tensor.

    Any other Python function of torch could compare a stand-in with another number.
    """
    return not isinstance(function, types.FunctionType) or function in _OPERATORS


_OPERATORS = {value for name, value in vars(torch.Tensor).items() if name.startswith("__") and isinstance(value, types.FunctionType)}


def call_with_stand_ins(function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of torch with stand-ins for the traced numbers among its arguments.

    An integer is supported if all tensors have floating-point dtypes, because it then has the effect of a float. Other uses of an integer,
    such as a size, end the recording.
    """
    leaves, spec = tree_flatten((tuple(args), kwargs))
    integers = [leaf for leaf in leaves if type(leaf) is TracedNumber and isinstance(leaf, int)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if integers:
        is_index = function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        if is_index or not tensors or not all(tensor.is_floating_point() for tensor in tensors) or not all(map(is_exact, integers)):
            inspect(integers)
    if function is torch.Tensor.__setitem__ and not tensors[0].is_floating_point():  # would convert the stand-in to an integer
        inspect(traced_numbers_in(leaves))
    args, kwargs = tree_unflatten([leaf.dynaxla_trace.stand_in(leaf) if type(leaf) is TracedNumber else leaf for leaf in leaves], spec)
    try:
        return function(*args, **kwargs)
    except (CaptureError, TracedNumberInspected):
        raise
    except Exception:  # the function may accept the true values, for example integers
        inspect(traced_numbers_in(leaves))


def is_exact(number: TracedNumber) -> bool:
    """True if float64, the dtype of a program's inputs for numbers, is exact for integers up to this one. The test becomes a condition."""
    return bool(abs(number) <= 2**53)


# Ops that convert a number to their result's dtype, and raise an error if the number lies outside the dtype's range.
_CONVERTING_OPS = frozenset(("fill", "full", "full_like", "masked_fill", "scalar_tensor", "pow", "addcmul", "addcdiv", "lerp"))


def check_conversions(op: torch._ops.OpOverload, numbers: Sequence[TracedNumber], tensors: Sequence[torch.Tensor]) -> None:
    """Limits numbers to the range of the dtypes to which an op converts them.

    Args:
        op: an op of ATen.
        numbers: the traced numbers among the op's arguments.
        tensors: the op's results, and the tensors among its arguments.

    Raises: TracedNumberInspected for a dtype for which the function in `_TRACED_OPS` would not give ATen's result, or if a number lies
    outside the range of a dtype.
    """
    name = op._schema.name.partition("::")[2].removeprefix("_foreach_").removesuffix("_")
    if name in _CONVERTING_OPS or "alpha" in (argument.name for argument in op._schema.arguments):
        for dtype in {tensor.dtype for tensor in tensors} - {torch.bool}:
            if not dtype.is_floating_point and not (dtype.is_complex and name != "pow"):
                inspect(numbers)
            for number in numbers:
                number.dynaxla_trace.set_limit(number, torch.finfo(dtype).max)


class TracedNumbers(NumberTrace):
    """The traced numbers of one recording.

    Attributes:
        places: the places of all numbers.
        inspected: the places of numbers whose values Python has read.
        limits: the largest magnitude of a number with which the program may run, by the number's formula.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._thread: int | None = threading.get_ident()
        self.places: set[Place] = set()
        self.inspected: set[Place] = set()
        self.limits: dict[Formula, float] = {}
        self._random = random.Random(seed)
        self._by_stand_in: dict[float, TracedNumber] = {}
        self._stand_ins: dict[Formula, float] = {}

    def is_recording(self) -> bool:
        """True in the thread that records, until `finish`."""
        return self._thread == threading.get_ident()

    def finish(self) -> None:
        """Ends the recording. A traced number that other code has kept then behaves like the plain number."""
        self._thread = None

    def at(self, place: Place, value: Any) -> Any:
        """Returns a traced number for a number at a place; for a tuple of numbers, a tuple of traced numbers."""
        self.places.add(place)
        if isinstance(value, tuple):
            return tuple(TracedNumber(self, (operator.getitem, Input(place), formula_of(index)), item) for index, item in enumerate(value))
        return TracedNumber(self, Input(place), value)

    def inspect(self, *formulas: Formula) -> NoReturn:
        """Ends the recording, because Python code reads the values of formulas. Raises: TracedNumberInspected."""
        places = frozenset(place for formula in formulas for place in inputs_of(formula))
        self.inspected |= places
        raise TracedNumberInspected(places)

    def compare(self, function: Callable[..., Any], *operands: Any) -> bool:
        """Compares numbers, and records the outcome as a condition. Raises: TracedNumberInspected for too many conditions."""
        outcome = super().compare(function, *operands)
        if len(self.conditions) > _MAX_CONDITIONS and self.is_recording():
            self.inspect(*map(formula_of, operands))
        return outcome

    def set_limit(self, number: TracedNumber, limit: float) -> None:
        """Allows only values with a magnitude of at most `limit`. Raises: TracedNumberInspected if the recorded value is larger."""
        formula = number.dynaxla_formula
        if not any(True for _ in inputs_of(formula)):  # the value of a tensor
            return
        self.limits[formula] = min(limit, self.limits.get(formula, limit))
        if not abs(number.dynaxla_value) <= limit:
            self.inspect(formula)

    @is_not_observed
    def stand_in(self, number: TracedNumber) -> float:
        """Returns the stand-in of a traced number: a random float, which practically no other number equals."""
        if number.dynaxla_formula not in self._stand_ins:
            value = self._stand_ins[number.dynaxla_formula] = self._random.uniform(0.1, 0.9)
            self._by_stand_in[value] = number
        return self._stand_ins[number.dynaxla_formula]

    def find(self, value: Any) -> TracedNumber | None:
        """Returns the traced number of a stand-in; None for any other value."""
        return self._by_stand_in.get(value) if type(value) is float else None


def traced_numbers_in(values: Any) -> list[TracedNumber]:
    """Returns the traced numbers in nested containers."""
    return [item for item in tree_leaves(values) if type(item) is TracedNumber]


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
    """Returns a number as a tensor of rank 0, of a dtype that does not change x's dtype in arithmetic.

    If x has a half type and a higher rank, the dtype is float32, in which ATen computes.
    """
    if x.dtype in _HALF_TYPES and x.dim():
        return number.to(torch.float32)
    return number.to(x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype())


_HALF_TYPES = (torch.float16, torch.bfloat16)


def _rounded_once(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps a function of (x, other): if x is a half-type tensor of rank 0, the function gets x in float32, and the result is rounded back.

    Without the wrapper, a float32 number and a half-type tensor, both of rank 0, would give a float32 result.
    """

    def run(x: torch.Tensor, other: Any, *alpha: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype not in _HALF_TYPES or x.dim() or (isinstance(other, torch.Tensor) and other.dtype not in (x.dtype, torch.float64)):
            return function(x, other, *alpha, **kwargs)
        return function(x.to(torch.float32), other, *alpha, **kwargs).to(x.dtype)

    return run


def _scaled(x: torch.Tensor, factor: Any) -> torch.Tensor:
    return _multiply(x, factor) if isinstance(factor, torch.Tensor) else x * factor


def _operand(x: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
    """Returns alpha * other as an operand that does not change the dtype of `x` in arithmetic.

    Each of `alpha` and `other` may be a traced number, which is a float64 tensor of rank 0.
    """
    if isinstance(alpha, torch.Tensor):
        return _scaled(other, alpha) if isinstance(other, torch.Tensor) else _in_dtype_of(alpha, x) * other
    if isinstance(other, torch.Tensor) and not other.dim() and other.dtype == torch.float64:
        other = _in_dtype_of(other, x)
    return other if alpha == 1 else other * alpha


def _lerp(x: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x + _multiply(end - x, weight)


def _comparison_with_number(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, other: function(x, _in_dtype_of(other, x))


def _device_setting(settings: dict[str, Any]) -> dict[str, Any]:
    return {"device": settings["device"]} if settings.get("device") is not None else {}


def number_to_power(number: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Returns number ** exponent for a traced number, which is a float64 tensor of rank 0.

    If the exponent is an optimizer's step count, the result is float64: eager mode computes decay ** step count with Python floats. In
    float32, 1 - 0.999 ** 1 has a relative error of 1e-5.
    """
    if in_optimizer() and not exponent.dim() and exponent.dtype == torch.float32:
        return number ** exponent.to(torch.float64)
    return _in_dtype_of(number, exponent) ** exponent


# By the name of an op or of an overload: a function that computes the op. The function has the op's arguments, with float64 tensors of rank
# 0 in place of traced numbers.
_TRACED_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": _rounded_once(lambda x, other, alpha=1: x + _operand(x, other, alpha)),
    "sub": _rounded_once(lambda x, other, alpha=1: x - _operand(x, other, alpha)),
    "rsub": _rounded_once(lambda x, other, alpha=1: _operand(x, other) - _scaled(x, alpha)),
    "mul": _rounded_once(lambda x, other: x * _operand(x, other)),
    "div": _rounded_once(lambda x, other: x / _operand(x, other)),
    "addcmul": lambda x, y, z, value=1: x + _scaled(y, value) * z,
    "addcdiv": lambda x, y, z, value=1: x + _scaled(y, value) / z,
    "lerp": _lerp,
    **{name: _comparison_with_number(getattr(torch, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "masked_fill": lambda x, mask, value: x.masked_fill(mask, value.to(x.dtype)),
    "scalar_tensor": lambda value, *, dtype=None, **settings: value.to(
        dtype=dtype or torch.get_default_dtype(), **_device_setting(settings)
    ),
    "pow": lambda x, exponent: x ** _in_dtype_of(exponent, x),
    "pow.Scalar": number_to_power,
    "_foreach_pow.ScalarAndTensor": number_to_power,
    "fill": lambda x, value: torch.empty_like(x).copy_(value),
    "full": lambda size, value, **settings: torch.zeros(size, **settings).fill_(value),
    "full_like": lambda x, value, **settings: torch.zeros_like(x, **settings).fill_(value),
}


def op_with_traced_numbers(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Returns a function that computes an op with traced numbers among its arguments, in place for an in-place op.

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
    """Returns a new function that calls `function`, so that `stands_for` is not set on the function that several ops share."""
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
