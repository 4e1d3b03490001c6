"""Padding rules (see `padded_rules.py`) for writes by index: padding must change nothing.

If an op accumulates the written values, the padding of the values is set to the neutral element. If the written values replace old values,
the padding repeats the last valid index and value, so that the op writes the last value several times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...lowering.dimensions import wrap
from ...lowering.graphs import is_tensor
from ...lowering.ops.valid_size_ops import write_into
from ...torch_ops import aten
from .padded_layers import checked_indices
from .padded_rules import END, argument, converted, number_of, replace_by, require_single_prefix, rule, value
from .padding_rewrite import PaddingRewrite
from .valid_sizes import Extent, Extents, NoPaddingRule, broadcast, common_extent, size_of, with_extent


def _non_uniform(extents: Extents) -> Extents:
    return tuple(extent.non_uniform for extent in extents)


# Writes of slices, with one index for each slice


_FILLS = aten.index_fill.int_Scalar, aten.index_fill.int_Tensor


@rule(aten.index_add.default, aten.index_copy.default, *_FILLS)
def _write_slices(rewrite: PaddingRewrite, node: Node) -> Extents:
    table, dim, index = node.args[:3]
    assert isinstance(table, Node)
    assert isinstance(index, Node)
    extents = rewrite.extents_of(table)
    if not extents or value(index).dim() != 1:
        raise NoPaddingRule("the indexed tensor or the index has an unsupported rank")
    dim = wrap(dim, len(extents))
    result_extents = _non_uniform(extents)
    if node.target in _FILLS:
        rewrite.require_exact(node.args[3])
    else:
        source = node.args[3]
        assert isinstance(source, Node)
        if value(source).dim() != len(extents):
            raise NoPaddingRule("it writes one number to slices")
        own = rewrite.extents_of(source)
        index_extents = common_extent([own[dim], rewrite.extents_of(index)[0]])
        result_extents = broadcast([with_extent(result_extents, dim, Extent(())), with_extent(own, dim, Extent(()))])
        result_extents = with_extent(result_extents, dim, extents[dim].non_uniform)
        if node.target is aten.index_add.default:
            rewrite.require_exact(argument(node, "alpha"))
            node.update_arg(3, rewrite.masked(source, [dim], 0, with_extent(own, dim, index_extents)))
        else:
            node.update_arg(3, rewrite.edge_filled(source, [dim]))
            if rewrite.is_padded(index_extents) and not rewrite.is_padded(own[dim]):
                raise NoPaddingRule("operands are padded along different sizes")
    filled = rewrite.edge_filled(index, [0])
    node.update_arg(2, checked_indices(rewrite, filled, table, dim, from_end=node.target in _FILLS, is_padding_valid=True))
    return result_extents


# Writes of elements, with one index for each element


# Values of the argument `reduce` for which the padding repeats the last valid value, and the neutral elements of the other values.
_BY_EDGE_FILLING = ("amax", "amin")
_NEUTRAL = {"sum": 0, "prod": 1}


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two)
def _scatter(rewrite: PaddingRewrite, node: Node) -> Extents:
    table, dim, index = node.args[:3]
    assert isinstance(table, Node)
    assert isinstance(index, Node)
    extents, index_extents = _non_uniform(rewrite.extents_of(table)), _non_uniform(rewrite.extents_of(index))
    if not extents or len(index_extents) != len(extents):
        raise NoPaddingRule("the indexed tensor or the index has an unsupported rank")
    dim = wrap(dim, len(extents))
    for d, (table_extent, index_extent) in enumerate(zip(extents, index_extents, strict=True)):
        # A shorter index that is not padded writes to valid positions only.
        if d != dim and table_extent != index_extent and (rewrite.is_padded(index_extent) or not _is_prefix(table_extent, table, d)):
            raise NoPaddingRule("operands are padded along different sizes")
    reduce = "sum" if node.target is aten.scatter_add.default else argument(node, "reduce") if node.target is _REDUCE else "set"
    if reduce not in ("set", *_NEUTRAL, *_BY_EDGE_FILLING):
        raise NoPaddingRule(f"there is no padding rule for reduce={reduce!r}")
    source = node.args[3]
    if is_tensor(source):
        assert isinstance(source, Node)
        for d, (source_extent, index_extent) in enumerate(zip(_non_uniform(rewrite.extents_of(source)), index_extents, strict=True)):
            is_read = d != dim and _is_prefix(source_extent, source, d) and _is_prefix(index_extent, index, d)
            if source_extent != index_extent and not is_read and (rewrite.is_padded(source_extent) or rewrite.is_padded(index_extent)):
                raise NoPaddingRule("operands are padded along different sizes")
        filled = (
            rewrite.masked(source, [dim], _NEUTRAL[reduce], index_extents) if reduce in _NEUTRAL else rewrite.edge_filled(source, [dim])
        )
        node.update_arg(3, filled)
    else:
        rewrite.require_exact(source)
    other_dims = [d for d in range(len(index_extents)) if d != dim]
    index = rewrite.edge_filled(rewrite.masked(index, other_dims, 0), [dim])
    node.update_arg(2, checked_indices(rewrite, index, table, dim, from_end=False, is_index=False, is_padding_valid=True))
    return extents


_REDUCE = aten.scatter_reduce.two


def _is_prefix(extent: Extent, tensor: Node, dim: int) -> bool:
    return extent.non_uniform == Extent.of(size_of(value(tensor).shape[dim]))


# Writes by index tensors for several dimensions


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _index_put(rewrite: PaddingRewrite, node: Node) -> Extents:
    table, indices, values = node.args[:3]
    assert isinstance(table, Node)
    assert isinstance(values, Node)
    index_by_dim = {dim: index for dim, index in enumerate(indices) if index is not None}
    extents = _non_uniform(rewrite.extents_of(table))
    if any(value(index).dtype in (torch.bool, torch.uint8) for index in index_by_dim.values()):
        return _masked_put(rewrite, node, index_by_dim)
    accumulate = argument(node, "accumulate")
    shape = broadcast([rewrite.extents_of(index) for index in index_by_dim.values()])
    dims = sorted(index_by_dim)
    at = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    rest = tuple(extent for dim, extent in enumerate(extents) if dim not in index_by_dim)
    region_extents = (*rest[:at], *shape, *rest[at:])
    value_extents = rewrite.extents_of(values)
    broadcast([region_extents, value_extents])
    result_dims = range(at, at + len(shape))
    first = len(region_extents) - len(value_extents)
    index_dims = [dim - first for dim in result_dims if dim >= first]
    if accumulate:
        if any(
            rewrite.is_padded(region_extents[dim]) and (dim < first or _is_one(value(values).shape[dim - first])) for dim in result_dims
        ):
            # One value is broadcast to valid positions and padding: expand it, so that the padding can be zero.
            sizes = _written_shape(rewrite, at, index_by_dim, table)
            expanded = rewrite.add(aten.expand.default, (values, sizes), [number_of(size) for size in sizes], value(values))
            rewrite.extents[expanded] = tuple(region_extents)
            values, value_extents, index_dims = expanded, tuple(region_extents), list(result_dims)
            first = 0
        operand_extents = tuple(region_extents[first + dim] if first + dim in result_dims else own for dim, own in enumerate(value_extents))
        node.update_arg(2, rewrite.masked(values, index_dims, 0, operand_extents))
    else:
        node.update_arg(2, rewrite.edge_filled(values, index_dims))
        if any(
            rewrite.is_padded(region_extents[first + dim]) and not _matches_region(value_extents[dim], region_extents[first + dim])
            for dim in index_dims
        ):
            raise NoPaddingRule("operands are padded along different sizes")
    changed = list(indices)
    for dim, index in index_by_dim.items():
        filled = index if accumulate else rewrite.edge_filled(index, range(value(index).dim()))
        changed[dim] = checked_indices(rewrite, filled, table, dim, from_end=True, is_padding_valid=not accumulate)
    node.update_arg(1, changed)
    return extents


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _matches_region(own: Extent, region_extent: Extent) -> bool:
    """True if the values of a dimension are broadcast, uniform, or have the extent of the written region."""
    return not own.factors or own.uniform or own.non_uniform == region_extent.non_uniform


def _written_shape(rewrite: PaddingRewrite, at: int, index_by_dim: dict[int, Any], table: Node) -> list[Any]:
    """Returns the shape of the elements that an `index_put` writes, as ints and nodes. at: the first dimension of the indices' shape."""
    rank = max(value(index).dim() for index in index_by_dim.values())
    shape: list[Any] = [1] * rank
    for index in index_by_dim.values():
        for dim in range(value(index).dim()):
            if not _is_one(value(index).shape[dim]):
                shape[rank - value(index).dim() + dim] = rewrite.rounded_size(index, dim)
    rest = [rewrite.rounded_size(table, dim) for dim in range(value(table).dim()) if dim not in index_by_dim]
    return [*rest[:at], *shape, *rest[at:]]


def _masked_put(rewrite: PaddingRewrite, node: Node, index_by_dim: dict[int, Node]) -> Extents:
    """Rewrites the write of one number, at the positions where a mask is True, as `where`."""
    table, _, values = node.args[:3]
    assert isinstance(table, Node)
    assert isinstance(values, Node)
    extents = rewrite.extents_of(table)
    if len(index_by_dim) > 1 or argument(node, "accumulate") or any(not _is_one(size) for size in value(values).shape):
        raise NoPaddingRule("it writes several values to the elements of a mask")
    ((dim, mask),) = index_by_dim.items()
    if value(mask).dtype != torch.bool:
        raise NoPaddingRule("its mask has the dtype uint8; masks of the dtype bool have a rule")
    own = rewrite.extents_of(mask)
    for _ in range(len(extents) - dim - value(mask).dim()):
        shape = [*value(mask).shape, 1]
        mask = rewrite.add(aten.unsqueeze.default, (mask, len(shape) - 1), shape, value(mask))
        own = (*own, Extent(()))
    found = broadcast([extents, own])
    if value(values).dim():
        values = rewrite.add(aten.view.default, (values, []), (), value(values))
    replace_by(node, rewrite.add(aten.where.self, (mask, values, table), value(node).shape, value(node)))
    return found


# Writes of one slice at a position


@rule(aten.slice_scatter.default)
def _slice_scatter(rewrite: PaddingRewrite, node: Node) -> Extents:
    table, added = node.args[:2]
    assert isinstance(table, Node)
    assert isinstance(added, Node)
    extents, own = rewrite.extents_of(table), rewrite.extents_of(added)
    dim = wrap(argument(node, "dim"), len(extents))
    start, step = argument(node, "start") or 0, argument(node, "step")
    result_extents = broadcast([with_extent(extents, dim, Extent(())), with_extent(own, dim, Extent(()))])
    count, whole = size_of(value(added).shape[dim]), size_of(value(table).shape[dim])
    result = with_extent(result_extents, dim, extents[dim].non_uniform)
    if not rewrite.is_padded(extents[dim]) and not rewrite.is_padded(own[dim]):
        rewrite.require_exact(start, argument(node, "end"), step)
        return result
    if step != 1 or own[dim].non_uniform != Extent.of(count):
        raise NoPaddingRule("a slice with a step, or of a flattened dimension, is written")
    require_single_prefix(rewrite, table, [dim])
    if isinstance(start, int) and start < 0:
        if argument(node, "end") not in (None, END):
            raise NoPaddingRule("the start and the end of a slice count from the end")
        first = whole - count
    else:
        first = start if isinstance(start, int) else size_of(value(start))
    _replace_by_write(rewrite, node, table, added, dim, first, count)
    return result


@rule(aten.select_scatter.default)
def _select_scatter(rewrite: PaddingRewrite, node: Node) -> Extents:
    table, added, dim, index = node.args
    assert isinstance(table, Node)
    assert isinstance(added, Node)
    extents, own = rewrite.extents_of(table), rewrite.extents_of(added)
    dim = wrap(dim, len(extents))
    own = (*own[:dim], Extent(()), *own[dim:])
    result = with_extent(broadcast([with_extent(extents, dim, Extent(())), own]), dim, extents[dim].non_uniform)
    if rewrite.is_padded(extents[dim]) or rewrite.is_rounded(index):
        require_single_prefix(rewrite, table, [dim])
        whole = size_of(value(table).shape[dim])
        first = size_of(value(index)) if not isinstance(index, int) else index if index >= 0 else whole + index
        shape = [*value(added).shape[:dim], 1, *value(added).shape[dim:]]
        row = rewrite.add(aten.unsqueeze.default, (added, dim), shape, value(added))
        rewrite.extents[row] = own
        _replace_by_write(rewrite, node, table, row, dim, first, 1)
    return result


def _replace_by_write(rewrite: PaddingRewrite, node: Node, table: Node, added: Node, dim: int, first: Any, count: Any) -> None:
    """Turns a node into the table with the slice `added` written to the true positions `first` to `first + count`, exclusive."""
    added = converted(rewrite, added, value(table).dtype)
    size_index, start = (-1, first) if isinstance(first, int) else (rewrite.true_size_index(first), 0)
    count_index, fixed_count = (-1, count) if isinstance(count, int) else (rewrite.true_size_index(count), 0)
    like = value(node)
    replace_by(
        node,
        rewrite.add(write_into, (table, added, rewrite.true_sizes, dim, size_index, start, count_index, fixed_count), like.shape, like),
    )
