"""How the operands of a node lie in memory, as the graph tells: their dimensions from the slowest to the fastest."""

from __future__ import annotations

import torch
from jax import Array, lax
from torch.fx import Node

from ..torch_ops import aten
from .context import Context
from .dimensions import all_known
from .graphs import is_view
from .metadata import TensorSpec

# Views of the same numbers, at most with dimensions exchanged.
_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int, aten.alias.default, aten.detach.default)

# XLA computes these anew in each loop that reads them.
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
    """The metadata of an argument of the current node; None of other values."""
    for argument in (*ctx.node.args, *ctx.node.kwargs.values()):
        if isinstance(argument, Node) and ctx.values.get(argument) is value:
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
    """The current node's positional argument `value` with its dimensions in the order in which XLA reads fastest what it is computed
    from, and where each of its dimensions lies there. XLA:CPU computes what is reduced within the reduction's loop, in the order of that.

    What is read in several orders is taken in that whose last dimension is the longest, or as it is.
    """
    source, places = untransposed(ctx, index, value)
    node = ctx.node.args[index]
    if source is not value or not isinstance(node, Node) or value.ndim < 2 or not all_known(value.shape):
        return source, places
    plain = tuple(range(value.ndim))
    order = max(_orders(ctx, node), key=lambda order: (value.shape[order[-1]], order == plain), default=plain)
    return value if order == plain else lax.transpose(value, order), tuple(order.index(dim) for dim in plain)


def _orders(ctx: Context, node: Node) -> list[tuple[int, ...]]:
    """Those of the tensors of a node's shape that its loop reads. Elementwise ops are in that loop if nothing outside of it reads them, and
    those of `_AGAIN` if all who read them do so in loops; what these read is read again then, too."""
    shape, inside, found = ctx.spec(node).shape, set[Node](), dict[Node, tuple[int, ...]]()
    left = [(node, len(node.users) > 1)]
    while left:
        each, again = left.pop()
        if not _is_pointwise(each) or (again and not (each.target in _AGAIN and all(map(_reads_in_a_loop, each.users)))):
            spec = ctx.spec(each)
            is_there = each.op == "placeholder" or is_view(each)
            if 0 not in spec.stride:  # else it is read fast in any order
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
