"""Python numbers that a recorded program takes as inputs, such as learning rates and counters.

During a recording, such a number is a `TracedNumber`. Python arithmetic on it gives another traced number. A comparison is answered for the
true value, and becomes a condition for replaying the program. A function of torch that is written in C++ gets a random float in its place.
An ATen op with such a float among its arguments gets an input of the program instead. All else that reads the value ends the recording.
"""

from __future__ import annotations

import numbers
import operator
import random
import threading
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..errors import CaptureError
from ..guards.slots import Place
from .value_reads import in_optimizer


class TracedNumberInspected(Exception):
    """Raised when Python reads the value of a traced number other than by arithmetic and comparisons, as `int(lr)` does.

    Attributes:
        places: the places of the numbers that were read.
    """

    def __init__(self, places: Collection[Place]) -> None:
        super().__init__(f"Python reads the value of {sorted(map(str, places))}")
        self.places = places


# Returns the number, or the tuple of numbers, at a place.
Read = Callable[[Place], Any]
# A loop whose end depends on a number would make a condition in each iteration.
_MAX_CONDITIONS = 100


class TracedNumber:
    """A number that Python code computes with while a step is recorded. Its class reads as `int` or `float`.

    It is no subclass of these, because code written in C, such as a list's slice, would read the value without asking. In other threads,
    and after the recording, it does what the plain number does.

    Attributes (no other object has an attribute of such a name):
        dynaxla_key: the number's origin: a place (a path in the step's state), or an operation and its operands' keys.
        dynaxla_compute: computes the value, given a function that reads the number at a place.
        dynaxla_value: the value in the state that is recorded.
        dynaxla_places: the places of the numbers that it is computed from.
        dynaxla_table: all traced numbers of the recording.
    """

    __array_ufunc__ = None  # makes NumPy leave arithmetic with this class to the methods below
    __slots__ = ("dynaxla_compute", "dynaxla_key", "dynaxla_places", "dynaxla_table", "dynaxla_value")

    def __init__(self, key: Any, compute: Callable[[Read], Any], value: Any, places: frozenset[Place], table: TracedNumbers) -> None:
        self.dynaxla_key, self.dynaxla_compute, self.dynaxla_value = key, compute, value
        self.dynaxla_places, self.dynaxla_table = places, table

    __class__ = property(lambda self: type(self.dynaxla_value))

    def dynaxla_apply(self, name: str, function: Callable[..., Any], *operands: Any) -> Any:
        key = name, *map(_key, operands)
        values = [_true_value(operand) for operand in operands]
        if not self.dynaxla_table.is_recording():
            return function(*values)
        if name == "pow" and not self.dynaxla_has_fixed_type(*operands):
            self.dynaxla_inspect()
        places = frozenset().union(*(operand.dynaxla_places for operand in operands if type(operand) is TracedNumber))

        def compute(read: Read) -> Any:
            return function(*(_value(operand, read) for operand in operands))

        return self.dynaxla_table.add(key, compute, function(*values), places)

    def dynaxla_has_fixed_type(self, base: Any, exponent: Any) -> bool:
        """True if base ** exponent has the same type for all numbers for which the conditions hold."""
        is_real = self.dynaxla_ask("gt", operator.gt, base, 0)
        return is_real and (isinstance(base, float) or isinstance(exponent, float) or self.dynaxla_ask("ge", operator.ge, exponent, 0))

    def dynaxla_ask(self, name: str, function: Callable[..., bool], *operands: Any) -> bool:
        """Returns the answer of a comparison, which becomes a condition for replaying the program."""
        answer = function(*map(_true_value, operands))
        if any(type(operand) is TracedNumber for operand in operands) and self.dynaxla_table.is_recording():
            conditions = self.dynaxla_table.conditions
            conditions[name, *map(_key, operands)] = lambda read: function(*(_value(operand, read) for operand in operands)), answer
            if len(conditions) > _MAX_CONDITIONS:
                self.dynaxla_inspect()
        return answer

    def dynaxla_inspect(self, *_: Any) -> NoReturn:
        """Ends the recording, because Python code reads the value."""
        inspect([self])

    def __getattr__(self, name: str) -> Any:
        if hasattr(self.dynaxla_value, name) and self.dynaxla_table.is_recording():  # a method of numbers
            self.dynaxla_inspect()
        return getattr(self.dynaxla_value, name)

    def __bool__(self) -> bool:
        return self.dynaxla_ask("bool", bool, self)

    def __neg__(self) -> Any:
        return self.dynaxla_apply("neg", operator.neg, self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self.dynaxla_apply("abs", abs, self)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch with floats that stand for the traced numbers."""
        if not all(number.dynaxla_table.is_recording() for number in traced_numbers_in((args, kwargs))):
            args, kwargs = tree_map(_true_value, (args, kwargs or {}))
            return function(*args, **kwargs)
        return call_with_stand_ins(function, args, kwargs or {}) if takes_stand_ins(function) else NotImplemented


def inspect(numbers: Sequence[TracedNumber]) -> NoReturn:
    """Ends the recording, because the values of these numbers are needed."""
    places = frozenset().union(*(number.dynaxla_places for number in numbers))
    numbers[0].dynaxla_table.inspected |= places
    raise TracedNumberInspected(places)


def takes_stand_ins(function: Any) -> bool:
    """True for a function of torch that is written in C++, and for an operator of tensors.

    Another function written in Python could compare the float that stands for a number.
    """
    return not isinstance(function, types.FunctionType) or function in _OPERATORS


_OPERATORS = {value for name, value in vars(torch.Tensor).items() if name.startswith("__") and isinstance(value, types.FunctionType)}


def call_with_stand_ins(function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of torch with floats that stand for the traced numbers among its arguments.

    An integer is allowed if all tensors have floating-point dtypes: there it means the same as a float. Other uses, such as a size, end the
    recording.
    """
    leaves, spec = tree_flatten((tuple(args), kwargs))
    integers = [leaf for leaf in leaves if type(leaf) is TracedNumber and isinstance(leaf, int)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if integers:
        is_index = function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        if is_index or not tensors or not all(tensor.is_floating_point() for tensor in tensors) or not all(map(is_exact, integers)):
            inspect(integers)
    if function is torch.Tensor.__setitem__ and not tensors[0].is_floating_point():  # it may convert to an integer
        inspect(traced_numbers_in(leaves))
    args, kwargs = tree_unflatten([leaf.dynaxla_table.stand_in(leaf) if type(leaf) is TracedNumber else leaf for leaf in leaves], spec)
    try:
        return function(*args, **kwargs)
    except (CaptureError, TracedNumberInspected):
        raise
    except Exception:  # the true values may be accepted, for example where integers are needed
        inspect(traced_numbers_in(leaves))


def is_exact(number: TracedNumber) -> bool:
    """True if float64, the dtype of a number as an input of a program, has its value. This becomes a condition."""
    return bool(abs(number) <= 2**53)


# Ops that convert a number to their result's dtype, and raise an error if it lies outside the dtype's range.
_CONVERTING_OPS = frozenset(("fill", "full", "full_like", "masked_fill", "scalar_tensor", "pow", "addcmul", "addcdiv", "lerp"))


def check_conversions(op: torch._ops.OpOverload, numbers: Sequence[TracedNumber], tensors: Sequence[torch.Tensor]) -> None:
    """Sets the limits of the numbers that an op converts to a dtype.

    Args:
        op: an op of ATen.
        numbers: the traced numbers among its arguments.
        tensors: its results, and the other tensors among its arguments.

    Raises: TracedNumberInspected if `_TRACED_OPS` computes another result than ATen, or if a number lies outside the range of a dtype.
    """
    name = op._schema.name.partition("::")[2].removeprefix("_foreach_").removesuffix("_")
    if name in _CONVERTING_OPS or "alpha" in (argument.name for argument in op._schema.arguments):
        for dtype in {tensor.dtype for tensor in tensors} - {torch.bool}:
            if not dtype.is_floating_point and not (dtype.is_complex and name != "pow"):
                inspect(numbers)
            for number in numbers:
                number.dynaxla_table.set_limit(number, torch.finfo(dtype).max)


def _key(operand: Any) -> Any:
    return operand.dynaxla_key if type(operand) is TracedNumber else (type(operand), operand)


def _true_value(operand: Any) -> Any:
    return operand.dynaxla_value if type(operand) is TracedNumber else operand


def _value(operand: Any, read: Read) -> Any:
    return operand.dynaxla_compute(read) if type(operand) is TracedNumber else operand


def _is_operand(value: Any) -> bool:
    return type(value) in (TracedNumber, int, float, bool)


def _arithmetic(name: str, function: Callable[[Any, Any], Any], reflected: bool) -> Callable[[TracedNumber, Any], Any]:
    def method(self: TracedNumber, other: Any) -> Any:
        if not _is_operand(other):
            return NotImplemented
        return self.dynaxla_apply(name, function, *((other, self) if reflected else (self, other)))

    return method


def _comparison_method(name: str, function: Callable[[Any, Any], bool]) -> Callable[[TracedNumber, Any], Any]:
    def method(self: TracedNumber, other: Any) -> Any:
        if _is_operand(other):
            return self.dynaxla_ask(name, function, self, other)
        if isinstance(other, (numbers.Number, np.generic)):  # complex numbers, NumPy's, decimals and fractions
            if self.dynaxla_table.is_recording():
                self.dynaxla_inspect()
            return function(self.dynaxla_value, other)
        return NotImplemented

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    _function = getattr(operator, _name)
    setattr(TracedNumber, f"__{_name}__", _arithmetic(_name, _function, False))
    setattr(TracedNumber, f"__r{_name}__", _arithmetic(_name, _function, True))


def _reader(name: str) -> Callable[..., Any]:
    """Returns a special method that reads the number's value."""

    def method(self: TracedNumber, *args: Any) -> Any:
        if self.dynaxla_table.is_recording():
            self.dynaxla_inspect()
        return getattr(self.dynaxla_value, name)(*args)

    return method


for _name in (
    *("hash", "int", "float", "index", "complex", "array", "round", "trunc", "floor", "ceil", "repr", "str", "format", "reduce_ex"),
    *("invert", "divmod", "rdivmod", "and", "or", "xor", "lshift", "rshift", "rand", "ror", "rxor", "rlshift", "rrshift"),
):
    setattr(TracedNumber, f"__{_name}__", _reader(f"__{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedNumber, f"__{_name}__", _comparison_method(_name, getattr(operator, _name)))


class TracedNumbers:
    """The traced numbers of one recording.

    Attributes:
        places: the places of all numbers.
        inspected: the places of numbers whose values Python has read.
        conditions: for each comparison that Python has made, by its key: a function that gives the answer, and the answer.
        limits: the largest magnitudes with which the program may run, by the numbers' keys.
    """

    def __init__(self, seed: int) -> None:
        self._thread: int | None = threading.get_ident()
        self.places: set[Place] = set()
        self.inspected: set[Place] = set()
        self.conditions: dict[Any, tuple[Callable[[Read], bool], bool]] = {}
        self.limits: dict[Any, float] = {}
        self._random = random.Random(seed)
        self._by_stand_in: dict[float, TracedNumber] = {}
        self._stand_ins: dict[Any, float] = {}
        self._by_key: dict[Any, TracedNumber] = {}

    def is_recording(self) -> bool:
        """True in the thread that records, until `finish`."""
        return self._thread == threading.get_ident()

    def finish(self) -> None:
        """Ends the recording: another thread may have kept a traced number."""
        self._thread = None

    def at(self, place: Place, value: Any) -> Any:
        """Returns a traced number for the number `value` at a place, or one for each number of a tuple."""
        self.places.add(place)
        if isinstance(value, tuple):
            items = enumerate(value)
            return tuple(self.add((*place, index), _item_reader(place, index), item, frozenset({place})) for index, item in items)
        return self.add(place, lambda read: read(place), value, frozenset({place}))

    def add(self, key: Any, compute: Callable[[Read], Any], value: Any, places: frozenset[Place] = frozenset()) -> TracedNumber:
        """Returns the traced number with this key. The first call creates it, with the other arguments as its attributes."""
        if key not in self._by_key:
            self._by_key[key] = TracedNumber(key, compute, value, places, self)
        return self._by_key[key]

    def set_limit(self, number: TracedNumber, limit: float) -> None:
        """Allows only values with a magnitude of at most `limit`. Raises: TracedNumberInspected if the recorded value is larger."""
        self.limits[number.dynaxla_key] = min(limit, self.limits.get(number.dynaxla_key, limit))
        if not abs(number.dynaxla_value) <= limit:
            number.dynaxla_inspect()

    def stand_in(self, number: TracedNumber) -> float:
        """Returns the float that stands for a traced number in C++ code: a random value that no other float has."""
        if number.dynaxla_key not in self._stand_ins:
            value = self._stand_ins[number.dynaxla_key] = self._random.uniform(0.1, 0.9)
            self._by_stand_in[value] = number
        return self._stand_ins[number.dynaxla_key]

    def find(self, value: Any) -> TracedNumber | None:
        """Returns the traced number that a float stands for; None for another value."""
        return self._by_stand_in.get(value) if type(value) is float else None


def _item_reader(place: Place, index: int) -> Callable[[Read], Any]:
    return lambda read: read(place)[index]


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
    """Returns a scalar that does not change x's dtype in arithmetic, and is at least as precise as the op's accumulation dtype."""
    if x.dtype in _HALF_TYPES and x.dim():
        return number.to(torch.float32)
    return number.to(x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype())


_HALF_TYPES = (torch.float16, torch.bfloat16)


def _rounded_once(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns the function for which a half-type tensor of rank 0 is float32, as a number is; the result has the half type.

    Between tensors of rank 0, a float32 number would make the result float32.
    """

    def run(x: torch.Tensor, other: Any, *alpha: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype not in _HALF_TYPES or x.dim() or (isinstance(other, torch.Tensor) and other.dtype not in (x.dtype, torch.float64)):
            return function(x, other, *alpha, **kwargs)
        return function(x.to(torch.float32), other, *alpha, **kwargs).to(x.dtype)

    return run


def _scaled(x: torch.Tensor, factor: Any) -> torch.Tensor:
    return _multiply(x, factor) if isinstance(factor, torch.Tensor) else x * factor


def _operand(x: torch.Tensor, other: Any, alpha: Any = 1) -> Any:
    """Returns alpha * other. Either may be a float64 tensor of rank 0 that stands for a traced number. The result does not change the
    dtype of `x` in arithmetic."""
    if isinstance(alpha, torch.Tensor):
        return _scaled(other, alpha) if isinstance(other, torch.Tensor) else _in_dtype_of(alpha, x) * other
    if isinstance(other, torch.Tensor) and not other.dim() and other.dtype == torch.float64:
        other = _in_dtype_of(other, x)
    return other if alpha == 1 else other * alpha


def _lerp(x: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x + _multiply(end - x, weight)


def _comparison_with_number(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, other: function(x, _in_dtype_of(other, x))


def _placement(settings: dict[str, Any]) -> dict[str, Any]:
    return {"device": settings["device"]} if settings.get("device") is not None else {}


def number_to_power(number: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Returns number ** exponent for a Python number, as a float64 tensor of rank 0.

    For an optimizer's step count the result is float64: eager mode computes decay ** step count with Python floats, and in float32,
    1 - 0.999 ** 1 has only three correct digits.
    """
    if in_optimizer() and not exponent.dim() and exponent.dtype == torch.float32:
        return number ** exponent.to(torch.float64)
    return _in_dtype_of(number, exponent) ** exponent


# A function with the op's arguments, by the op's name or by the name of an overload. Traced numbers among the arguments are float64 tensors
# of rank 0.
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
    "scalar_tensor": lambda value, *, dtype=None, **settings: value.to(dtype=dtype or torch.get_default_dtype(), **_placement(settings)),
    "pow": lambda x, exponent: x ** _in_dtype_of(exponent, x),
    "pow.Scalar": number_to_power,
    "_foreach_pow.ScalarAndTensor": number_to_power,
    "fill": lambda x, value: _in_dtype_of(value, x).expand(x.shape),
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
