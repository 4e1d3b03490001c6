"""Rules as in `padded_rules.py` for what puts the elements of a dimension in another order, or takes it apart."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from ..lowering.dimensions import wrap
from .extents import Extent, Extents, Unknown, grows, replaced, size_of
from .masks import Masks
from .padded_rules import (
    argument,
    become,
    become_several,
    highest,
    lowest,
    one_dimension,
    others,
    reduced_dims,
    rule,
    static,
    value,
    without,
)

aten = torch.ops.aten


@rule(aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable, aten.topk.default, aten.kthvalue.default)
def _sorted(masks: Masks, node: Node) -> Any:
    """What does not count is behind all that counts: XLA sorts stably, and of equal elements takes the first."""
    source = node.args[0]
    assert isinstance(source, Node)
    masks.exact(*others(node, "self"))
    extents, names = masks.of(source), {item.name for item in node.target._schema.arguments}
    if extents:
        dim = wrap(argument(node, "dim"), len(extents))
        one_dimension(masks, source, [dim])
        falls = argument(node, "descending") if "descending" in names else "largest" in names and argument(node, "largest")
        dtype = value(source).dtype
        last = lowest(dtype) if falls else math.nan if dtype.is_floating_point else highest(dtype)
        node.update_arg(0, masks.masked(source, [dim], last))
        if "keepdim" in names:
            extents = without(extents, [dim], node)
        else:
            result = node.meta["val"]
            size = (result[0] if isinstance(result, (tuple, list)) else result).shape[dim]
            extents = replaced(extents, dim, Extent.of(size_of(size)))
    return [extents, extents] if isinstance(node.meta["val"], (tuple, list)) else extents


@rule(aten.aminmax.default)
def _extremes(masks: Masks, node: Node) -> list[Extents]:
    source = node.args[0]
    assert isinstance(source, Node)
    masks.exact(*others(node, "self"))
    extents = masks.of(source)
    dims = reduced_dims(node, len(extents))
    result = without(extents, dims, node)
    found = []
    for op, fill, own in ((aten.amin.default, highest, 0), (aten.amax.default, lowest, 1)):
        masked = masks.masked(source, dims, fill(value(source).dtype))
        found.append(masks.add(op, (masked, dims, argument(node, "keepdim")), node.meta["val"][own].shape, value(source)))
    become_several(node, found)
    return [result, result]


@rule(aten.flip.default, aten.roll.default)
def _turn(masks: Masks, node: Node) -> Extents:
    source = node.args[0]
    assert isinstance(source, Node)
    extents = masks.of(source)
    masks.exact(*node.args[1:])
    given = argument(node, "dims")
    given = [given] if isinstance(given, int) else given
    dims = [wrap(dim, len(extents)) for dim in given]
    if not dims:
        if node.target is aten.roll.default:
            masks.unpadded(source, range(len(extents)))
        return extents
    found = list(extents)
    for index, dim in enumerate(dims):
        found[dim] = extents[dim].resolved
        if not masks.is_padded(extents[dim]):
            continue
        one_dimension(masks, source, [dim])
        shift = 0
        if node.target is aten.roll.default:
            shifts = node.args[1]
            shift = shifts if isinstance(shifts, int) else shifts[index]
        source = masks.turned(source, dim, shift, backwards=node.target is aten.flip.default)
    if source is not node.args[0]:
        rest = [index for index, dim in enumerate(dims) if not masks.is_padded(extents[dim])]
        if node.target is aten.flip.default:
            node.args = (source, [dims[index] for index in rest])
        else:
            shifts = [node.args[1]] if isinstance(node.args[1], int) else node.args[1]
            node.args = (source, [shifts[index] for index in rest], [dims[index] for index in rest])
        if not rest:
            become(node, source)
    return tuple(found)


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def _split(masks: Masks, node: Node) -> list[Extents]:
    """Parts of a dimension of a rounded size begin at true positions."""
    source = node.args[0]
    assert isinstance(source, Node)
    before = masks.of(source)
    dim = wrap(argument(node, "dim"), len(before))
    if node.target is aten.unbind.int:
        masks.unpadded(source, [dim])
        return [before[:dim] + before[dim + 1 :] for _ in node.meta["val"]]
    sizes = [size_of(item.shape[dim]) for item in node.meta["val"]]
    if masks.is_padded(before[dim]):
        one_dimension(masks, source, [dim])
        if not all(map(grows, sizes)):
            raise Unknown(f"parts of {sizes} elements")
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        become_several(node, [masks.part(source, dim, start, item.shape) for start, item in zip(starts, node.meta["val"], strict=True)])
    else:
        masks.exact(*node.args[1:])
    return [replaced(before, dim, Extent.of(size)) for size in sizes]


@rule(aten.bucketize.Tensor)
def _bucketize(masks: Masks, node: Node) -> Extents:
    static(masks, [node.args[1]])
    return masks.of(node.args[0])


@rule(aten.diagonal.default, aten.diagonal_copy.default)
def _diagonal(masks: Masks, node: Node) -> Extents:
    source = node.args[0]
    assert isinstance(source, Node)
    extents, offset = masks.of(source), argument(node, "offset")
    masks.exact(offset)
    dims = [wrap(argument(node, name), len(extents)) for name in ("dim1", "dim2")]
    for dim in dims:
        one_dimension(masks, source, [dim])
    return (*(extent for dim, extent in enumerate(extents) if dim not in dims), Extent.of(size_of(value(node).shape[-1])))
