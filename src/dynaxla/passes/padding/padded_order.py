"""Padding rules (see `padded_rules.py`) for ops that reorder the elements of a dimension or split it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...lowering.dimensions import wrap
from ...torch_ops import aten
from .masks import Masks
from .padded_rules import (
    argument,
    become,
    become_several,
    highest,
    lowest,
    one_dimension,
    others,
    rule,
    value,
    without,
)
from .valid_sizes import Extent, Extents, NoPaddingRule, grows, quotient, replaced, size_of, sizes_of


@rule(aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable, aten.topk.default, aten.kthvalue.default)
def _sorted(masks: Masks, node: Node) -> Any:
    """Fills the padding with a value that sorts last.

    XLA sorts stably and, where it selects, prefers the first of equal elements, so equal valid elements stay in front of the padding.
    """
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


@rule(aten.flip.default, aten.roll.default)
def _turn(masks: Masks, node: Node) -> Extents:
    source = node.args[0]
    assert isinstance(source, Node)
    extents = masks.of(source)
    masks.exact(*node.args[1:])
    given = argument(node, "dims")
    given = [given] if isinstance(given, int) else given
    dims = [wrap(dim, len(extents)) for dim in given]
    if not dims and node.target is aten.roll.default:
        # Without dims, roll works on the flattened tensor.
        if len(extents) != 1:
            masks.unpadded(source, range(len(extents)))
            return extents
        dims = [0]
    if not dims:
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
    """Makes the parts of a dimension with a rounded size begin at true positions."""
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
        if shrinking := [size for size in sizes if not grows(size)]:
            raise NoPaddingRule(
                f"it splits a padded dimension into parts of {sizes} elements, and {shrinking[0]} may be smaller for larger sizes"
            )
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        become_several(node, [masks.part(source, dim, start, item.shape) for start, item in zip(starts, node.meta["val"], strict=True)])
    else:
        masks.exact(*node.args[1:])
    return [replaced(before, dim, Extent.of(size)) for size in sizes]


def by_strides(masks: Masks, node: Node) -> Extents:
    """Rewrites `as_strided` as a slice of each dimension and a permutation.

    Raises: NoPaddingRule for other views, which depend on true sizes.
    """
    source, sizes, steps = node.args[:3]
    assert isinstance(source, Node)
    laid_out, result = masks.given.get(source, value(source)), value(node)
    begins = size_of(laid_out.storage_offset())
    offset = argument(node, "storage_offset")
    later = 0 if offset is None else size_of(_number(offset)) - begins
    whole = sizes_of(laid_out)
    left = {size_of(step): dim for dim, step in enumerate(laid_out.stride()) if whole[dim] != 1}
    extents, shape = list(masks.of(source)), list(value(source).shape)
    if len(left) != sum(size != 1 for size in whole) or 0 in left:
        raise NoPaddingRule("it reads memory by strides")
    by_dim = {dim: step for step, dim in left.items()}
    order: dict[int, Any] = {}
    for size, step in zip(sizes, steps, strict=True):
        if size_of(_number(size)) == 1:
            continue
        dim = left.pop(size_of(_number(step)), None)
        if dim is None:
            raise NoPaddingRule("it reads memory by strides")
        order[dim] = _number(size)
    starts = _starts(later, by_dim)
    for dim, size in {**order, **dict.fromkeys(left.values(), 1)}.items():
        count, start = size_of(size), starts[dim]
        if count == whole[dim]:
            if start != 0:
                raise NoPaddingRule("a view starts behind the start of its dimension")
            continue
        if not (_is_never_negative(laid_out, start) and _is_never_negative(laid_out, whole[dim] - count - start)):
            raise NoPaddingRule("a view reaches over the end of its dimension")
        one_dimension(masks, source, [dim])
        shape[dim], extents[dim] = size, Extent.of(count)
        source = masks.part(source, dim, start, shape)
        masks.extents[source] = tuple(extents)
    rest = [dim for dim in range(len(shape)) if dim not in order]
    dims = [*order, *rest]
    source = masks.add(aten.permute.default, (source, dims), [shape[dim] for dim in dims], result)
    source = masks.add(aten.squeeze.dims, (source, list(range(len(order), len(shape)))), [shape[dim] for dim in order], result)
    found, shape = [extents[dim] for dim in order], [shape[dim] for dim in order]
    for dim, size in enumerate(sizes):
        if size_of(_number(size)) == 1:
            shape.insert(dim, 1)
            found.insert(dim, Extent(()))
            source = masks.add(aten.unsqueeze.default, (source, dim), shape, result)
    become(node, source)
    return tuple(found)


def _starts(later: Any, steps: Mapping[int, Any]) -> dict[int, Any]:
    """Returns the position in each dimension of the element that lies `later` elements behind the first one in memory.

    steps: the stride of each dimension.
    Raises: NoPaddingRule.
    """
    found = dict.fromkeys(steps, 0)
    rest = sympy.sympify(later)
    if rest == 0:
        return found
    if not all(sympy.sympify(item).is_polynomial() for item in (rest, *steps.values())):
        raise NoPaddingRule("the start of a view cannot be computed from the strides")
    # Divide by the largest stride first: a stride of n * m, with more symbols, is larger than a stride of m.
    for dim, step in sorted(steps.items(), key=lambda item: _degree(item[1]), reverse=True):
        if rest == 0:
            break
        symbols = sorted(rest.free_symbols | sympy.sympify(step).free_symbols, key=str)
        if symbols and _degree(step)[0] == 0:
            times = quotient(rest, step)
            if times is None:
                raise NoPaddingRule("the start of a view cannot be computed from the strides")
            found[dim], rest = times, sympy.Integer(0)
            continue
        times, rest = sympy.div(rest, step, *symbols) if symbols else divmod(rest, step)
        if rest.is_nonnegative is not True:
            times, rest = times - 1, sympy.expand(rest + step)
        found[dim] = int(times) if times.is_Integer else times
    if rest != 0:
        raise NoPaddingRule("the start of a view cannot be computed from the strides")
    return found


def _degree(step: Any) -> tuple[int, int]:
    """Returns a sort key for strides: the degree of the expression in its symbols, and its coefficient."""
    step = sympy.sympify(step)
    symbols = step.free_symbols
    return (sympy.Poly(step, *symbols).total_degree() if symbols else 0, int(step.as_coeff_Mul()[0]))


def _is_never_negative(tensor: torch.Tensor, number: Any) -> bool:
    """True if a number computed from sizes is known not to be negative. tensor: any tensor of the same graph."""
    if isinstance(number, int) or number.is_Integer:
        return bool(number >= 0)
    if number.is_nonnegative:
        return True
    symbolic = [size for size in (*tensor.shape, *tensor.stride()) if isinstance(size, torch.SymInt)]
    return bool(symbolic) and statically_known_true(symbolic[0].node.shape_env.create_symintnode(number, hint=None) >= 0)


def _number(item: Any) -> Any:
    return item.meta["val"] if isinstance(item, Node) else item
