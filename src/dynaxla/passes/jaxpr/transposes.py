"""A pass over a traced program that defers transposes until an op needs them. Most transposes then never run.

Convolutions on the CPU need channels-last operands: each convolution has a transpose before and a transpose after it. XLA does not cancel
the transposes between two convolutions, but computes the ops between them in the original order. This pass evaluates the traced program a
second time and tracks the memory order of each array: a transpose only changes the order. Convolutions, elementwise functions, reductions,
window reductions, slices and similar ops work in any order, and reshapes in many orders. The operands of other ops are transposed to the
original order.
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
from ...lowering.cpu.vectorized_reductions import is_foldable, sum_rows, vectorized_sum
from .evaluation import Evaluation, bind
from .reshapes import grouped_order, reshaped

Order = tuple[int, ...]
Orders = dict[int, Order]


@dataclass(frozen=True)
class Ordered:
    """A value, as an array that has the value's dimensions in some order.

    Attributes:
        array: dimension i is dimension order[i] of the value.
        order: a permutation of the value's dimensions.
        equation: if an equation with a primitive of `_FUSED_INTO_SUMS` computed the array, the equation and its operands, else None.
    """

    array: Any
    order: Order
    equation: tuple[Any, Sequence[Value]] | None = None

    @property
    def is_plain(self) -> bool:
        """True if the array is the value itself."""
        return self.order == tuple(range(len(self.order)))

    def plain(self) -> Any:
        """Returns the value, with its dimensions in the original order."""
        return self.array if self.is_plain else lax.transpose(self.array, tuple(np.argsort(self.order)))

    def to(self, order: Order) -> Any:
        """Returns the value with its dimensions in this order."""
        if self.order == order:
            return self.array
        return lax.transpose(self.array, tuple(self.order.index(dim) for dim in order))


def _unpermuted(array: Any) -> Ordered:
    return Ordered(array, tuple(range(np.ndim(array))))


@dataclass(frozen=True)
class _Broadcast:
    """A deferred broadcast, which is computed in the order that a consumer needs.

    Attributes:
        operand: the value to broadcast.
        shape: the shape of the result.
        dims: the dimension of the result for each dimension of the operand.
    """

    operand: Ordered
    shape: tuple[int, ...]
    dims: tuple[int, ...]

    def to(self, order: Order) -> Any:
        """Returns the result with its dimensions in this order."""
        operand_order = sorted(range(len(self.dims)), key=lambda dim: order.index(self.dims[dim]))
        array = self.operand.to(tuple(operand_order))
        positions = tuple(order.index(self.dims[dim]) for dim in operand_order)
        return lax.broadcast_in_dim(array, tuple(self.shape[dim] for dim in order), positions)

    def plain(self) -> Any:
        return self.to(tuple(range(len(self.shape))))

    def in_operand_order(self) -> Ordered:
        """Returns the result in the operand's memory order. Each new dimension follows the one before it in the shape."""
        order = [self.dims[dim] for dim in self.operand.order]
        for dim in range(len(self.shape)):
            if dim not in order:
                order.insert(order.index(dim - 1) + 1 if dim else 0, dim)
        return Ordered(self.to(tuple(order)), tuple(order))


Value = Ordered | _Broadcast


def defer_transposes(program: Callable[..., Any], platform: str, free: Collection[int] = ()) -> tuple[Callable[..., Any], Orders]:
    """Returns the same function for one platform, with deferred transposes, and the orders of its free results.

    The returned function must be traced, for example by `jax.jit`. The trace fills the dict of orders: dimension i of a free result is
    dimension orders[index][i] of the original result. A result without an entry has the original order.

    Args:
        program: the function.
        platform: the platform.
        free: the indices of the free results: their dimensions may have any order.
    """
    evaluation = _TransposeEvaluation(platform, free)
    return evaluation.transform(program), evaluation.orders


class _TransposeEvaluation(Evaluation[Value]):
    """The pass. Attributes: `orders`, see `defer_transposes`."""

    title = "transposes"

    def __init__(self, platform: str, free: Collection[int]) -> None:
        super().__init__(platform)
        self._free = free
        self.orders: Orders = {}

    def wrap(self, array: Any) -> Value:
        return _unpermuted(array)

    def unwrap(self, value: Value) -> Any:
        return value.plain()

    def unwrap_result(self, index: int, value: Value) -> Any:
        if index not in self._free or not isinstance(value, Ordered):
            return value.plain()
        self.orders[index] = value.order
        return value.array

    def in_memory(self, value: Value) -> Value:
        return Ordered(in_memory(value.array), value.order) if isinstance(value, Ordered) else _unpermuted(in_memory(value.plain()))

    def apply(self, equation: Any, operands: list[Value]) -> Sequence[Value]:
        return _apply(equation, operands)


def _apply(equation: Any, operands: list[Value]) -> Sequence[Value]:
    """Applies an equation in an order for which few operands are transposed. Returns its results, in any order."""
    name, params = equation.primitive.name, equation.params
    if name == "transpose":
        return [_transpose(operands[0], params["permutation"])]
    if name in _RESHAPES and (result := _reshape(equation, operands[0])) is not None:
        return [result]
    if name == "broadcast_in_dim" and len(operands) == 1 and isinstance(operands[0], Ordered):
        return [_Broadcast(operands[0], params["shape"], params["broadcast_dimensions"])]
    if name == "conv_general_dilated":
        return _convolution(equation, operands)
    if name == "gather" and (result := _gather(equation, operands)) is not None:
        return [result]
    order = _common_order(operands)
    if order is not None and name in ELEMENTWISE:
        results = _bind(equation, _in_order(operands, order), params, order)
        return [Ordered(result.array, order, (equation, operands)) for result in results] if name in _FUSED_INTO_SUMS else list(results)
    if order is not None and name in _BY_DIMENSION:
        return _bind(equation, _in_order(operands, order), _BY_DIMENSION[name](dict(params), order), order)
    if order is not None and name in REDUCTIONS:
        axes = params["axes"]
        remaining = [dim for dim in order if dim not in axes]
        sorted_dims = sorted(remaining)
        changed = dict(params, axes=tuple(sorted(order.index(axis) for axis in axes)))
        result_order = tuple(sorted_dims.index(dim) for dim in remaining)
        (array,) = _in_order(operands, order)
        if name == "reduce_sum" and is_foldable(array, changed["axes"]):
            return [Ordered(_sum_rows_in_parts(operands[0], array, order, changed["axes"]), result_order)]
        if name == "reduce_sum":
            return [Ordered(vectorized_sum(array, changed["axes"]), result_order)]
        return _bind(equation, [array], changed, result_order)
    return _bind(equation, [item.plain() for item in operands], params, None)


def _sum_rows_in_parts(value: Value, array: Array, order: Order, axes: Sequence[int]) -> Array:
    """Returns the sum of the array over the axes. If an equation of `_FUSED_INTO_SUMS` computed the array, it is computed in parts.

    XLA does not fuse an elementwise function into a sum over rows: the function's whole result is written to memory first. If the sum is
    written as a sum of parts, one loop computes the parts of the function's result and adds these to each other.
    """
    axis = next((axis for axis in axes if array.shape[axis] > 1), axes[0])
    size = array.shape[axis]
    count = max(count for count in range(1, _MAX_PARTS + 1) if size % count == 0)
    if count == 1 or not isinstance(value, Ordered) or value.equation is None:
        return sum_rows(array, axes)
    length = size // count
    parts = [_slice_of(value, order, axis, start, start + length, _MAX_FUSED_DEPTH) for start in range(0, size, length)]
    total = functools.reduce(lax.add, parts)
    # The barrier keeps XLA from fusing the sum of the parts into the reduction.
    return sum_rows(total, axes) if is_foldable(total, axes) else lax.reduce_sum(lax.optimization_barrier(total), axes)


def _slice_of(value: Value, order: Order, axis: int, start: int, stop: int, depth: int) -> Any:
    """Returns the slice of a value from start to stop along dimension order[axis].

    If an equation of `_FUSED_INTO_SUMS` computed the value, the equation is applied to slices of its operands. depth: the maximum number of
    nested equations.
    """
    if not _rank(value):
        return value.plain()
    if isinstance(value, _Broadcast) and order[axis] not in value.dims:
        shape = tuple(stop - start if dim == order[axis] else size for dim, size in enumerate(value.shape))
        return _Broadcast(value.operand, shape, value.dims).to(order)
    if isinstance(value, _Broadcast) or value.equation is None or not depth:
        return lax.slice_in_dim(value.to(order), start, stop, axis=axis)
    equation, operands = value.equation
    (result,) = _bind(equation, [_slice_of(item, order, axis, start, stop, depth - 1) for item in operands], equation.params, order)
    return result.array


def _in_order(operands: Sequence[Value], order: Order) -> list[Any]:
    return [item.to(order) if _rank(item) else item.plain() for item in operands]


def _bind(equation: Any, arrays: Sequence[Any], params: dict[str, Any], order: Order | None) -> Sequence[Ordered]:
    """Binds an equation to arrays. order: the order of the results; None for the original order."""
    results = bind(equation, arrays, params)
    return [_unpermuted(result) if order is None else Ordered(result, order) for result in results]


def _rank(value: Value) -> int:
    return len(value.shape) if isinstance(value, _Broadcast) else len(value.order)


def _common_order(operands: Sequence[Value]) -> Order | None:
    """Returns the order in which an op is computed: the order of the largest permuted operand, or the original order if there is none.

    Returns None if the operands other than scalars have different ranks, or if all operands are scalars.
    """
    ranks = {_rank(item) for item in operands} - {0}
    if len(ranks) != 1:
        return None
    permuted = [item for item in operands if isinstance(item, Ordered) and not item.is_plain]
    return max(permuted, key=lambda item: item.array.size).order if permuted else tuple(range(ranks.pop()))


def _transpose(value: Value, permutation: Sequence[int]) -> Value:
    new_dims = {dim: new_dim for new_dim, dim in enumerate(permutation)}
    if isinstance(value, _Broadcast):
        return _Broadcast(value.operand, tuple(value.shape[dim] for dim in permutation), tuple(new_dims[dim] for dim in value.dims))
    return Ordered(value.array, tuple(new_dims[dim] for dim in value.order))


def _reshape(equation: Any, value: Value) -> Value | None:
    """Returns the reshaped value, computed without a copy or with one transpose of the operand.

    None if neither is possible, if the operand is not permuted, or if the equation permutes or repeats elements.
    """
    if equation.primitive.name == "reshape" and equation.params["dimensions"] is not None:
        return None
    new_shape = equation.outvars[0].aval.shape
    if isinstance(value, _Broadcast):
        value = value.in_operand_order()
    if value.is_plain or value.array.size != math.prod(new_shape):
        return None
    shape = [value.array.shape[value.order.index(dim)] for dim in range(len(value.order))]
    if (result := reshaped(shape, value.order, new_shape)) is not None:
        return Ordered(lax.reshape(value.array, result[0]), result[1])
    if (order := grouped_order(shape, value.order, new_shape)) is not None and (result := reshaped(shape, order, new_shape)) is not None:
        return Ordered(lax.reshape(value.to(order), result[0]), result[1])
    return None


def _convolution(equation: Any, operands: Sequence[Value]) -> Sequence[Value]:
    """Binds a convolution to the arrays of its operands, since XLA accepts convolutions with operands in any order.

    The result has the memory order of the first operand: batch, channels and spatial dimensions have the same positions.
    """
    x, y = (item if isinstance(item, Ordered) else _unpermuted(item.plain()) for item in operands)
    numbers = equation.params["dimension_numbers"]
    x_spec, y_spec = (tuple(item.order.index(dim) for dim in spec) for item, spec in ((x, numbers.lhs_spec), (y, numbers.rhs_spec)))
    output_dims = dict(zip(numbers.lhs_spec, numbers.out_spec, strict=True))
    order = tuple(output_dims[dim] for dim in x.order)
    changed = lax.ConvDimensionNumbers(x_spec, y_spec, tuple(order.index(dim) for dim in numbers.out_spec))
    return _bind(equation, [x.array, y.array], dict(equation.params, dimension_numbers=changed), order)


def _gather(equation: Any, operands: Sequence[Value]) -> Value | None:
    """Binds a gather like that of `jnp.take`, which replaces one dimension by the dimensions of the indices. None for other gathers."""
    value, (start, params) = operands[0], (operands[1].plain(), equation.params)
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    uncollapsed_dims = [dim for dim in range(_rank(value)) if dim not in numbers.collapsed_slice_dims]
    is_take = len(uncollapsed_dims) == _rank(value) - 1 and numbers.start_index_map == numbers.collapsed_slice_dims and np.ndim(start) > 1
    if not isinstance(value, Ordered) or value.is_plain or not is_take or numbers.operand_batching_dims:
        return None
    (dim,) = numbers.collapsed_slice_dims
    position, count = value.order.index(dim), np.ndim(start) - 1  # `count` dimensions of the indices replace the dimension at `position`
    kept = [numbers.offset_dims[uncollapsed_dims.index(item)] for item in value.order if item != dim]
    index_dims = [dim for dim in range(len(kept) + count) if dim not in numbers.offset_dims]
    changed = lax.GatherDimensionNumbers(
        offset_dims=(*range(position), *range(position + count, len(kept) + count)),
        collapsed_slice_dims=(position,),
        start_index_map=(position,),
    )
    (result,) = bind(
        equation, [value.array, start], dict(params, dimension_numbers=changed, slice_sizes=tuple(sizes[item] for item in value.order))
    )
    return Ordered(result, (*kept[:position], *index_dims, *kept[position:]))


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

# Functions that are fused into each part of a sum over rows.
_FUSED_INTO_SUMS = frozenset(["convert_element_type", "integer_pow", "mul", "neg", "square", "sub"])
# The maximum number of such functions, one applied to the result of the other, that are fused.
_MAX_FUSED_DEPTH = 3
# The maximum number of parts of a sum.
_MAX_PARTS = 8

# Primitives that reshape. A broadcast reshapes if the number of elements stays the same.
_RESHAPES = frozenset(["broadcast_in_dim", "reshape", "squeeze"])

REDUCTIONS = frozenset(["reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"])

ParameterChange = Callable[[dict[str, Any], Order], dict[str, Any]]


def _permute_entries(*names: str) -> ParameterChange:
    """Returns a function that permutes the entries of parameters with one entry for each dimension."""

    def change(params: dict[str, Any], order: Order) -> dict[str, Any]:
        given = {name: params[name] for name in names if params[name] is not None}
        return params | {name: tuple(values[dim] for dim in order) for name, values in given.items()}

    return change


def _rename_dimensions(name: str) -> ParameterChange:
    """Returns a function that replaces the value's dimensions in a parameter by the array's. The parameter is a dimension or a tuple."""

    def change(params: dict[str, Any], order: Order) -> dict[str, Any]:
        given = params[name]
        return params | {name: tuple(map(order.index, given)) if isinstance(given, tuple) else order.index(given)}

    return change


_WINDOW = _permute_entries("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")

_BY_DIMENSION: dict[str, ParameterChange] = {
    "concatenate": _rename_dimensions("dimension"),
    "cumsum": _rename_dimensions("axis"),
    "pad": _permute_entries("padding_config"),
    "reduce_window_max": _WINDOW,
    "reduce_window_min": _WINDOW,
    "reduce_window_sum": _WINDOW,
    "rev": _rename_dimensions("dimensions"),
    "slice": _permute_entries("start_indices", "limit_indices", "strides"),
}
