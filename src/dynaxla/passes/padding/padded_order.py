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
    reduced_dims,
    rule,
    static,
    value,
    without,
)
from .valid_sizes import Extent, Extents, NoPaddingRule, broadcast, grows, quotient, replaced, size_of, sizes_of


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


@rule(aten.bucketize.Tensor)
def _bucketize(masks: Masks, node: Node) -> Extents:
    static(masks, [node.args[1]])
    return masks.of(node.args[0])


@rule(aten.searchsorted.Tensor)
def _searchsorted(masks: Masks, node: Node) -> Extents:
    static(masks, [node.args[0], argument(node, "sorter")])
    if value(node.args[0]).dim() != 1:
        raise NoPaddingRule("searchsorted has more than one sorted sequence")
    return masks.of(node.args[1])


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


# For ops that write a diagonal: padding of the diagonal lands at positions whose row and column are padding, so no mask is needed.


@rule(aten.diag_embed.default)
def _on_diagonal(masks: Masks, node: Node) -> Extents:
    source = node.args[0]
    assert isinstance(source, Node)
    masks.exact(*others(node, "self"))
    extents = masks.of(source)
    one_dimension(masks, source, [len(extents) - 1])
    dims = sorted(wrap(argument(node, name), len(extents) + 1) for name in ("dim1", "dim2"))
    found = list(extents[:-1])
    for dim in dims:
        found.insert(dim, Extent.of(size_of(value(node).shape[dim])))
    return tuple(found)


@rule(aten.diagonal_backward.default)
def _diagonal_backward(masks: Masks, node: Node) -> Extents:
    grad = node.args[0]
    assert isinstance(grad, Node)
    masks.exact(*others(node, "grad_output", "input_sizes"))
    extents, result = masks.of(grad), masks.prefixes(value(node))
    one_dimension(masks, grad, [len(extents) - 1])
    dims = [wrap(argument(node, name), len(result)) for name in ("dim1", "dim2")]
    rest = iter(extents[:-1])
    return tuple(own if dim in dims else next(rest) for dim, own in enumerate(result))


@rule(aten.diagonal_scatter.default)
def _put_on_diagonal(masks: Masks, node: Node) -> Extents:
    table, added = node.args[:2]
    assert isinstance(table, Node)
    assert isinstance(added, Node)
    masks.exact(*others(node, "self", "src"))
    extents, own = masks.of(table), masks.of(added)
    dims = [wrap(argument(node, name), len(extents)) for name in ("dim1", "dim2")]
    for dim in dims:
        one_dimension(masks, table, [dim])
    one_dimension(masks, added, [len(own) - 1])
    around = iter(broadcast([tuple(extent for dim, extent in enumerate(extents) if dim not in dims), own[:-1]]))
    return tuple(extent.resolved if dim in dims else next(around) for dim, extent in enumerate(extents))


@rule(aten.trace.default)
def _trace(masks: Masks, node: Node) -> Extents:
    source = node.args[0]
    assert isinstance(source, Node)
    for dim in (0, 1):
        one_dimension(masks, source, [dim])
    size = torch.sym_min(*value(source).shape)
    diagonal = masks.add(aten.diagonal.default, (source,), (size,), value(source))
    masked = masks.masked(diagonal, [0], 0, (Extent.of(size_of(size)),))
    become(node, masks.add(aten.sum.default, (masked,), (), value(source), dtype=value(node).dtype, gives=value(node).dtype))
    return ()


@rule(aten.rot90.default)
def _quarter_turns(masks: Masks, node: Node) -> Extents:
    """Rewrites quarter turns as reversed dimensions and a transpose."""
    source = node.args[0]
    assert isinstance(source, Node)
    turns, given = argument(node, "k"), argument(node, "dims")
    masks.exact(turns, given)
    extents = list(masks.of(source))
    dims = [wrap(dim, len(extents)) for dim in given]
    for dim in [[], dims[1:], dims, dims[:1]][turns % 4]:
        one_dimension(masks, source, [dim])
        extents[dim] = extents[dim].resolved
        if masks.is_padded(extents[dim]):
            source = masks.turned(source, dim, 0, backwards=True)
        else:
            source = masks.add(aten.flip.default, (source, [dim]), value(source).shape, value(source))
        masks.extents[source] = tuple(extents)
    if turns % 2:
        first, second = dims
        extents[first], extents[second] = extents[second], extents[first]
        source = masks.add(aten.transpose.int, (source, first, second), value(node).shape, value(source))
    become(node, source)
    return tuple(extents)


@rule(aten.median.dim, aten.nanmedian.dim, aten.median.default, aten.nanmedian.default)
def _median(masks: Masks, node: Node) -> Any:
    """Sorts the valid elements to the front, and takes the element at the middle of the true size."""
    source, several = node.args[0], node.meta["val"]
    assert isinstance(source, Node)
    x, extents = value(source), masks.of(source)
    dims = reduced_dims(node, len(extents))
    masks.exact(*others(node, "self"))
    result = without(extents, dims, node)
    is_one = isinstance(several, (tuple, list))
    if not any(masks.is_padded(extents[dim]) for dim in dims):
        return [result, result] if is_one else result
    if is_one:
        one_dimension(masks, source, dims)
    if 0 in [size_of(x.shape[dim]) for dim in dims]:
        raise NoPaddingRule("it takes the median of a tensor without elements")
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]

    def add(op: Any, *args: Any, shape: Any = shape, dtype: torch.dtype = torch.int64, **kwargs: Any) -> Node:
        return masks.add(op, args, shape, x, gives=dtype, **kwargs)

    numbers = masks.masked(source, dims, 0)
    nans = add(aten.sum.dim_IntList, add(aten.ne.Tensor, numbers, numbers, shape=x.shape, dtype=torch.bool), dims, True)
    count = masks.product([factor for dim in dims for factor in extents[dim].factors], x)
    if node.target in (aten.median.dim, aten.median.default):
        middle = add(aten.floor_divide.Scalar, add(aten.sub.Tensor, count, 1, shape=()), 2, shape=())
        has_nan = add(aten.gt.Scalar, nans, 0, dtype=torch.bool)
        rank = add(aten.where.self, has_nan, add(aten.sub.Tensor, count, nans), middle)
    else:
        left = add(aten.sub.Tensor, add(aten.sub.Tensor, count, nans), 1)
        rank = add(aten.clamp_min.default, add(aten.floor_divide.Scalar, left, 2), 0)
    ordered = masks.masked(source, dims, math.nan if x.dtype.is_floating_point else highest(x.dtype))
    dim = dims[0]
    if not is_one:
        # The padding sorts behind all valid elements, so all dimensions can be sorted as one.
        ordered = add(aten.view.default, ordered, [-1], shape=[x.numel()], dtype=x.dtype)
        rank = add(aten.view.default, rank, [1], shape=[1])
        dim = 0
    places = add(aten.argsort.stable, ordered, shape=value(ordered).shape, stable=True, dim=dim)
    shape = [1] if not is_one else shape
    place = add(aten.gather.default, places, dim, rank, shape=shape)
    chosen = add(aten.gather.default, ordered, dim, place, shape=shape, dtype=x.dtype)
    found = [chosen, place]
    if not is_one or not argument(node, "keepdim"):
        after = several[0].shape if is_one else ()
        found = [add(aten.squeeze.dims, item, [dim], shape=after, dtype=value(item).dtype) for item in found]
    if is_one:
        become_several(node, found)
        return [result, result]
    become(node, found[0])
    return result
