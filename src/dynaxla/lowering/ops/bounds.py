"""Run-time checks for values that eager mode refuses, such as indices out of range: a compiled call raises the same exception, and mutates
nothing. A check is left out where the graph shows that the values are in range (`interval`)."""

from __future__ import annotations

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
    """Makes the compiled call raise unless every index is within a dimension of `size`.

    Args:
        source: the node or number in the graph that `index` comes from. If its interval is known to be in range, no check is added.
        from_end: True if negative indices count from the end.
    """
    low, high = -size if from_end else 0, size - 1
    known = interval(ctx, source)
    if index.size == 0 or (known is not None and definitely(lambda: low <= known[0] and known[1] <= high)):
        return
    limits = np.iinfo(index.dtype)
    good = lax.full(index.shape, True)
    if not definitely(lambda: low <= limits.min):
        good = lax.ge(index, number(low, index.dtype))
    if not definitely(lambda: high >= limits.max):
        good = lax.bitwise_and(good, lax.le(index, number(high, index.dtype)))
    ctx.require(good, error, message)


def refuse_unless(ctx: Context, holds: bool, error: type[Exception], message: str) -> None:
    """Makes the compiled call raise unless `holds`, a condition that is known during tracing but that eager mode checks at run time."""
    if not holds:
        ctx.require(lax.full((), False), error, message)


def argument(ctx: Context, position: int) -> Any:
    """The current node's positional argument at `position`, as in the graph; None if the node has fewer arguments."""
    return ctx.node.args[position] if position < len(ctx.node.args) else None


def interval(ctx: Context, source: Any) -> Interval | None:
    """The lowest and the highest value that elements of `source`, a node or an integer, can have; None if the graph does not show it."""
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
    found = rule(ctx, source)
    limits = torch.iinfo(value.dtype)
    return found if found is not None and limits.min <= found[0] and found[1] <= limits.max else None


def _first_argument(ctx: Context, node: Node) -> Interval | None:
    return interval(ctx, node.args[0])


def _of_range(ctx: Context, node: Node) -> Interval | None:
    numbers = [ctx.spec_of(item) for item in node.args]
    if not all(isinstance(value, int) for value in numbers):
        return None
    start, end, step = {1: lambda: (0, numbers[0], 1), 2: lambda: (*numbers, 1), 3: lambda: numbers}[len(numbers)]()
    values = range(start, end, step)
    return (min(values[0], values[-1]), max(values[0], values[-1])) if values else None


def _of_place(ctx: Context, node: Node) -> Interval | None:
    """The interval of the indices that ops such as argmax return: along `dim`, or into the flattened tensor if `dim` is None."""
    shape = ctx.spec_of(node.args[0]).shape
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    place = [item.name for item in schema].index("dim")
    default = schema[place].default_value
    dim = node.args[place] if place < len(node.args) else node.kwargs.get("dim", default)
    if not isinstance(dim, int):
        return 0, int(np.prod(shape)) - 1
    return (0, shape[wrap(dim, len(shape))] - 1) if shape else (0, 0)


def _of_item(ctx: Context, node: Node) -> Interval | None:
    source, item = node.args
    return _of_place(ctx, source) if item == 1 and isinstance(source, Node) and source.target in _WITH_PLACES else None


def _with_number(combine: Callable[[int, int], int]) -> Callable[[Context, Node], Interval | None]:
    """The rule for a binary op whose second operand is a single number."""

    def rule(ctx: Context, node: Node) -> Interval | None:
        first, second = interval(ctx, node.args[0]), interval(ctx, node.args[1])
        if first is None or second is None or second[0] != second[1] or node.kwargs:
            return None
        ends = [combine(end, second[0]) for end in first]
        return min(ends), max(ends)

    return rule


def _of_remainder(ctx: Context, node: Node) -> Interval | None:
    divisor = interval(ctx, node.args[1])
    return (0, divisor[0] - 1) if divisor is not None and divisor[0] == divisor[1] and divisor[0] > 0 else None


def _of_clamp(ctx: Context, node: Node) -> Interval | None:
    low, high = (interval(ctx, bound) for bound in (*node.args[1:3], None, None)[:2])
    return (low[0], max(low[0], high[0])) if low is not None and high is not None else None


_WITH_PLACES = (aten.sort.default, aten.sort.stable, aten.topk.default, aten.max.dim, aten.min.dim, aten.median.dim, aten.kthvalue.default)
# Ops whose result holds only elements of their first argument.
_MOVES = (
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
_INTERVALS: dict[Any, Callable[[Context, Node], Interval | None]] = {
    **dict.fromkeys(_MOVES, _first_argument),
    aten.arange.default: _of_range,
    aten.arange.start: _of_range,
    aten.arange.start_step: _of_range,
    aten.argmax.default: _of_place,
    aten.argmin.default: _of_place,
    aten.argsort.default: _of_place,
    aten.randperm.default: lambda ctx, node: (0, ctx.spec_of(node.args[0]) - 1),
    aten.randint.default: lambda ctx, node: (0, ctx.spec_of(node.args[0]) - 1),
    aten.randint.low: lambda ctx, node: (ctx.spec_of(node.args[0]), ctx.spec_of(node.args[1]) - 1),
    aten.add.Tensor: _with_number(operator.add),
    aten.add.Scalar: _with_number(operator.add),
    aten.sub.Tensor: _with_number(operator.sub),
    aten.sub.Scalar: _with_number(operator.sub),
    aten.mul.Tensor: _with_number(operator.mul),
    aten.mul.Scalar: _with_number(operator.mul),
    aten.remainder.Scalar: _of_remainder,
    aten.clamp.default: _of_clamp,
    operator.getitem: _of_item,
}
