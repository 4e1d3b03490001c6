"""Padding rules (see `padded_rules.py`) for writes by index: padding must change nothing.

Where written values are accumulated, the padding is set to the neutral element. Where they replace others, the padding repeats the last
valid index and value, and so writes the same value once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ...lowering.dimensions import wrap
from ...lowering.ops.masking import write_into
from ...torch_ops import aten, prims
from .masks import Masks
from .padded_layers import index_of, places_in
from .padded_rules import END, argument, become, one_dimension, rule, value
from .valid_sizes import Extent, Extents, NoPaddingRule, broadcast, joined, replaced, size_of, sizes_of


def _is_tensor(item: Any) -> bool:
    return isinstance(item, Node) and isinstance(item.meta.get("val"), torch.Tensor)


def _resolved(extents: Extents) -> Extents:
    return tuple(extent.resolved for extent in extents)


# Writes of slices: one index for each slice


_FILLS = aten.index_fill.int_Scalar, aten.index_fill.int_Tensor


@rule(aten.index_add.default, aten.index_copy.default, *_FILLS)
def _slices(masks: Masks, node: Node) -> Extents:
    table, dim, index = node.args[:3]
    assert isinstance(table, Node)
    assert isinstance(index, Node)
    extents = masks.of(table)
    if not extents or value(index).dim() != 1:
        raise NoPaddingRule("it indexes a tensor of rank 0")
    dim = wrap(dim, len(extents))
    around = _resolved(extents)
    if node.target in _FILLS:
        masks.exact(node.args[3])
    else:
        source = node.args[3]
        assert isinstance(source, Node)
        if value(source).dim() != len(extents):
            raise NoPaddingRule("it writes one number to slices")
        own = masks.of(source)
        places = joined([own[dim], masks.of(index)[0]])
        around = broadcast([replaced(around, dim, Extent(())), replaced(own, dim, Extent(()))])
        around = replaced(around, dim, extents[dim].resolved)
        if node.target is aten.index_add.default:
            masks.exact(argument(node, "alpha"))
            node.update_arg(3, masks.masked(source, [dim], 0, replaced(own, dim, places)))
        else:
            node.update_arg(3, masks.held(source, [dim]))
            if masks.is_padded(places) and not masks.is_padded(own[dim]):
                raise NoPaddingRule("operands are padded along different sizes")
    held = masks.held(index, [0])
    node.update_arg(2, index_of(masks, held, table, dim, from_end=node.target in _FILLS, held=True))
    return around


# Writes of elements: one index for each element


_BY_HOLDING = ("amax", "amin")
_NEUTRAL = {"sum": 0, "prod": 1}


@rule(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two)
def _elements(masks: Masks, node: Node) -> Extents:
    table, dim, index = node.args[:3]
    assert isinstance(table, Node)
    assert isinstance(index, Node)
    extents, wanted = _resolved(masks.of(table)), _resolved(masks.of(index))
    if not extents or len(wanted) != len(extents):
        raise NoPaddingRule("it indexes a tensor of rank 0")
    dim = wrap(dim, len(extents))
    for d, (own, other) in enumerate(zip(extents, wanted, strict=True)):
        # A shorter index that is not padded writes to valid positions only.
        if d != dim and own != other and (masks.is_padded(other) or not _is_prefix(own, table, d)):
            raise NoPaddingRule("operands are padded along different sizes")
    reduce = "sum" if node.target is aten.scatter_add.default else argument(node, "reduce") if node.target is _REDUCE else "set"
    if reduce not in ("set", *_NEUTRAL, *_BY_HOLDING):
        raise NoPaddingRule(f"it scatters with reduce={reduce!r}")
    source = node.args[3]
    if _is_tensor(source):
        assert isinstance(source, Node)
        for d, (own, other) in enumerate(zip(_resolved(masks.of(source)), wanted, strict=True)):
            is_read = d != dim and _is_prefix(own, source, d) and _is_prefix(other, index, d)
            if own != other and not is_read and (masks.is_padded(own) or masks.is_padded(other)):
                raise NoPaddingRule("operands are padded along different sizes")
        held = masks.masked(source, [dim], _NEUTRAL[reduce], wanted) if reduce in _NEUTRAL else masks.held(source, [dim])
        node.update_arg(3, held)
    else:
        masks.exact(source)
    around = [d for d in range(len(wanted)) if d != dim]
    index = masks.held(masks.masked(index, around, 0), [dim])
    node.update_arg(2, index_of(masks, index, table, dim, from_end=False, is_index=False, held=True))
    return extents


_REDUCE = aten.scatter_reduce.two


def _is_prefix(extent: Extent, tensor: Node, dim: int) -> bool:
    return extent.resolved == Extent.of(size_of(value(tensor).shape[dim]))


# Writes by any number of indices


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def _put(masks: Masks, node: Node) -> Extents:
    table, indices, values = node.args[:3]
    assert isinstance(table, Node)
    assert isinstance(values, Node)
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    extents = _resolved(masks.of(table))
    if any(value(index).dtype in (torch.bool, torch.uint8) for index in given.values()):
        return _put_by_mask(masks, node, given)
    accumulate = argument(node, "accumulate")
    shape = broadcast([masks.of(index) for index in given.values()])
    dims = sorted(given)
    at = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    rest = tuple(extent for dim, extent in enumerate(extents) if dim not in given)
    wanted = (*rest[:at], *shape, *rest[at:])
    written = masks.of(values)
    broadcast([wanted, written])
    places = range(at, at + len(shape))
    first = len(wanted) - len(written)
    told = [dim - first for dim in places if dim >= first]
    if accumulate:
        if any(masks.is_padded(wanted[dim]) and (dim < first or _is_one(value(values).shape[dim - first])) for dim in places):
            # One value is broadcast to valid positions and padding: expand it, so that the padding can be zero.
            sizes = _sizes(masks, node, at, given, table)
            expanded = masks.add(aten.expand.default, (values, sizes), [_size(size) for size in sizes], value(values))
            masks.extents[expanded] = tuple(wanted)
            values, written, told = expanded, tuple(wanted), list(places)
            first = 0
        by = tuple(wanted[first + dim] if first + dim in places else own for dim, own in enumerate(written))
        node.update_arg(2, masks.masked(values, told, 0, by))
    else:
        node.update_arg(2, masks.held(values, told))
        if any(masks.is_padded(wanted[first + dim]) and not _alike(masks, written[dim], wanted[first + dim]) for dim in told):
            raise NoPaddingRule("operands are padded along different sizes")
    changed = list(indices)
    for dim, index in given.items():
        held = index if accumulate else masks.held(index, range(value(index).dim()))
        changed[dim] = index_of(masks, held, table, dim, from_end=True, held=not accumulate)
    node.update_arg(1, changed)
    return extents


@rule(aten.put.default)
def _put_flat(masks: Masks, node: Node) -> Extents:
    """Converts positions in the flattened table of true sizes to positions in each dimension."""
    table, index, source, accumulate = node.args[0], node.args[1], node.args[2], argument(node, "accumulate")
    assert isinstance(table, Node)
    assert isinstance(index, Node)
    assert isinstance(source, Node)
    if sizes_of(value(index)) != sizes_of(value(source)):
        raise NoPaddingRule(f"its indices have the sizes {sizes_of(value(index))}, and its values have the sizes {sizes_of(value(source))}")
    index = masks.masked(index, range(value(index).dim()), 0)
    masks.extents[index] = _resolved(masks.of(index))
    node.target, node.args = aten.index_put.default, (table, places_in(masks, table, index), source, accumulate)
    return _put(masks, node)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _alike(masks: Masks, own: Extent, wanted: Extent) -> bool:
    return not own.factors or own.uniform or own.resolved == wanted.resolved


def _size(size: Any) -> Any:
    return size.meta["val"] if isinstance(size, Node) else size


def _sizes(masks: Masks, node: Node, at: int, given: dict[int, Any], table: Node) -> list[Any]:
    """Returns the shape of the written elements, as ints and nodes."""
    rank = max(value(index).dim() for index in given.values())
    shape: list[Any] = [1] * rank
    for index in given.values():
        for dim in range(value(index).dim()):
            if not _is_one(value(index).shape[dim]):
                shape[rank - value(index).dim() + dim] = masks.number(index, dim)
    rest = [masks.number(table, dim) for dim in range(value(table).dim()) if dim not in given]
    return [*rest[:at], *shape, *rest[at:]]


def _put_by_mask(masks: Masks, node: Node, given: dict[int, Node]) -> Extents:
    """Rewrites a write of one number where a mask is true as `where`."""
    table, _, values = node.args[:3]
    assert isinstance(table, Node)
    assert isinstance(values, Node)
    extents = masks.of(table)
    if len(given) > 1 or argument(node, "accumulate") or any(not _is_one(size) for size in value(values).shape):
        raise NoPaddingRule("it writes several values to the elements of a mask")
    ((dim, mask),) = given.items()
    if value(mask).dtype != torch.bool:
        raise NoPaddingRule("its mask has the dtype uint8")
    own = masks.of(mask)
    for _ in range(len(extents) - dim - value(mask).dim()):
        shape = [*value(mask).shape, 1]
        mask = masks.add(aten.unsqueeze.default, (mask, len(shape) - 1), shape, value(mask))
        own = (*own, Extent(()))
    found = broadcast([extents, own])
    if value(values).dim():
        values = masks.add(aten.view.default, (values, []), (), value(values))
    become(node, masks.add(aten.where.self, (mask, values, table), value(node).shape, value(node)))
    return found


# Writes of a slice at a position


@rule(aten.slice_scatter.default)
def _put_slice(masks: Masks, node: Node) -> Extents:
    table, added = node.args[:2]
    assert isinstance(table, Node)
    assert isinstance(added, Node)
    extents, own = masks.of(table), masks.of(added)
    dim = wrap(argument(node, "dim"), len(extents))
    start, step = argument(node, "start") or 0, argument(node, "step")
    around = broadcast([replaced(extents, dim, Extent(())), replaced(own, dim, Extent(()))])
    count, whole = size_of(value(added).shape[dim]), size_of(value(table).shape[dim])
    result = replaced(around, dim, extents[dim].resolved)
    if not masks.is_padded(extents[dim]) and not masks.is_padded(own[dim]):
        masks.exact(start, argument(node, "end"), step)
        return result
    if step != 1 or own[dim].resolved != Extent.of(count):
        raise NoPaddingRule("a slice has a step, or is of a flattened dimension")
    one_dimension(masks, table, [dim])
    if isinstance(start, int) and start < 0:
        if argument(node, "end") not in (None, END):
            raise NoPaddingRule("the start and the end of a slice count from the end")
        first = whole - count
    else:
        first = start if isinstance(start, int) else size_of(value(start))
    _become_written(masks, node, table, added, dim, first, count)
    return result


@rule(aten.select_scatter.default)
def _put_one(masks: Masks, node: Node) -> Extents:
    table, added, dim, index = node.args
    assert isinstance(table, Node)
    assert isinstance(added, Node)
    extents, own = masks.of(table), masks.of(added)
    dim = wrap(dim, len(extents))
    own = (*own[:dim], Extent(()), *own[dim:])
    result = replaced(broadcast([replaced(extents, dim, Extent(())), own]), dim, extents[dim].resolved)
    if masks.is_padded(extents[dim]) or masks.is_rounded(index):
        one_dimension(masks, table, [dim])
        whole = size_of(value(table).shape[dim])
        first = size_of(value(index)) if not isinstance(index, int) else index if index >= 0 else whole + index
        shape = [*value(added).shape[:dim], 1, *value(added).shape[dim:]]
        row = masks.add(aten.unsqueeze.default, (added, dim), shape, value(added))
        masks.extents[row] = own
        _become_written(masks, node, table, row, dim, first, 1)
    return result


def _become_written(masks: Masks, node: Node, table: Node, added: Node, dim: int, first: Any, count: Any) -> None:
    if value(added).dtype != value(table).dtype:
        added = masks.add(prims.convert_element_type.default, (added, value(table).dtype), value(added).shape, value(table))
    place, start = (-1, first) if isinstance(first, int) else (masks.place(first), 0)
    counted, number = (-1, count) if isinstance(count, int) else (masks.place(count), 0)
    like = value(node)
    become(node, masks.add(write_into, (table, added, masks.lengths, dim, place, start, counted, number), like.shape, like))
