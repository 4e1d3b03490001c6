"""Derives the memory order of a node's operands from the graph.

A memory order lists the dimensions from the slowest-varying to the fastest: (0, 1) is a row-major matrix, (1, 0) a column-major one.
"""

from __future__ import annotations

from typing import Any

import torch
from jax import Array, lax
from torch.fx import Node

from ..torch_ops import aten
from .context import Context
from .dimensions import is_static
from .graphs import is_view
from .metadata import TensorSpec

# Views that permute the dimensions, or change nothing.
_TRANSPOSES = (aten.permute.default, aten.t.default, aten.transpose.int, aten.alias.default, aten.detach.default)

# Ops that XLA:CPU computes again in each loop that reads their results, instead of storing the results.
_RECOMPUTED = frozenset(
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
            spec: TensorSpec = ctx.spec(argument)
            return spec
    return None


def eager_order(ctx: Context, value: Array) -> tuple[int, ...] | None:
    """Returns the memory order that `value` has in eager mode if it is an argument of the current node, else None."""
    spec = eager_spec(ctx, value)
    return None if spec is None else spec.order


def transposed_order(node: Node, rank: int) -> list[int]:
    """Returns, for each dimension of the result of a transpose or an alias, the dimension of the operand. `rank`: the operand's rank."""
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [dim % rank for dim in node.args[1]]
    elif node.target in (aten.t.default, aten.transpose.int) and rank > 1:
        first, second = node.args[1:] or (0, 1)
        order[first], order[second] = order[second], order[first]
    return order


def untransposed(ctx: Context, index: int, value: Array) -> tuple[Array, tuple[int, ...]]:
    """Undoes the transposes that produced the current node's positional argument `value`.

    A contraction can then name the dimensions of the array before the transposes, and needs no transpose.

    Returns: The array before the transposes, or `value` itself, and the position of each dimension of `value` in that array.
    """
    return untransposed_node(ctx, ctx.node.args[index], value)


def untransposed_node(ctx: Context, node: Any, value: Array) -> tuple[Array, tuple[int, ...]]:
    """Undoes the transposes that produced the value of a node, like `untransposed`."""
    positions = list(range(value.ndim))
    while isinstance(node, Node) and node.target in _TRANSPOSES:
        source = ctx.values[node.args[0]]
        order = transposed_order(node, source.ndim)
        node, value, positions = node.args[0], source, [order[position] for position in positions]
    return value, tuple(positions)


def in_memory_order(ctx: Context, index: int, value: Array) -> tuple[Array, tuple[int, ...]]:
    """Transposes the current node's positional argument `value`, a reduction's operand, to the memory order of its sources.

    The sources are the tensors from which XLA:CPU computes the operand within the reduction's loop, and which it reads in the loop's order.
    Among several memory orders, the one whose fastest-varying dimension is longest is taken, and row-major order among equals.

    Returns: The array, and the position of each dimension of `value` in that array.
    """
    source, positions = untransposed(ctx, index, value)
    node = ctx.node.args[index]
    if source is not value or not isinstance(node, Node) or value.ndim < 2 or not is_static(value.shape):
        return source, positions
    row_major = tuple(range(value.ndim))
    order = max(_orders(ctx, node), key=lambda order: (value.shape[order[-1]], order == row_major), default=row_major)
    return value if order == row_major else lax.transpose(value, order), tuple(order.index(dim) for dim in row_major)


def _orders(ctx: Context, node: Node) -> list[tuple[int, ...]]:
    """Returns the memory orders of the tensors that are read by the loop which computes the node. Only tensors of the node's shape count.

    An elementwise op is part of the loop if nothing outside the loop uses its result. An op of `_RECOMPUTED` is part of the loop, too, if
    all its users read its result in loops: XLA then computes it again, and reads its operands again.
    """
    shape, inside, orders = ctx.spec(node).shape, set[Node](), dict[Node, tuple[int, ...]]()
    pending = [(node, len(node.users) > 1)]
    while pending:
        current, is_recomputed = pending.pop()
        can_be_recomputed = current.target in _RECOMPUTED and all(map(_reads_in_a_loop, current.users))
        if not _is_pointwise(current) or (is_recomputed and not can_be_recomputed):
            spec = ctx.spec(current)
            has_own_order = current.op == "placeholder" or is_view(current)
            if 0 not in spec.stride:  # an expanded tensor is read fast in any order
                orders[current] = spec.order if has_own_order else tuple(range(len(shape)))
            continue
        inside.add(current)
        orders.pop(current, None)
        for source in current.all_input_nodes:
            if source not in inside and isinstance(source.meta.get("val"), torch.Tensor) and ctx.spec(source).shape == shape:
                pending.append((source, is_recomputed or not inside.issuperset(source.users)))
    return list(orders.values())


def _reads_in_a_loop(node: Node) -> bool:
    return _is_pointwise(node) or (isinstance(node.target, torch._ops.OpOverload) and torch.Tag.reduction in node.target.tags)


def _is_pointwise(node: Node) -> bool:
    is_op = isinstance(node.target, torch._ops.OpOverload) and isinstance(node.meta.get("val"), torch.Tensor)
    return is_op and (torch.Tag.pointwise in node.target.tags or node.target is aten._to_copy.default)
