"""The memory order of a node's operands, derived from the graph: the dimensions from the slowest-varying to the fastest."""

from __future__ import annotations

from typing import Any

import torch
from jax import Array, lax
from torch.fx import Node

from ..torch_ops import aten
from .context import Context
from .dimensions import all_known
from .graphs import is_view
from .metadata import TensorSpec

# Views that keep the dimensions, at most in another order.
_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int, aten.alias.default, aten.detach.default)

# XLA recomputes these ops in each loop that reads them.
_AGAIN = frozenset(
    [
        aten._to_copy.default,
        aten.abs.default,
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.neg.default,
        aten.relu.default,
        aten.sub.Tensor,
        aten.where.self,
    ]
)


def eager_spec(ctx: Context, value: Array) -> TensorSpec | None:
    """Returns the metadata of `value` if it is an argument of the current node, else None."""
    for argument in (*ctx.node.args, *ctx.node.kwargs.values()):
        if isinstance(argument, Node) and ctx.values.get(argument) is value:
            found: TensorSpec = ctx.spec(argument)
            return found
    return None


def eager_order(ctx: Context, value: Array) -> tuple[int, ...] | None:
    """Returns the memory order that `value` has in eager mode if it is an argument of the current node, else None."""
    spec = eager_spec(ctx, value)
    return None if spec is None else spec.order


def untransposed(ctx: Context, index: int, value: Array) -> tuple[Array, tuple[int, ...]]:
    """Undoes the transposes that produced the current node's positional argument `value`.

    Returns the array before the transposes (or `value` itself), and for each dimension of `value` its position in that array. A contraction
    over the original's dimensions needs no transpose at all.
    """
    return untransposed_node(ctx, ctx.node.args[index], value)


def untransposed_node(ctx: Context, node: Any, value: Array) -> tuple[Array, tuple[int, ...]]:
    """Undoes the transposes that produced the value of a node, like `untransposed`."""
    places = list(range(value.ndim))
    while isinstance(node, Node) and node.target in _TRANSPOSES:
        source = ctx.values[node.args[0]]
        order = list(range(source.ndim))
        if node.target is aten.permute.default:
            order = [dim % source.ndim for dim in node.args[1]]
        elif node.target in (aten.t.default, aten.transpose.int) and source.ndim > 1:
            first, second = node.args[1:] or (0, 1)
            order[first], order[second] = order[second], order[first]
        node, value, places = node.args[0], source, [order[place] for place in places]
    return value, tuple(places)


def in_memory_order(ctx: Context, index: int, value: Array) -> tuple[Array, tuple[int, ...]]:
    """Returns the current node's positional argument in the dimension order in which XLA reads its sources fastest.

    Returns the array, and for each dimension of `value` its position in that array. The order matters because XLA:CPU computes the operand
    of a reduction within the reduction's loop, in the loop's order. If the sources have several orders, the one whose last dimension is
    longest is taken, and row-major order among equals.
    """
    source, places = untransposed(ctx, index, value)
    node = ctx.node.args[index]
    if source is not value or not isinstance(node, Node) or value.ndim < 2 or not all_known(value.shape):
        return source, places
    plain = tuple(range(value.ndim))
    order = max(_orders(ctx, node), key=lambda order: (value.shape[order[-1]], order == plain), default=plain)
    return value if order == plain else lax.transpose(value, order), tuple(order.index(dim) for dim in plain)


def _orders(ctx: Context, node: Node) -> list[tuple[int, ...]]:
    """Returns the memory orders of the tensors of the node's shape that the node's loop reads.

    An elementwise op is part of that loop if nothing outside the loop uses its result. An op of `_AGAIN` is also part of it if all its
    users read it in loops; its sources are then read again, too.
    """
    shape, inside, found = ctx.spec(node).shape, set[Node](), dict[Node, tuple[int, ...]]()
    left = [(node, len(node.users) > 1)]
    while left:
        each, again = left.pop()
        if not _is_pointwise(each) or (again and not (each.target in _AGAIN and all(map(_reads_in_a_loop, each.users)))):
            spec = ctx.spec(each)
            is_there = each.op == "placeholder" or is_view(each)
            if 0 not in spec.stride:  # an expanded tensor is read fast in any order
                found[each] = spec.order if is_there else tuple(range(len(shape)))
            continue
        inside.add(each)
        found.pop(each, None)
        for source in each.all_input_nodes:
            if source not in inside and isinstance(source.meta.get("val"), torch.Tensor) and ctx.spec(source).shape == shape:
                left.append((source, again or not inside.issuperset(source.users)))
    return list(found.values())


def _reads_in_a_loop(node: Node) -> bool:
    return _is_pointwise(node) or (isinstance(node.target, torch._ops.OpOverload) and torch.Tag.reduction in node.target.tags)


def _is_pointwise(node: Node) -> bool:
    is_op = isinstance(node.target, torch._ops.OpOverload) and isinstance(node.meta.get("val"), torch.Tensor)
    return is_op and (torch.Tag.pointwise in node.target.tags or node.target is aten._to_copy.default)
