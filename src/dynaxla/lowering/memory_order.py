"""How the operands of a node lie in memory, as the graph tells: their dimensions from the slowest to the fastest."""

from __future__ import annotations

import torch
from jax import Array

from .context import Context
from .metadata import TensorSpec

aten = torch.ops.aten

# Views of the same numbers, at most with dimensions exchanged.
_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int, aten.alias.default, aten.detach.default)


def eager_spec(ctx: Context, value: Array) -> TensorSpec | None:
    """The metadata of an argument of the current node; None of other values."""
    for argument in (*ctx.node.args, *ctx.node.kwargs.values()):
        if isinstance(argument, torch.fx.Node) and ctx.values.get(argument) is value:
            found: TensorSpec = ctx.spec(argument)
            return found
    return None


def eager_order(ctx: Context, value: Array) -> tuple[int, ...] | None:
    """The order in eager's memory of an argument of the current node; None of other values."""
    spec = eager_spec(ctx, value)
    return None if spec is None else spec.order


def untransposed(ctx: Context, index: int, value: Array) -> tuple[Array, tuple[int, ...]]:
    """The current node's positional argument `value` as it was before the transposes that made it, if any did, and where each of
    its dimensions lies there. A contraction over the original's dimensions needs no transpose at all."""
    node, places = ctx.node.args[index], list(range(value.ndim))
    while isinstance(node, torch.fx.Node) and node.target in _TRANSPOSES:
        source = ctx.values[node.args[0]]
        order = list(range(source.ndim))
        if node.target is aten.permute.default:
            order = [dim % source.ndim for dim in node.args[1]]
        elif node.target in (aten.t.default, aten.transpose.int) and source.ndim > 1:
            first, second = node.args[1:] or (0, 1)
            order[first], order[second] = order[second], order[first]
        node, value, places = node.args[0], source, [order[place] for place in places]
    return value, tuple(places)
