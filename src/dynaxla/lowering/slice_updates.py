"""Finds products that read a tensor with a few slices replaced, such as a key/value cache after a new token.

Such a product can read the old tensor and the new slices instead, so that the updated tensor is never materialized. This is possible if all
consumers of the updated tensor are such products, directly or through views.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from operator import mul
from typing import Any

import torch
from torch.fx import Node

from ..torch_ops import aten
from .context import Context
from .dimensions import clamp_slice, wrap
from .metadata import TensorSpec
from .ops.strided import may_overlap


@dataclass(frozen=True)
class SliceUpdate:
    """A node that returns a tensor with some slices replaced.

    Attributes:
        node: The node.
        dims: The updated dimensions. Each slice has one index in each of them, and covers all other dimensions.
        count: The number of slices.
    """

    node: Node
    dims: tuple[int, ...]
    count: int

    @property
    def base(self) -> Node:
        """The tensor before the update."""
        base = self.node.args[0]
        assert isinstance(base, Node)
        return base


# A factor of a view's dimension: the dimension of the base (None if the values are repeated along it), and its size.
Factor = tuple[int | None, int]
# For each dimension of a view, its factors.
Factors = tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True)
class OperandRoles:
    """The dimensions of one operand of a product, by their role.

    Attributes:
        contracting: The dimensions that are summed.
        batch: The batch dimensions, which both operands have.
        other: The position of the other operand, or of an argument that has the same sizes in the dimensions `outer`.
        outer: The dimensions of `other` that are not summed.
    """

    contracting: tuple[int, ...]
    batch: tuple[int, ...]
    other: int
    outer: tuple[int, ...]


_ATTENTION = {1: OperandRoles((3,), (0, 1), 0, (0, 1, 2)), 2: OperandRoles((2,), (0, 1), 0, (0, 1, 2))}
# By op and position of the operand.
PRODUCTS: dict[Any, dict[int, OperandRoles]] = {
    aten.mm.default: {0: OperandRoles((1,), (), 1, (1,)), 1: OperandRoles((0,), (), 0, (0,))},
    aten.bmm.default: {0: OperandRoles((2,), (0,), 1, (0, 2)), 1: OperandRoles((1,), (0,), 0, (0, 1))},
    aten.baddbmm.default: {1: OperandRoles((2,), (0,), 2, (0, 2)), 2: OperandRoles((1,), (0,), 1, (0, 1))},
    aten._scaled_dot_product_flash_attention_for_cpu.default: _ATTENTION,
}


@dataclass(frozen=True)
class UpdatedOperand:
    """A product's operand that is a view of an updated tensor.

    Attributes:
        updates: The updates, in the order in which they are applied, with slices in the same dimensions.
        parts: For each dimension of the tensor, the sizes into which the views split it. In the other attributes, dimensions are split
            dimensions, numbered in order.
        factors: For each dimension of the operand, the split dimensions that it consists of, without dimensions of size 1.
        dims: The updated dimensions, in which slices have indices.
        dtype: The tensor's dtype.
        roles: The roles of the operand's dimensions.
        rows: The number of vectors with which each of the tensor's vectors is multiplied.
    """

    updates: tuple[SliceUpdate, ...]
    parts: tuple[tuple[int, ...], ...]
    factors: Factors
    dims: tuple[int, ...]
    dtype: torch.dtype
    roles: OperandRoles
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, with its dimensions split."""
        return tuple(size for sizes in self.parts for size in sizes)

    @property
    def capacity(self) -> int:
        """The number of possible slices."""
        return math.prod(self.shape[dim] for dim in self.dims)

    @property
    def count(self) -> int:
        return sum(update.count for update in self.updates)

    @property
    def is_moved(self) -> bool:
        """True if the batch dimensions are not the leading dimensions of the tensor."""
        kept = {origin for dim in self.roles.batch for origin, _ in self.factors[dim] if origin is not None}
        others = [dim for dim, size in enumerate(self.shape) if size > 1 and dim not in kept]
        return bool(kept) and min(others) < max(kept)

    @property
    def has_strides(self) -> bool:
        """True if, besides batch dimensions, the tensor has one contracting and one other dimension, one of which is fastest in memory."""
        kept = {origin for dim in self.roles.batch for origin, _ in self.factors[dim]}
        over = {origin for dim in self.roles.contracting for origin, _ in self.factors[dim]}
        long = [dim for dim, size in enumerate(self.shape) if size > 1]
        return len(over) == 1 and len(long) == len(kept - {None}) + 2 and long[-1] not in kept

    @property
    def sums_slices(self) -> bool:
        """True if the product sums over an updated dimension; otherwise its result has these dimensions."""
        return any(origin in self.dims for dim in self.roles.contracting for origin, _ in self.factors[dim])


def updated_operand(ctx: Context, position: int) -> UpdatedOperand | None:
    """Returns the description of an argument of the current node, a product, that is a view of an updated tensor.

    Returns: None if the argument is not an updated tensor, or if another node needs the whole updated tensor.
    """
    found = _operand_structure(ctx, ctx.node, position)
    if found is None or not _is_avoidable(ctx, found.updates[0]):
        return None
    updates = list(found.updates)
    while (before := _update(ctx, updates[0].base)) and before.dims == updates[0].dims and _is_avoidable(ctx, before):
        updates.insert(0, before)
    return dataclasses.replace(found, updates=tuple(updates))


def _is_avoidable(ctx: Context, update: SliceUpdate) -> bool:
    """True if all consumers of the updated tensor are products that can read its parts, or later updates for which the same holds."""
    for user, read in _readers(update.node):
        positions = [position for position, argument in enumerate(user.args) if argument is read]
        if _uses(user, read) != len(positions):
            return False
        later = _update(ctx, user)
        if later is not None and read is update.node and positions == [0] and later.dims == update.dims:
            if not _is_avoidable(ctx, later):
                return False
        elif not all(_operand_structure(ctx, user, position) for position in positions):
            return False
    return True


def _uses(user: Node, node: Node) -> int:
    """Returns how often `node` occurs among the arguments of `user`, including those in lists."""
    found: list[Node] = []
    torch.fx.node.map_arg((user.args, user.kwargs), lambda argument: found.append(argument))
    return found.count(node)


def _readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yields the consumers of a node's values, directly or through views: the consumer, and the node or view that it reads."""
    for user in node.users:
        if user.target in _VIEWS and user.args[0] is node:
            yield from _readers(user)
        else:
            yield user, node


def _operand_structure(ctx: Context, product: Node, position: int) -> UpdatedOperand | None:
    """Returns the way in which a product reads an argument, regardless of other readers; None if it cannot read the parts."""
    roles = PRODUCTS.get(product.target, {}).get(position)
    node, other = product.args[position], product.args[roles.other] if roles is not None else None
    if roles is None or not isinstance(node, Node) or not isinstance(other, Node):
        return None
    views: list[Node] = []
    while node.target in _VIEWS and isinstance(node.args[0], Node):
        views.insert(0, node)
        node = node.args[0]
    update = _update(ctx, node)
    if update is None:
        return None
    spec: TensorSpec = ctx.spec(node)
    if 0 in ctx.spec(other).shape or any(0 in ctx.spec(view).shape for view in views):
        return None
    parts = _split(spec.shape, [ctx.spec(view).shape for view in takewhile(lambda view: view.target in _RESHAPES, views)])
    shape = [size for sizes in parts for size in sizes]
    owners = [dim for dim, sizes in enumerate(parts) for _ in sizes]
    dims = tuple(dim for dim, owner in enumerate(owners) if owner in update.dims and shape[dim] > 1)
    factors = _view_factors(ctx, shape, views)
    if factors is None or not _is_computable(factors, roles, dims):
        return None
    repeated = math.prod(size for factor in factors for origin, size in factor if origin is None)
    outer = math.prod(ctx.spec(other).shape[dim] for dim in roles.outer)
    rows = outer // math.prod(size for dim in roles.batch for _, size in factors[dim]) * repeated
    return UpdatedOperand((update,), parts, factors, dims, spec.dtype, roles, rows)


def _split(shape: Sequence[int], views: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the sizes into which a sequence of views splits each dimension."""
    whole = [[size] for size in shape]
    for view in views:
        ends = sorted({*accumulate((size for sizes in whole for size in sizes), mul), *accumulate(view, mul)})
        if any(end % before for before, end in pairwise(ends)):
            break
        start, split = 1, []
        for sizes in whole:
            stop = start * math.prod(sizes)
            bounds = [start, *(end for end in ends if start < end <= stop)]
            split.append([end // before for before, end in pairwise(bounds)] or [1])
            start = stop
        whole = split
    return tuple(map(tuple, whole))


def _is_computable(factors: Factors, roles: OperandRoles, updated: Sequence[int]) -> bool:
    """True if the product can be computed from the old tensor and the slices.

    Only batch dimensions may repeat values. An updated dimension may be a batch dimension, unless it is the only updated one. The other
    updated dimensions must either all be contracting, or all be in the result.
    """
    kinds = set()
    for dim, factor in enumerate(factors):
        is_batch = dim in roles.batch
        if any((origin is None and not is_batch) for origin, _ in factor):
            return False
        if any(origin in updated for origin, _ in factor):
            kinds.add("batch" if is_batch else "contracting" if dim in roles.contracting else "free")
    return not kinds >= {"contracting", "free"} and (len(updated) > 1 or "batch" not in kinds)


# Ops that keep the order of the values: views that only change the shape, and copies.
_RESHAPES = frozenset(
    [
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
    ]
)
_VIEWS = _RESHAPES | {aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default}


def _view_factors(ctx: Context, shape: Sequence[int], views: list[Node]) -> Factors | None:
    """Returns the factors of the dimensions of a view; None if a factor would have to be split."""
    factors: Factors | None = tuple(((dim, size),) if size != 1 else () for dim, size in enumerate(shape))
    for node in views:
        assert factors is not None
        shape = ctx.spec(node).shape
        if node.target in _RESHAPES:
            factors = _regrouped(factors, shape)
            if factors is None:
                return None
        elif node.target is aten.expand.default:
            factors = ((),) * (len(shape) - len(factors)) + factors
            factors = tuple(((None, size),) if not factor and size != 1 else factor for factor, size in zip(factors, shape, strict=True))
        else:
            order = list(range(len(factors)))
            if node.target is aten.permute.default:
                order = [dim % len(order) for dim in node.args[1]]
            elif len(order) > 1:
                first, second = node.args[1:] or (0, 1)
                order[first], order[second] = order[second], order[first]
            factors = tuple(factors[dim] for dim in order)
    return factors


def _regrouped(factors: Factors, shape: Sequence[int]) -> Factors | None:
    """Regroups the factors for the dimensions of another shape; None if a factor would have to be split."""
    remaining = [factor for group in factors for factor in group]
    groups = []
    for size in shape:
        group: list[Factor] = []
        while math.prod(part for _, part in group) < size and remaining:
            group.append(remaining.pop(0))
        if math.prod(part for _, part in group) != size:
            return None
        groups.append(tuple(group))
    return tuple(groups)


_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)


def _update(ctx: Context, node: Node) -> SliceUpdate | None:
    """Returns the update that a node performs; None if its slices are not of the kind described by `SliceUpdate`."""
    rule = _UPDATES.get(node.target)
    if rule is None or not isinstance(node.args[0], Node):
        return None
    spec: TensorSpec = ctx.spec(node)
    found = rule(ctx, node, spec) if spec.dtype in _FLOATS and spec.shape and 0 not in spec.shape else None
    if found is None:
        return None
    dims = tuple(dim for dim in found[0] if spec.shape[dim] > 1)
    return SliceUpdate(node, dims, found[1]) if found[1] > 0 and dims else None


def _of_index_copy(ctx: Context, node: Node, spec: TensorSpec) -> tuple[tuple[int, ...], int]:
    return (wrap(node.args[1], len(spec.shape)),), math.prod(ctx.spec_of(node.args[2]).shape)


def _of_index_put(ctx: Context, node: Node, spec: TensorSpec) -> tuple[tuple[int, ...], int] | None:
    indices, accumulate = node.args[1], (*node.args[3:], node.kwargs.get("accumulate", False))[0]
    given = [(dim, ctx.spec_of(index)) for dim, index in enumerate(indices) if index is not None]
    if accumulate or any(index.dtype not in _INTEGERS for _, index in given) or (len(given) == 1 and len(given[0][1].shape) > 1):
        return None
    return tuple(dim for dim, _ in given), math.prod(torch.broadcast_shapes(*(index.shape for _, index in given)))


def _of_scatter(ctx: Context, node: Node, spec: TensorSpec) -> tuple[tuple[int, ...], int] | None:
    """Returns the updated dimensions and the number of slices; None if the index tensor does not cover the other dimensions."""
    dim, index = wrap(node.args[1], len(spec.shape)), node.args[2]
    given = ctx.spec_of(index).shape
    if (*given[:dim], *given[dim + 1 :]) != (*spec.shape[:dim], *spec.shape[dim + 1 :]):
        return None
    chosen = varying_dims(ctx, index)
    return tuple(sorted({*chosen, dim})), math.prod(given[at] for at in {*chosen, dim})


def varying_dims(ctx: Context, index: Node) -> tuple[int, ...]:
    """Returns the dimensions along which an index tensor may vary: those that are not expanded."""
    shape = ctx.spec_of(index).shape
    if index.target is not aten.expand.default:
        return tuple(range(len(shape)))
    own = ctx.spec_of(index.args[0]).shape
    own = (1,) * (len(shape) - len(own)) + own
    return tuple(dim for dim, size in enumerate(own) if size > 1)


def written_range(ctx: Context, node: Node) -> range:
    """Returns the indices that slice_scatter or select_scatter overwrites."""
    size = ctx.spec(node).shape[wrap(_get_argument(node, 2, "dim", 0), len(ctx.spec(node).shape))]
    if node.target is aten.select_scatter.default:
        index = ctx.spec_of(_get_argument(node, 3, "index", 0))
        index += size if index < 0 else 0
        return range(index, index + 1)
    start, end = (ctx.spec_of(_get_argument(node, place, name, None)) for place, name in ((3, "start"), (4, "end")))
    step = ctx.spec_of(_get_argument(node, 5, "step", 1))
    first, _, count = clamp_slice(size, start, end, step)
    return range(first, first + count * step, step)


def _of_slice(ctx: Context, node: Node, spec: TensorSpec) -> tuple[tuple[int, ...], int] | None:
    if may_overlap(ctx.spec_of(node.args[0])):
        return None
    return (wrap(_get_argument(node, 2, "dim", 0), len(spec.shape)),), len(written_range(ctx, node))


def _get_argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


_UPDATES = {
    aten.index_copy.default: _of_index_copy,
    aten.index_put.default: _of_index_put,
    aten._unsafe_index_put.default: _of_index_put,
    aten.scatter.src: _of_scatter,
    aten.slice_scatter.default: _of_slice,
    aten.select_scatter.default: _of_slice,
}
