"""A pass over a traced program that defers transposes until an op needs them; most of them never run.

Convolutions on the CPU want channels-last operands: a transpose stands before each convolution and another one after it. XLA cannot cancel
such pairs: it computes the ops between them in the original order, with transposes amid its loops. This pass evaluates the traced program
once more and tracks the memory order of each array; a transpose only changes that order. Elementwise functions, reductions, windows, slices
and similar ops work in any order, reshapes in many. For all other ops, operands are transposed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array, lax

from ...lowering.cpu.materialize import in_memory
from ...lowering.cpu.vectorized_reductions import is_foldable, sum_neighbours, sum_rows
from .evaluation import Evaluation, bind
from .reshapes import joining, reshaped

Order = tuple[int, ...]
Orders = dict[int, Order]


@dataclass(frozen=True)
class Ordered:
    """A value whose array has its dimensions in another order.

    Attributes:
        array: dimension i is dimension order[i] of the value.
        order: a permutation.
        made: if a function of _SIMPLE computed the array, the equation and its operands; else None.
    """

    array: Any
    order: Order
    made: tuple[Any, Sequence[Value]] | None = None

    @property
    def is_plain(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    def plain(self) -> Any:
        """Returns the value itself."""
        return self.array if self.is_plain else lax.transpose(self.array, tuple(np.argsort(self.order)))

    def to(self, order: Order) -> Any:
        """Returns the value with its dimensions in this order."""
        if self.order == order:
            return self.array
        return lax.transpose(self.array, tuple(self.order.index(dim) for dim in order))


def _plain(array: Any) -> Ordered:
    return Ordered(array, tuple(range(np.ndim(array))))


@dataclass(frozen=True)
class _Broadcast:
    """A deferred broadcast, computed in the order that a consumer needs.

    Attributes:
        operand: the value to broadcast.
        shape: of the result.
        dims: the dimensions of the result that are those of the operand.
    """

    operand: Ordered
    shape: tuple[int, ...]
    dims: tuple[int, ...]

    def to(self, order: Order) -> Any:
        wanted = sorted(range(len(self.dims)), key=lambda dim: order.index(self.dims[dim]))
        array = self.operand.to(tuple(wanted))
        places = tuple(order.index(self.dims[dim]) for dim in wanted)
        return lax.broadcast_in_dim(array, tuple(self.shape[dim] for dim in order), places)

    def plain(self) -> Any:
        return self.to(tuple(range(len(self.shape))))

    def made(self) -> Ordered:
        """Returns the broadcast in its operand's memory order, with each new dimension after its predecessor."""
        order = [self.dims[dim] for dim in self.operand.order]
        for dim in range(len(self.shape)):
            if dim not in order:
                order.insert(order.index(dim - 1) + 1 if dim else 0, dim)
        return Ordered(self.to(tuple(order)), tuple(order))


Value = Ordered | _Broadcast


def defer_transposes(program: Callable[..., Any], platform: str, free: Collection[int] = ()) -> tuple[Callable[..., Any], Orders]:
    """Returns the same function for one platform, with transposes deferred, and the orders of its free results.

    The function must be traced, by `jax.jit` for example. Tracing fills the orders: dimension i of a free result is dimension
    orders[index][i] of the original result. Results without an entry have the original order.

    Args:
        free: indices of the results that may have their dimensions in any order.
    """
    evaluation = _TransposeEvaluation(platform, free)
    return evaluation.of(program), evaluation.orders


class _TransposeEvaluation(Evaluation[Value]):
    title = "transposes"

    def __init__(self, platform: str, free: Collection[int]) -> None:
        super().__init__(platform)
        self._free = free
        self.orders: Orders = {}

    def lift(self, array: Any) -> Value:
        return _plain(array)

    def lower(self, value: Value) -> Any:
        return value.plain()

    def give(self, index: int, value: Value) -> Any:
        if index not in self._free or not isinstance(value, Ordered):
            return value.plain()
        self.orders[index] = value.order
        return value.array

    def in_memory(self, value: Value) -> Value:
        return Ordered(in_memory(value.array), value.order) if isinstance(value, Ordered) else _plain(in_memory(value.plain()))

    def apply(self, equation: Any, operands: list[Value]) -> Sequence[Value]:
        return _apply(equation, operands)


def _apply(equation: Any, operands: list[Value]) -> Sequence[Value]:
    name, params = equation.primitive.name, equation.params
    if name == "transpose":
        return [_transpose(operands[0], params["permutation"])]
    if name in _RESHAPES and (moved := _reshape(equation, operands[0])) is not None:
        return [moved]
    if name == "broadcast_in_dim" and len(operands) == 1 and isinstance(operands[0], Ordered):
        return [_Broadcast(operands[0], params["shape"], params["broadcast_dimensions"])]
    if name == "conv_general_dilated":
        return _convolution(equation, operands)
    if name == "gather" and (taken := _gather(equation, operands)) is not None:
        return [taken]
    order = _common_order(operands)
    if order is not None and name in ELEMENTWISE:
        results = _bound(equation, _in_order(operands, order), params, order)
        return [Ordered(result.array, order, (equation, operands)) for result in results] if name in _SIMPLE else list(results)
    if order is not None and name in _BY_DIMENSION:
        return _bound(equation, _in_order(operands, order), _BY_DIMENSION[name](dict(params), order), order)
    if order is not None and name in REDUCTIONS:
        axes = params["axes"]
        remaining = [dim for dim in order if dim not in axes]
        names = sorted(remaining)
        changed = dict(params, axes=tuple(sorted(order.index(axis) for axis in axes)))
        result = tuple(names.index(dim) for dim in remaining)
        (array,) = _in_order(operands, order)
        if name == "reduce_sum" and is_foldable(array, changed["axes"]):
            return [Ordered(_sum_rows(operands[0], array, order, changed["axes"]), result)]
        if name == "reduce_sum":
            return [Ordered(sum_neighbours(array, changed["axes"]), result)]
        return _bound(equation, [array], changed, result)
    return _bound(equation, [item.plain() for item in operands], params, None)


def _sum_rows(value: Value, array: Array, order: Order, axes: Sequence[int]) -> Array:
    """Returns `sum_rows` of the array. If a function of _SIMPLE computed it, the sum is computed in parts, with the function fused in.

    XLA does not fuse an elementwise function into the sum over its rows: it writes the function's whole result to memory first. The parts
    of the function's result are computed and added to each other in one loop.
    """
    axis = next((axis for axis in axes if array.shape[axis] > 1), axes[0])
    size = array.shape[axis]
    count = max(count for count in range(1, _PARTS + 1) if size % count == 0)
    if count == 1 or not isinstance(value, Ordered) or value.made is None:
        return sum_rows(array, axes)
    length = size // count
    parts = [_part(value, order, axis, start, start + length, _DEPTH) for start in range(0, size, length)]
    total = functools.reduce(lax.add, parts)
    return sum_rows(total, axes) if is_foldable(total, axes) else lax.reduce_sum(lax.optimization_barrier(total), axes)


def _part(value: Value, order: Order, axis: int, start: int, stop: int, depth: int) -> Any:
    """Returns the slice of a value from start to stop along dimension order[axis], computed from slices of the operands in `made`."""
    if not _rank(value):
        return value.plain()
    if isinstance(value, _Broadcast) and order[axis] not in value.dims:
        shape = tuple(stop - start if dim == order[axis] else size for dim, size in enumerate(value.shape))
        return _Broadcast(value.operand, shape, value.dims).to(order)
    if isinstance(value, _Broadcast) or value.made is None or not depth:
        return lax.slice_in_dim(value.to(order), start, stop, axis=axis)
    equation, operands = value.made
    (result,) = _bound(equation, [_part(item, order, axis, start, stop, depth - 1) for item in operands], equation.params, order)
    return result.array


def _in_order(operands: Sequence[Value], order: Order) -> list[Any]:
    return [item.to(order) if _rank(item) else item.plain() for item in operands]


def _bound(equation: Any, arrays: Sequence[Any], params: dict[str, Any], order: Order | None) -> Sequence[Ordered]:
    """Binds an equation to arrays. `order` is that of the results; None means that they are plain."""
    results = bind(equation, arrays, params)
    return [_plain(result) if order is None else Ordered(result, order) for result in results]


def _rank(value: Value) -> int:
    return len(value.shape) if isinstance(value, _Broadcast) else len(value.order)


def _common_order(operands: Sequence[Value]) -> Order | None:
    """Returns the order in which to compute: that of the largest operand that is not plain, else the plain one. None for unequal ranks."""
    ranks = {_rank(item) for item in operands} - {0}
    if len(ranks) != 1:
        return None
    others = [item for item in operands if isinstance(item, Ordered) and not item.is_plain]
    return max(others, key=lambda item: item.array.size).order if others else tuple(range(ranks.pop()))


def _transpose(value: Value, permutation: Sequence[int]) -> Value:
    moved = {dim: place for place, dim in enumerate(permutation)}
    if isinstance(value, _Broadcast):
        return _Broadcast(value.operand, tuple(value.shape[dim] for dim in permutation), tuple(moved[dim] for dim in value.dims))
    return Ordered(value.array, tuple(moved[dim] for dim in value.order))


def _reshape(equation: Any, value: Value) -> Value | None:
    """Returns the reshaped value in its memory order; None if that needs the plain value, or the equation permutes or repeats elements."""
    if equation.primitive.name == "reshape" and equation.params["dimensions"] is not None:
        return None
    wanted = equation.outvars[0].aval.shape
    if isinstance(value, _Broadcast):
        value = value.made()
    if value.is_plain or value.array.size != math.prod(wanted):
        return None
    shape = [value.array.shape[value.order.index(dim)] for dim in range(len(value.order))]
    if (found := reshaped(shape, value.order, wanted)) is not None:
        return Ordered(lax.reshape(value.array, found[0]), found[1])
    if (order := joining(shape, value.order, wanted)) is not None and (found := reshaped(shape, order, wanted)) is not None:
        return Ordered(lax.reshape(value.to(order), found[0]), found[1])
    return None


def _convolution(equation: Any, operands: Sequence[Value]) -> Sequence[Value]:
    """Binds a convolution, whose operands XLA accepts in any order; the result gets the order of the first one, by role of dimension."""
    x, y = (item if isinstance(item, Ordered) else _plain(item.plain()) for item in operands)
    numbers = equation.params["dimension_numbers"]
    x_spec, y_spec = (tuple(item.order.index(dim) for dim in spec) for item, spec in ((x, numbers.lhs_spec), (y, numbers.rhs_spec)))
    meaning = dict(zip(numbers.lhs_spec, numbers.out_spec, strict=True))
    order = tuple(meaning[dim] for dim in x.order)
    changed = lax.ConvDimensionNumbers(x_spec, y_spec, tuple(order.index(dim) for dim in numbers.out_spec))
    return _bound(equation, [x.array, y.array], dict(equation.params, dimension_numbers=changed), order)


def _gather(equation: Any, operands: Sequence[Value]) -> Value | None:
    """Binds a gather of indices along one dimension, which the dimensions of the indices replace; returns None for other gathers."""
    value, (start, params) = operands[0], (operands[1].plain(), equation.params)
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    others = [dim for dim in range(_rank(value)) if dim not in numbers.collapsed_slice_dims]
    is_taken = len(others) == _rank(value) - 1 and numbers.start_index_map == numbers.collapsed_slice_dims and np.ndim(start) > 1
    if not isinstance(value, Ordered) or value.is_plain or not is_taken or numbers.operand_batching_dims:
        return None
    (dim,) = numbers.collapsed_slice_dims
    where, count = value.order.index(dim), np.ndim(start) - 1  # position of the dimension, and number of dimensions that replace it
    kept = [numbers.offset_dims[others.index(item)] for item in value.order if item != dim]
    made = [place for place in range(len(kept) + count) if place not in numbers.offset_dims]
    changed = lax.GatherDimensionNumbers(
        offset_dims=(*range(where), *range(where + count, len(kept) + count)), collapsed_slice_dims=(where,), start_index_map=(where,)
    )
    (result,) = bind(
        equation, [value.array, start], dict(params, dimension_numbers=changed, slice_sizes=tuple(sizes[item] for item in value.order))
    )
    return Ordered(result, (*kept[:where], *made, *kept[where:]))


# fmt: off
ELEMENTWISE = frozenset([
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "nextafter", "not", "or", "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
])
# fmt: on

# Functions that are fused into each part of a sum over rows; how many of them in a chain, at most; and the largest number of parts.
_SIMPLE = frozenset(["convert_element_type", "integer_pow", "mul", "neg", "square", "sub"])
_DEPTH = 3
_PARTS = 8

# Equations that are reshapes; a broadcast is one if it keeps the number of elements.
_RESHAPES = frozenset(["broadcast_in_dim", "reshape", "squeeze"])

REDUCTIONS = frozenset(["reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"])

Change = Callable[[dict[str, Any], Order], dict[str, Any]]


def _moved(*names: str) -> Change:
    """Returns a function that permutes parameters with one entry per dimension."""

    def change(params: dict[str, Any], order: Order) -> dict[str, Any]:
        given = {name: params[name] for name in names if params[name] is not None}
        return params | {name: tuple(values[dim] for dim in order) for name, values in given.items()}

    return change


def _named(name: str) -> Change:
    """Returns a function that renames the dimensions in a parameter that holds one dimension or several."""

    def change(params: dict[str, Any], order: Order) -> dict[str, Any]:
        given = params[name]
        return params | {name: tuple(map(order.index, given)) if isinstance(given, tuple) else order.index(given)}

    return change


_WINDOW = _moved("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")

_BY_DIMENSION: dict[str, Change] = {
    "concatenate": _named("dimension"),
    "cumsum": _named("axis"),
    "pad": _moved("padding_config"),
    "reduce_window_max": _WINDOW,
    "reduce_window_min": _WINDOW,
    "reduce_window_sum": _WINDOW,
    "rev": _named("dimensions"),
    "slice": _moved("start_indices", "limit_indices", "strides"),
}
