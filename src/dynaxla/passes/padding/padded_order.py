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
from .padded_rules import (
    argument,
    arguments_except,
    highest,
    lowest,
    number_of,
    reduced_extents,
    replace_by,
    replace_by_results,
    require_single_prefix,
    rule,
    value,
)
from .padding_rewrite import PaddingRewrite
from .valid_sizes import Extent, Extents, NoPaddingRule, is_nondecreasing, quotient, size_of, sizes_of, with_extent


@rule(aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable, aten.topk.default, aten.kthvalue.default)
def _sorted(rewrite: PaddingRewrite, node: Node) -> Any:
    """Fills the padding with a value that sorts last.

    XLA's sort is stable, and its top-k prefers the first of equal elements. So valid elements that are equal to the fill value stay in
    front of the padding.
    """
    source = node.args[0]
    assert isinstance(source, Node)
    rewrite.require_exact(*arguments_except(node, "self"))
    extents, names = rewrite.extents_of(source), {item.name for item in node.target._schema.arguments}
    if extents:
        dim = wrap(argument(node, "dim"), len(extents))
        require_single_prefix(rewrite, source, [dim])
        is_descending = argument(node, "descending") if "descending" in names else "largest" in names and argument(node, "largest")
        dtype = value(source).dtype
        last = lowest(dtype) if is_descending else math.nan if dtype.is_floating_point else highest(dtype)
        node.update_arg(0, rewrite.masked(source, [dim], last))
        if "keepdim" in names:
            extents = reduced_extents(extents, [dim], node)
        else:
            result = node.meta["val"]
            size = (result[0] if isinstance(result, (tuple, list)) else result).shape[dim]
            extents = with_extent(extents, dim, Extent.of(size_of(size)))
    return [extents, extents] if isinstance(node.meta["val"], (tuple, list)) else extents


@rule(aten.flip.default, aten.roll.default)
def _flip_or_roll(rewrite: PaddingRewrite, node: Node) -> Extents:
    source = node.args[0]
    assert isinstance(source, Node)
    extents = rewrite.extents_of(source)
    rewrite.require_exact(*node.args[1:])
    given = argument(node, "dims")
    given = [given] if isinstance(given, int) else given
    dims = [wrap(dim, len(extents)) for dim in given]
    if not dims and node.target is aten.roll.default:
        # Without dims, roll works on the flattened tensor.
        if len(extents) != 1:
            rewrite.require_unpadded(source, range(len(extents)))
            return extents
        dims = [0]
    if not dims:
        return extents
    found = list(extents)
    for index, dim in enumerate(dims):
        found[dim] = extents[dim].non_uniform
        if not rewrite.is_padded(extents[dim]):
            continue
        require_single_prefix(rewrite, source, [dim])
        shift = 0
        if node.target is aten.roll.default:
            shifts = node.args[1]
            shift = shifts if isinstance(shifts, int) else shifts[index]
        source = rewrite.rolled_or_flipped(source, dim, shift, backwards=node.target is aten.flip.default)
    if source is not node.args[0]:
        rest = [index for index, dim in enumerate(dims) if not rewrite.is_padded(extents[dim])]
        if node.target is aten.flip.default:
            node.args = (source, [dims[index] for index in rest])
        else:
            shifts = [node.args[1]] if isinstance(node.args[1], int) else node.args[1]
            node.args = (source, [shifts[index] for index in rest], [dims[index] for index in rest])
        if not rest:
            replace_by(node, source)
    return tuple(found)


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)
def _split(rewrite: PaddingRewrite, node: Node) -> list[Extents]:
    """Replaces the split of a padded dimension by slices whose starts are computed from the true sizes."""
    source = node.args[0]
    assert isinstance(source, Node)
    before = rewrite.extents_of(source)
    dim = wrap(argument(node, "dim"), len(before))
    if node.target is aten.unbind.int:
        rewrite.require_unpadded(source, [dim])
        return [before[:dim] + before[dim + 1 :] for _ in node.meta["val"]]
    sizes = [size_of(item.shape[dim]) for item in node.meta["val"]]
    if rewrite.is_padded(before[dim]):
        require_single_prefix(rewrite, source, [dim])
        if shrinking := [size for size in sizes if not is_nondecreasing(size)]:
            raise NoPaddingRule(
                f"it splits a padded dimension into parts of {sizes} elements, and {shrinking[0]} may be smaller for larger sizes"
            )
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        replace_by_results(
            node, [rewrite.slice_from(source, dim, start, item.shape) for start, item in zip(starts, node.meta["val"], strict=True)]
        )
    else:
        rewrite.require_exact(*node.args[1:])
    return [with_extent(before, dim, Extent.of(size)) for size in sizes]


def rewrite_as_strided(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Rewrites `as_strided` as a slice of each dimension and a permutation of the dimensions.

    Raises: NoPaddingRule for any other view, since its elements depend on the true sizes.
    """
    source, sizes, steps = node.args[:3]
    assert isinstance(source, Node)
    original, result = rewrite.original_inputs.get(source, value(source)), value(node)
    source_offset = size_of(original.storage_offset())
    offset = argument(node, "storage_offset")
    relative_offset = 0 if offset is None else size_of(number_of(offset)) - source_offset
    whole = sizes_of(original)
    dim_of_stride = {size_of(step): dim for dim, step in enumerate(original.stride()) if whole[dim] != 1}
    extents, shape = list(rewrite.extents_of(source)), list(value(source).shape)
    if len(dim_of_stride) != sum(size != 1 for size in whole) or 0 in dim_of_stride:
        raise NoPaddingRule("it reads memory by strides")
    stride_of_dim = {dim: step for step, dim in dim_of_stride.items()}
    order: dict[int, Any] = {}
    for size, step in zip(sizes, steps, strict=True):
        if size_of(number_of(size)) == 1:
            continue
        dim = dim_of_stride.pop(size_of(number_of(step)), None)
        if dim is None:
            raise NoPaddingRule("it reads memory by strides")
        order[dim] = number_of(size)
    starts = _starts(relative_offset, stride_of_dim)
    for dim, size in {**order, **dict.fromkeys(dim_of_stride.values(), 1)}.items():
        count, start = size_of(size), starts[dim]
        if count == whole[dim]:
            if start != 0:
                raise NoPaddingRule("a view with the full size of a dimension does not start at its first position")
            continue
        if not (_is_never_negative(original, start) and _is_never_negative(original, whole[dim] - count - start)):
            raise NoPaddingRule("a view may extend beyond its dimension")
        require_single_prefix(rewrite, source, [dim])
        shape[dim], extents[dim] = size, Extent.of(count)
        source = rewrite.slice_from(source, dim, start, shape)
        rewrite.extents[source] = tuple(extents)
    rest = [dim for dim in range(len(shape)) if dim not in order]
    dims = [*order, *rest]
    source = rewrite.add(aten.permute.default, (source, dims), [shape[dim] for dim in dims], result)
    source = rewrite.add(aten.squeeze.dims, (source, list(range(len(order), len(shape)))), [shape[dim] for dim in order], result)
    found, shape = [extents[dim] for dim in order], [shape[dim] for dim in order]
    for dim, size in enumerate(sizes):
        if size_of(number_of(size)) == 1:
            shape.insert(dim, 1)
            found.insert(dim, Extent(()))
            source = rewrite.add(aten.unsqueeze.default, (source, dim), shape, result)
    replace_by(node, source)
    return tuple(found)


def _starts(relative_offset: Any, steps: Mapping[int, Any]) -> dict[int, Any]:
    """Returns the position, in each dimension, of the element that lies `relative_offset` elements behind the first element in memory.

    Args:
        relative_offset: an expression or an int.
        steps: the stride of each dimension.

    Raises: NoPaddingRule if the position cannot be computed from the strides.
    """
    found = dict.fromkeys(steps, 0)
    rest = sympy.sympify(relative_offset)
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
    """True if a number computed from sizes is known not to be negative. tensor: any tensor of the same graph, whose guards are used."""
    if isinstance(number, int) or number.is_Integer:
        return bool(number >= 0)
    if number.is_nonnegative:
        return True
    symbolic = [size for size in (*tensor.shape, *tensor.stride()) if isinstance(size, torch.SymInt)]
    return bool(symbolic) and statically_known_true(symbolic[0].node.shape_env.create_symintnode(number, hint=None) >= 0)
