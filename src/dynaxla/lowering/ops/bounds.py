"""Run-time checks for values that eager mode rejects, such as indices out of range.

If a check fails, the compiled call raises an exception of the same class as eager mode, and mutates nothing. On a GPU, a later call raises
it (`Context.require`). No check is added where the graph shows that the values are in range (`interval`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jax import Array, lax
from torch.fx import Node

from ...torch_ops import aten
from ..context import Context
from ..dimensions import definitely, wrap
from ..promotion import number

Interval = tuple[int, int]  # the lowest and the highest value, both included


def require_index(
    ctx: Context, index: Array, size: int, error: type[Exception], message: str, source: Any = None, *, from_end: bool = False
) -> None:
    """Makes the compiled call raise unless every index is in range for a dimension of this size.

    Args:
        ctx: context of the current node.
        index: the indices, of an integer dtype.
        size: size of the dimension.
        error: class of the exception.
        message: message of the exception.
        source: the node or number in the graph whose value is `index`; no check is added if `interval` finds it to be in range.
        from_end: True if negative indices count from the end.
    """
    low, high = -size if from_end else 0, size - 1
    known = interval(ctx, source)
    if index.size == 0 or (known is not None and definitely(lambda: low <= known[0] and known[1] <= high)):
        return
    limits = np.iinfo(index.dtype)
    in_range = lax.full(index.shape, True)
    if not definitely(lambda: low <= limits.min):
        in_range = lax.ge(index, number(low, index.dtype))
    if not definitely(lambda: high >= limits.max):
        in_range = lax.bitwise_and(in_range, lax.le(index, number(high, index.dtype)))
    ctx.require(in_range, error, message)


def require_static(ctx: Context, holds: bool, error: type[Exception], message: str) -> None:
    """Makes the compiled call raise if `holds`, a condition that is known during tracing, is False. Tracing itself does not raise."""
    if not holds:
        ctx.require(lax.full((), False), error, message)


def argument(ctx: Context, position: int) -> Any:
    """Returns the current node's positional argument at `position`, as in the graph; None if the node has fewer arguments."""
    return ctx.node.args[position] if position < len(ctx.node.args) else None


def interval(ctx: Context, source: Any) -> Interval | None:
    """Returns the lowest and the highest value that elements of `source` can have; None if the graph does not show these values.

    Args:
        source: a node or an integer.
    """
    if isinstance(source, int):
        return source, source
    if not isinstance(source, Node):
        return None
    value = source.meta.get("val")
    if isinstance(value, (int, torch.SymInt)):
        return ctx.spec_of(source), ctx.spec_of(source)
    rule = _INTERVALS.get(source.target)
    if rule is None or not isinstance(value, torch.Tensor) or value.dtype not in (torch.int32, torch.int64):
        return None
    result = rule(ctx, source)
    limits = torch.iinfo(value.dtype)
    return result if result is not None and definitely(lambda: limits.min <= result[0] and result[1] <= limits.max) else None


def _first_argument_interval(ctx: Context, node: Node) -> Interval | None:
    return interval(ctx, node.args[0])


def _arange_interval(ctx: Context, node: Node) -> Interval | None:
    arguments = [ctx.spec_of(item) for item in node.args]
    if not all(isinstance(value, int) for value in arguments):
        return None
    start, end, step = {1: lambda: (0, arguments[0], 1), 2: lambda: (*arguments, 1), 3: lambda: arguments}[len(arguments)]()
    values = range(start, end, step)
    return (min(values[0], values[-1]), max(values[0], values[-1])) if values else None


def _index_interval(ctx: Context, node: Node) -> Interval | None:
    """Returns the interval of the indices that an op such as argmax returns: along `dim`, or into the flattened tensor if `dim` is None."""
    shape = ctx.spec_of(node.args[0]).shape
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    position = [item.name for item in schema].index("dim")
    default = schema[position].default_value
    dim = node.args[position] if position < len(node.args) else node.kwargs.get("dim", default)
    if not isinstance(dim, int):
        return 0, math.prod(shape) - 1
    return (0, shape[wrap(dim, len(shape))] - 1) if shape else (0, 0)


def _getitem_interval(ctx: Context, node: Node) -> Interval | None:
    source, item = node.args
    return _index_interval(ctx, source) if item == 1 and isinstance(source, Node) and source.target in _VALUES_AND_INDICES else None


def _rule_for_scalar_operand(combine: Callable[[int, int], int]) -> Callable[[Context, Node], Interval | None]:
    """Returns a function from a node of a binary op to its interval: None unless the second operand is a known number, the same everywhere.

    A node with the argument alpha has no interval.

    Args:
        combine: the op, as a function of two integers.
    """

    def rule(ctx: Context, node: Node) -> Interval | None:
        first, second = interval(ctx, node.args[0]), interval(ctx, node.args[1])
        if first is None or second is None or second[0] != second[1] or node.args[2:] or node.kwargs:
            return None
        ends = [combine(end, second[0]) for end in first]
        return min(ends), max(ends)

    return rule


def _remainder_interval(ctx: Context, node: Node) -> Interval | None:
    divisor = interval(ctx, node.args[1])
    return (0, divisor[0] - 1) if divisor is not None and divisor[0] == divisor[1] and divisor[0] > 0 else None


def _clamp_interval(ctx: Context, node: Node) -> Interval | None:
    low, high = (interval(ctx, bound) for bound in (*node.args[1:3], None, None)[:2])
    # With low > high, the result is high everywhere.
    return (min(low[0], high[0]), high[0]) if low is not None and high is not None else None


# Ops that return values and, as their second result, the indices of the values.
_VALUES_AND_INDICES = (
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    aten.max.dim,
    aten.min.dim,
    aten.median.dim,
    aten.kthvalue.default,
)
# Ops whose result contains only elements of their first argument, possibly cast.
_DATA_MOVEMENT = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.slice.Tensor,
    aten.select.int,
    aten.index_select.default,
    aten.repeat.default,
    aten.flip.default,
    aten.roll.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
)
# By op: a function of the context and a node that returns the interval of the node's value; None if the graph does not show it.
_INTERVALS: dict[Any, Callable[[Context, Node], Interval | None]] = {
    **dict.fromkeys(_DATA_MOVEMENT, _first_argument_interval),
    aten.arange.default: _arange_interval,
    aten.arange.start: _arange_interval,
    aten.arange.start_step: _arange_interval,
    aten.argmax.default: _index_interval,
    aten.argmin.default: _index_interval,
    aten.argsort.default: _index_interval,
    aten.randperm.default: lambda ctx, node: (0, ctx.spec_of(node.args[0]) - 1),
    aten.randint.default: lambda ctx, node: (0, ctx.spec_of(node.args[0]) - 1),
    aten.randint.low: lambda ctx, node: (ctx.spec_of(node.args[0]), ctx.spec_of(node.args[1]) - 1),
    aten.add.Tensor: _rule_for_scalar_operand(operator.add),
    aten.add.Scalar: _rule_for_scalar_operand(operator.add),
    aten.sub.Tensor: _rule_for_scalar_operand(operator.sub),
    aten.sub.Scalar: _rule_for_scalar_operand(operator.sub),
    aten.mul.Tensor: _rule_for_scalar_operand(operator.mul),
    aten.mul.Scalar: _rule_for_scalar_operand(operator.mul),
    aten.remainder.Scalar: _remainder_interval,
    aten.clamp.default: _clamp_interval,
    operator.getitem: _getitem_interval,
}
