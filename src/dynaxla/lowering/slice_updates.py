"""Finds matrix products with an updated tensor: a tensor of which a few slices were replaced, such as a key/value cache after a new token.

Such a product can be computed from the old tensor and the new slices, so that the updated tensor is never materialized. This is possible if
all consumers of the updated tensor, directly or through views, are such products.
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
from .memory_order import transposed_order
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


# A factor of a view's dimension: a dimension of the base (None if the view repeats values, as expand does), and its size.
Factor = tuple[int | None, int]
# For each dimension of a view, its factors. A view of shape (6,) of a base of shape (2, 3) has the factors (((0, 2), (1, 3)),).
Factors = tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True)
class OperandRoles:
    """The dimensions of one operand of a product, by their role.

    Attributes:
        contracting: The dimensions that are summed.
        batch: The batch dimensions, which both operands have.
        other_position: The position, among the op's arguments, of the product's other operand, or of an argument with the
            same sizes in `other_dims`.
        other_dims: The dimensions of the other operand that are not summed, batch dimensions included.
    """

    contracting: tuple[int, ...]
    batch: tuple[int, ...]
    other_position: int
    other_dims: tuple[int, ...]


_ATTENTION = {1: OperandRoles((3,), (0, 1), 0, (0, 1, 2)), 2: OperandRoles((2,), (0, 1), 0, (0, 1, 2))}
# By op, and by the operand's position among the op's arguments.
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
        parts: For each dimension of the tensor, the sizes into which the views split the dimension: ((2, 3), (4,)) if a tensor of shape
            (6, 4) is viewed as (2, 3, 4). The other attributes number these split dimensions: 0, 1, 2.
        factors: For each dimension of the operand, the split dimensions that it consists of, without dimensions of size 1.
        dims: The updated dimensions, in which each slice has one index.
        dtype: The tensor's dtype.
        roles: The roles of the operand's dimensions.
        rows: The number of vectors of the other operand with which each vector of the tensor is multiplied. In attention, the number of
            query rows for each key head.
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
    def slice_count(self) -> int:
        """The number of slices of the whole tensor."""
        return math.prod(self.shape[dim] for dim in self.dims)

    @property
    def new_slice_count(self) -> int:
        """The number of new slices in all updates."""
        return sum(update.count for update in self.updates)

    @property
    def is_moved(self) -> bool:
        """True if the batch dimensions are not the leading dimensions of the tensor."""
        batch = {origin for dim in self.roles.batch for origin, _ in self.factors[dim] if origin is not None}
        others = [dim for dim, size in enumerate(self.shape) if size > 1 and dim not in batch]
        return bool(batch) and min(others) < max(batch)

    @property
    def has_strides(self) -> bool:
        """True if a library can read the tensor as a batch of matrices with strides.

        Besides batch dimensions, the tensor then has one contracting and one other dimension, and one of the two varies fastest in memory.
        """
        batch = {origin for dim in self.roles.batch for origin, _ in self.factors[dim]}
        contracting = {origin for dim in self.roles.contracting for origin, _ in self.factors[dim]}
        long_dims = [dim for dim, size in enumerate(self.shape) if size > 1]
        return len(contracting) == 1 and len(long_dims) == len(batch - {None}) + 2 and long_dims[-1] not in batch

    @property
    def sums_slices(self) -> bool:
        """True if the product sums over an updated dimension; otherwise the product's result has the updated dimensions."""
        return any(origin in self.dims for dim in self.roles.contracting for origin, _ in self.factors[dim])


def updated_operand(ctx: Context, position: int) -> UpdatedOperand | None:
    """Returns the description of an argument of the current node, a product, that is a view of an updated tensor.

    Returns None if the argument is no such view, or if another node needs the whole updated tensor.
    """
    operand = _operand_structure(ctx, ctx.node, position)
    if operand is None or not _is_avoidable(ctx, operand.updates[0]):
        return None
    updates = list(operand.updates)
    while (earlier := _update(ctx, updates[0].base)) and earlier.dims == updates[0].dims and _is_avoidable(ctx, earlier):
        updates.insert(0, earlier)
    return dataclasses.replace(operand, updates=tuple(updates))


def _is_avoidable(ctx: Context, update: SliceUpdate) -> bool:
    """True if the updated tensor need not be materialized.

    Each consumer must be a product that can be computed from the old tensor and the slices, or a later update that is avoidable itself.
    """
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
    """Returns how often `node` occurs among the arguments of `user`, lists included."""
    sources: list[Node] = []
    torch.fx.node.map_arg((user.args, user.kwargs), lambda source: sources.append(source))
    return sources.count(node)


def _readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yields the consumers of a node's values, directly or through views: the consumer, and the node or view that it reads."""
    for user in node.users:
        if user.target in _VIEWS and user.args[0] is node:
            yield from _readers(user)
        else:
            yield user, node


def _operand_structure(ctx: Context, product: Node, position: int) -> UpdatedOperand | None:
    """Returns the description of a product's argument that is a view of an updated tensor, regardless of other consumers of the tensor.

    Returns None if the product cannot be computed from the old tensor and the slices.
    """
    roles = PRODUCTS.get(product.target, {}).get(position)
    node, other = product.args[position], product.args[roles.other_position] if roles is not None else None
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
    vectors = math.prod(ctx.spec(other).shape[dim] for dim in roles.other_dims)
    rows = vectors // math.prod(size for dim in roles.batch for _, size in factors[dim]) * repeated
    return UpdatedOperand((update,), parts, factors, dims, spec.dtype, roles, rows)


def _split(shape: Sequence[int], views: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the sizes into which a sequence of views splits each dimension: shape (6, 4) and view (2, 3, 4) give ((2, 3), (4,)).

    Args:
        views: The shapes of the views.
    """
    parts = [[size] for size in shape]
    for view in views:
        # The products of the leading sizes are the boundaries between dimensions.
        ends = sorted({*accumulate((size for sizes in parts for size in sizes), mul), *accumulate(view, mul)})
        if any(end % before for before, end in pairwise(ends)):
            break
        start, split = 1, []
        for sizes in parts:
            stop = start * math.prod(sizes)
            bounds = [start, *(end for end in ends if start < end <= stop)]
            split.append([end // before for before, end in pairwise(bounds)] or [1])
            start = stop
        parts = split
    return tuple(map(tuple, parts))


def _is_computable(factors: Factors, roles: OperandRoles, updated: Sequence[int]) -> bool:
    """True if the product can be computed from the old tensor and the slices.

    Only batch dimensions may repeat values. An updated dimension may be a batch dimension, unless it is the only updated dimension. The
    other updated dimensions must either all be contracting, or all be in the result.
    """
    updated_roles = set()
    for dim, factor in enumerate(factors):
        is_batch = dim in roles.batch
        if any((origin is None and not is_batch) for origin, _ in factor):
            return False
        if any(origin in updated for origin, _ in factor):
            updated_roles.add("batch" if is_batch else "contracting" if dim in roles.contracting else "free")
    return not updated_roles >= {"contracting", "free"} and (len(updated) > 1 or "batch" not in updated_roles)


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
    """Returns the factors of the last of some successive views of a tensor of this shape; None if a factor would have to be split."""
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
            factors = tuple(factors[dim] for dim in transposed_order(node, len(factors)))
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
    """Returns the update that a node performs; None if the node performs no update that `SliceUpdate` can describe."""
    rule = _UPDATES.get(node.target)
    if rule is None or not isinstance(node.args[0], Node):
        return None
    spec: TensorSpec = ctx.spec(node)
    slices = rule(ctx, node, spec) if spec.dtype in _FLOATS and spec.shape and 0 not in spec.shape else None
    if slices is None:
        return None
    dims, count = tuple(dim for dim in slices[0] if spec.shape[dim] > 1), slices[1]
    return SliceUpdate(node, dims, count) if count > 0 and dims else None


def _slices_of_index_copy(ctx: Context, node: Node, spec: TensorSpec) -> tuple[tuple[int, ...], int]:
    return (wrap(node.args[1], len(spec.shape)),), math.prod(ctx.spec_of(node.args[2]).shape)


def _slices_of_index_put(ctx: Context, node: Node, spec: TensorSpec) -> tuple[tuple[int, ...], int] | None:
    indices, accumulate = node.args[1], (*node.args[3:], node.kwargs.get("accumulate", False))[0]
    by_dim = [(dim, ctx.spec_of(index)) for dim, index in enumerate(indices) if index is not None]
    if accumulate or any(index.dtype not in _INTEGERS for _, index in by_dim) or (len(by_dim) == 1 and len(by_dim[0][1].shape) > 1):
        return None
    return tuple(dim for dim, _ in by_dim), math.prod(torch.broadcast_shapes(*(index.shape for _, index in by_dim)))


def _slices_of_scatter(ctx: Context, node: Node, spec: TensorSpec) -> tuple[tuple[int, ...], int] | None:
    """Returns the updated dimensions and the number of slices; None if the index tensor does not cover the other dimensions."""
    dim, index = wrap(node.args[1], len(spec.shape)), node.args[2]
    shape = ctx.spec_of(index).shape
    if (*shape[:dim], *shape[dim + 1 :]) != (*spec.shape[:dim], *spec.shape[dim + 1 :]):
        return None
    updated_dims = {*varying_dims(ctx, index), dim}
    return tuple(sorted(updated_dims)), math.prod(shape[updated_dim] for updated_dim in updated_dims)


def varying_dims(ctx: Context, index: Node) -> tuple[int, ...]:
    """Returns the dimensions along which an index tensor may vary: all dimensions that are not expanded."""
    shape = ctx.spec_of(index).shape
    if index.target is not aten.expand.default:
        return tuple(range(len(shape)))
    unexpanded = ctx.spec_of(index.args[0]).shape
    unexpanded = (1,) * (len(shape) - len(unexpanded)) + unexpanded
    return tuple(dim for dim, size in enumerate(unexpanded) if size > 1)


def written_range(ctx: Context, node: Node) -> range:
    """Returns the indices that slice_scatter or select_scatter overwrites."""
    size = ctx.spec(node).shape[wrap(_get_argument(node, 2, "dim", 0), len(ctx.spec(node).shape))]
    if node.target is aten.select_scatter.default:
        index = ctx.spec_of(_get_argument(node, 3, "index", 0))
        index += size if index < 0 else 0
        return range(index, index + 1)
    start, end = (ctx.spec_of(_get_argument(node, position, name, None)) for position, name in ((3, "start"), (4, "end")))
    step = ctx.spec_of(_get_argument(node, 5, "step", 1))
    first, _, count = clamp_slice(size, start, end, step)
    return range(first, first + count * step, step)


def _slices_of_slice_scatter(ctx: Context, node: Node, spec: TensorSpec) -> tuple[tuple[int, ...], int] | None:
    if may_overlap(ctx.spec_of(node.args[0])):
        return None
    return (wrap(_get_argument(node, 2, "dim", 0), len(spec.shape)),), len(written_range(ctx, node))


def _get_argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


# By op: a function that returns the updated dimensions and the number of slices; None if the slices have another form.
_UPDATES = {
    aten.index_copy.default: _slices_of_index_copy,
    aten.index_put.default: _slices_of_index_put,
    aten._unsafe_index_put.default: _slices_of_index_put,
    aten.scatter.src: _slices_of_scatter,
    aten.slice_scatter.default: _slices_of_slice_scatter,
    aten.select_scatter.default: _slices_of_slice_scatter,
}
