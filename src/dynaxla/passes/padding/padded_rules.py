"""The table of padding rules: how each op is rewritten where its operands have rounded sizes.

The valid elements of a tensor (`valid_sizes.py`) are right. Nothing is known of its padding: it may hold NaN, or indices out of range. A
rule returns the extents of an op's result. Where the op would mix valid elements with padding, the rule also changes the graph: it masks an
operand, or passes the true size as an operand. A graph that has an op without a rule is compiled for exact sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...lowering.dimensions import wrap
from ...lowering.ops.masking import as_tuple, cat_valid
from ...torch_ops import aten, prims
from .masks import Masks
from .valid_sizes import Extent, Extents, NoPaddingRule, broadcast, grows, joined, quotient, replaced, reshaped, size_of, sizes_of

# A rule returns the Extents of the op's result, or a list of them if there are several results.
Rule = Callable[[Masks, Node], Any]
RULES: dict[torch._ops.OpOverload, Rule] = {}

END = 2**63 - 1


def rule(*ops: torch._ops.OpOverload) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return register


def find_rule(op: Any) -> Rule | None:
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return None
    if op in RULES:
        return RULES[op]
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return pointwise if torch.Tag.pointwise in op.tags and op.namespace in ("aten", "prims") and not is_random else None


def argument(node: Node, name: str) -> Any:
    """Returns an argument by its name in the schema, or its default."""
    for index, item in enumerate(node.target._schema.arguments):
        if item.name == name:
            return node.args[index] if index < len(node.args) else node.kwargs.get(name, item.default_value)
    raise KeyError(name)


def change(node: Node, name: str, value: Any) -> None:
    """Sets an argument, by its name in the schema."""
    for index, item in enumerate(node.target._schema.arguments):
        if item.name == name:
            if index < len(node.args):
                node.update_arg(index, value)
            else:
                node.update_kwarg(name, value)


def value(node: Node) -> torch.Tensor:
    return node.meta["val"]


def others(node: Node, *names: str) -> list[Any]:
    """Returns the arguments except those of these names."""
    return [argument(node, item.name) for item in node.target._schema.arguments if item.name not in names]


def static(masks: Masks, arguments: Any) -> None:
    """Raises NoPaddingRule if one of these tensors has a rounded size."""
    for item in torch.utils._pytree.tree_leaves(arguments):
        if isinstance(item, Node):
            masks.unpadded(item, range(len(masks.of(item))))


# Pointwise ops


def pointwise(masks: Masks, node: Node) -> Any:
    _look_up_number(masks, node)
    leaves = torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Node) and isinstance(leaf.meta.get("val"), torch.Tensor)]
    masks.exact(*[leaf for leaf in leaves if leaf not in tensors])
    found = broadcast([masks.of(tensor) for tensor in tensors])
    several = value(node)
    if isinstance(several, (tuple, list)):
        return [found for _ in several]
    return found if len(found) == several.dim() else _refuse("its result is of another rank")


def _look_up_number(masks: Masks, node: Node) -> None:
    """Replaces a rounded size as second operand by the true size, as a tensor of rank 0, if the op computes the same with that.

    Unlike a tensor, a number does not change the result's dtype, and is not rounded to half types.
    """
    if node.target in _BOUNDS:
        _look_up_bounds(masks, node)
        return
    with_tensor = _WITH_NUMBER.get(node.target)
    if with_tensor is None or len(node.args) != 2 or not masks.is_rounded(node.args[1]):
        return
    source = node.args[0]
    assert isinstance(source, Node)
    x = value(source)

    def operands(x: Node, number: Node) -> tuple[Node, Node]:
        return (number, x) if node.target is aten.rsub.Scalar else (x, number)

    if _is_half(x) and value(node).dtype == x.dtype and not node.kwargs:
        # Like torch's kernels: compute in float32, and round once.
        number = converted(masks, masks.real(node.args[1].meta["val"].node.expr, x), torch.float32)
        given = operands(converted(masks, source, torch.float32), number)
        result = masks.add(with_tensor, given, value(node).shape, x, gives=torch.float32)
        masks.extents[result] = masks.of(source)
        node.target, node.args, node.kwargs = prims.convert_element_type.default, (result, x.dtype), {}
        return
    true = _true_number(masks, node.args[1], x)
    if true is not None:
        node.target, node.args = with_tensor, operands(source, true)


def _is_half(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point and x.dtype.itemsize < 4


def _holds_sizes(dtype: torch.dtype) -> bool:
    """False if a number computed from sizes may be out of the dtype's range. There, some kernels raise and others saturate."""
    return dtype in (torch.int64, torch.float32, torch.float64)


def _true_number(masks: Masks, number: Node, x: torch.Tensor) -> Node | None:
    """Returns the true value of a number computed from sizes, as a tensor of rank 0.

    None if an op on x would give another result with that tensor than with the number.
    """
    made = number.meta["val"]
    if _is_half(x):
        return None
    if isinstance(made, torch.SymFloat):
        return converted(masks, masks.real(made.node.expr, x), x.dtype) if x.dtype.is_floating_point else None
    is_wide = x.dim() or x.dtype.is_floating_point or x.dtype == torch.int64
    return masks.product([size_of(made)], x) if is_wide else None


def _look_up_bounds(masks: Masks, node: Node) -> None:
    """Replaces rounded sizes among the bounds of a clamp by the true sizes, as `_look_up_number` does."""
    x = value(node.args[0])
    bounds = [argument(node, name) if name in _BOUNDS[node.target] else None for name in ("min", "max")]
    if not any(map(masks.is_rounded, bounds)) or x.dtype != value(node).dtype or not _holds_sizes(x.dtype):
        return
    found: list[Node | None] = []
    for bound in bounds:
        if masks.is_rounded(bound):
            found.append(_true_number(masks, bound, x))
            if found[-1] is None:
                return
        elif bound is not None:
            found.append(masks.add(aten.full.default, ([], bound), (), x, dtype=x.dtype, device=x.device))
        else:
            found.append(None)
    node.target, node.args, node.kwargs = aten.clamp.Tensor, (node.args[0], *found), {}


_BOUNDS = {aten.clamp.default: ("min", "max"), aten.clamp_min.default: ("min",), aten.clamp_max.default: ("max",)}

_WITH_NUMBER: dict[Any, torch._ops.OpOverload] = {
    overload: op.Tensor
    for op in (aten.add, aten.sub, aten.mul, aten.div, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
    for overload in (op.Tensor, op.Scalar)
} | {
    aten.rsub.Scalar: aten.sub.Tensor,
    aten.remainder.Tensor: aten.remainder.Tensor,
    aten.remainder.Scalar: aten.remainder.Tensor,
    aten.fmod.Tensor: aten.fmod.Tensor,
    aten.fmod.Scalar: aten.fmod.Tensor,
    aten.floor_divide.default: aten.floor_divide.default,
    aten.floor_divide.Scalar: aten.floor_divide.default,
    aten.div.Tensor_mode: aten.div.Tensor_mode,
    aten.div.Scalar_mode: aten.div.Tensor_mode,
}

rule(
    aten._to_copy.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.logical_xor.default,
    aten.copy.default, aten.log_sigmoid_forward.default, aten.log_sigmoid_backward.default, aten.hardswish.default,
    aten.hardswish_backward.default, aten.hardsigmoid_backward.default, aten.hardtanh_backward.default, aten.elu_backward.default,
    aten.leaky_relu_backward.default, aten.softplus_backward.default, aten.mish_backward.default, aten.hardshrink_backward.default,
    aten.softshrink_backward.default, aten._prelu_kernel.default, aten._prelu_kernel_backward.default, aten.floor_divide.Scalar,
    aten.complex.default, aten.polar.default, aten.masked_fill.Tensor,
)(pointwise)  # fmt: skip


@rule(aten.div.Tensor_mode, aten.floor_divide.default, aten.fmod.Tensor, aten.remainder.Tensor, aten.remainder.Scalar_Tensor)
def _division(masks: Masks, node: Node) -> Extents:
    """Sets the padding of an integer divisor to 1, since an integer division by zero is an error."""
    divisor = node.args[1]
    if isinstance(divisor, Node) and isinstance(divisor.meta["val"], torch.Tensor) and not value(divisor).is_floating_point():
        node.update_arg(1, masks.masked(divisor, range(value(divisor).dim()), 1))
    return pointwise(masks, node)


def _refuse(reason: str) -> Any:
    raise NoPaddingRule(reason)


# Constant tensors


@rule(
    aten.full.default, aten.full_like.default, aten.new_full.default, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default,
    aten.ones.default, aten.ones_like.default, aten.new_ones.default, aten.empty.memory_format, aten.empty_like.default,
    aten.new_empty.default, aten.fill.Scalar, aten.fill.Tensor, aten.zero.default,
)  # fmt: skip
def _constant(masks: Masks, node: Node) -> Extents:
    masks.exact(*others(node, "size", "self"))
    return masks.prefixes(value(node), uniform=True)


@rule(aten.eye.default, aten.eye.m)
def _identity(masks: Masks, node: Node) -> Extents:
    return masks.prefixes(value(node))


@rule(aten.scalar_tensor.default)
def _number(masks: Masks, node: Node) -> Extents:
    if masks.is_rounded(node.args[0]):
        if not _holds_sizes(value(node).dtype):
            masks.exact(node.args[0])
        size = masks.product([size_of(node.args[0].meta["val"])], value(node))
        become(node, masks.add(prims.convert_element_type.default, (size, value(node).dtype), (), value(node)))
    return ()


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(masks: Masks, node: Node) -> Extents:
    masks.exact(*others(node, "end"))
    return masks.prefixes(value(node))


# Views


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(masks: Masks, node: Node) -> Extents:
    before, sizes = masks.of(node.args[0]), sizes_of(value(node))
    if sizes == sizes_of(value(node.args[0])):
        return before
    return reshaped(tuple(extent.resolved for extent in before), sizes, masks.rounded)


@rule(aten.view.dtype)
def _other_dtype(masks: Masks, node: Node) -> Extents:
    """Scales the last dimension by the ratio of the element sizes."""
    source = node.args[0]
    assert isinstance(source, Node)
    extents, before, after = masks.of(source), value(source).dtype.itemsize, value(node).dtype.itemsize
    if before == after or not extents:
        return extents
    *around, last = (*extents[:-1], extents[-1].resolved)
    if not last.factors:
        return (*around, Extent.of(size_of(value(node).shape[-1])))
    final = quotient(last.factors[-1] * before, after)
    if final is None:
        raise NoPaddingRule("a view changes the item size, and does not divide a padded dimension")
    return (*around, Extent((*last.factors[:-1], final)))


@rule(aten.expand.default)
def _expand(masks: Masks, node: Node) -> Extents:
    before, result = masks.of(node.args[0]), masks.prefixes(value(node), uniform=True)
    before = (Extent(()),) * (len(result) - len(before)) + before
    return tuple(own if own.factors else new for own, new in zip(before, result, strict=True))


@rule(aten.permute.default)
def _permute(masks: Masks, node: Node) -> Extents:
    before = masks.of(node.args[0])
    return tuple(before[dim] for dim in node.args[1])


@rule(aten.transpose.int, aten.t.default)
def _transpose(masks: Masks, node: Node) -> Extents:
    found = list(masks.of(node.args[0]))
    first, second = node.args[1:] if len(node.args) > 1 else (0, len(found) - 1)
    if found:
        found[first], found[second] = found[second], found[first]
    return tuple(found)


@rule(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def _unsqueeze(masks: Masks, node: Node) -> Extents:
    before = masks.of(node.args[0])
    dim = wrap(node.args[1], len(before) + 1)
    return (*before[:dim], Extent(()), *before[dim:])


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(masks: Masks, node: Node) -> Extents:
    before = masks.of(node.args[0])
    dims = range(len(before)) if len(node.args) == 1 else [node.args[1]] if isinstance(node.args[1], int) else node.args[1]
    dropped = {wrap(dim, len(before)) for dim in dims}
    return tuple(extent for dim, extent in enumerate(before) if dim not in dropped or extent.factors)


@rule(aten.slice.Tensor)
def _slice(masks: Masks, node: Node) -> Extents:
    """Keeps a slice of a prefix from a fixed start as it is. A slice that starts relative to the end begins at a true position."""
    source = node.args[0]
    assert isinstance(source, Node)
    before = masks.of(source)
    dim = wrap(argument(node, "dim"), len(before))
    start, end, step = argument(node, "start") or 0, argument(node, "end"), argument(node, "step")
    masks.exact(step)
    extent, after = before[dim], size_of(value(node).shape[dim])
    whole = Extent.of(size_of(value(source).shape[dim]))
    if start == 0 and step == 1 and after == size_of(value(source).shape[dim]):
        return before
    if not masks.is_padded(extent) and not any(map(masks.is_rounded, (start, end))):
        return replaced(before, dim, Extent.of(after))
    if extent.resolved != whole:
        raise NoPaddingRule("it slices a flattened dimension")
    if not grows(after):
        raise NoPaddingRule(f"the length of a slice, {after}, may be larger than its rounded value")
    if isinstance(start, int) and start >= 0:
        return replaced(before, dim, Extent.of(after))
    if step != 1:
        raise NoPaddingRule("a slice with a step starts at a dynamic size")
    if isinstance(start, int):
        if end is not None and end != END and not (isinstance(end, int) and end - start == after):
            raise NoPaddingRule("the start and the end of a slice count from the end")
        first = whole.factors[0] + start if isinstance(after, int) else whole.factors[0] - after
    else:
        first = size_of(value(start))
    shape = [*value(node).shape]
    become(node, masks.part(source, dim, first, shape))
    return replaced(before, dim, Extent.of(after))


@rule(aten.select.int)
def _select(masks: Masks, node: Node) -> Extents:
    source, dim, index = node.args
    assert isinstance(source, Node)
    before = masks.of(source)
    dim = wrap(dim, len(before))
    extent = before[dim]
    if masks.is_padded(extent) or masks.is_rounded(index):
        whole = size_of(value(source).shape[dim])
        if extent.resolved != Extent.of(whole):
            raise NoPaddingRule("it indexes a flattened dimension")
        if not isinstance(index, int) or index < 0:
            first = whole + index if isinstance(index, int) else size_of(value(index))
            shape = [1 if d == dim else size for d, size in enumerate(value(source).shape)]
            node.args = (masks.part(source, dim, first, shape), dim, 0)
    return before[:dim] + before[dim + 1 :]


@rule(aten.cat.default)
def _cat(masks: Masks, node: Node) -> Extents:
    tensors = node.args[0]
    rank = value(node).dim()
    dim = wrap(argument(node, "dim"), rank)
    if any(value(item).dim() != rank for item in tensors):
        raise NoPaddingRule("one of the tensors has no elements")
    given = [masks.of(item) for item in tensors]
    tensors = [converted(masks, item, value(node).dtype) for item in tensors]
    node.update_arg(0, tensors)
    around = [joined([extents[d] for extents in given]) if d != dim else Extent.of(size_of(value(node).shape[d])) for d in range(rank)]
    sizes = [size_of(value(item).shape[dim]) for item in tensors]
    if any(extents[dim].resolved != Extent.of(size) for extents, size in zip(given, sizes, strict=True) if masks.is_padded(extents[dim])):
        raise NoPaddingRule("it extends a flattened dimension")
    if any(masks.is_padded(extents[dim]) for extents in given[:-1]):
        places = [masks.place(sum(sizes[:index])) for index in range(1, len(sizes))]
        become(node, masks.add(cat_valid, (tensors, masks.lengths, dim, places), value(node).shape, value(node)))
    if not grows(size_of(value(node).shape[dim])):
        raise NoPaddingRule("the size of the result may be larger than its rounded value")
    return tuple(around)


@rule(aten.glu.default)
def _glu(masks: Masks, node: Node) -> Extents:
    source = node.args[0]
    assert isinstance(source, Node)
    extents = masks.of(source)
    dim = wrap(argument(node, "dim"), len(extents))
    masks.unpadded(source, [dim])
    return replaced(extents, dim, Extent.of(size_of(value(node).shape[dim])))


@rule(aten.glu_backward.default)
def _glu_backward(masks: Masks, node: Node) -> Extents:
    grad, source = (masks.of(operand) for operand in node.args[:2])
    dim = wrap(argument(node, "dim"), len(source))
    masks.unpadded(node.args[1], [dim])
    return broadcast([replaced(grad, dim, source[dim]), source])


@rule(aten.select_backward.default)
def _select_backward(masks: Masks, node: Node) -> Extents:
    grad, _, dim, index = node.args
    masks.exact(index)
    result = masks.prefixes(value(node))
    dim = wrap(dim, len(result))
    own = masks.of(grad)
    if masks.is_padded(result[dim]) and index < 0:
        shape = [*value(node).shape]
        shape[dim] = 1
        column = masks.add(aten.unsqueeze.default, (grad, dim), shape, value(node))
        become(node, masks.put(column, dim, size_of(value(node).shape[dim]) + index, value(node).shape))
    return (*own[:dim], result[dim], *own[dim:])


@rule(aten.slice_backward.default)
def _slice_backward(masks: Masks, node: Node) -> Extents:
    """Sets the gradient's padding to zero, since valid positions of the result lie there."""
    grad, _, dim, start, end, step = node.args
    result, own = masks.prefixes(value(node)), masks.of(grad)
    dim = wrap(dim, len(result))
    size, count = size_of(value(node).shape[dim]), size_of(value(grad).shape[dim])
    if (start, step) == (0, 1) and count == size:
        return own
    masks.exact(start, step)
    if own[dim].resolved != Extent.of(count):
        raise NoPaddingRule("it reads a part of a flattened dimension")
    node.update_arg(0, masks.masked(grad, [dim], 0))
    if start < 0 and masks.is_padded(result[dim]):
        if step != 1 or (end != END and not (isinstance(end, int) and end - start == count)):
            raise NoPaddingRule("the start and the end of a slice count from the end")
        first = size + start if isinstance(count, int) else size - count
        become(node, masks.put(node.args[0], dim, first, value(node).shape))
    return replaced(own, dim, result[dim])


@rule(aten.tril.default, aten.triu.default)
def _triangle(masks: Masks, node: Node) -> Extents:
    found, tensor = masks.of(node.args[0]), value(node)
    masks.exact(*node.args[1:])
    if any(found[dim].resolved != Extent.of(size_of(tensor.shape[dim])) for dim in (-1, -2) if masks.is_padded(found[dim])):
        raise NoPaddingRule("it has a flattened dimension")
    return (*found[:-2], found[-2].resolved, found[-1].resolved)


def converted(masks: Masks, node: Node, dtype: torch.dtype) -> Node:
    """Returns the tensor converted to a dtype."""
    x = value(node)
    if x.dtype == dtype:
        return node
    found = masks.add(prims.convert_element_type.default, (node, dtype), x.shape, x, gives=dtype)
    masks.extents[found] = masks.of(node)
    return found


def become(node: Node, other: Node) -> None:
    """Turns a node into an alias of another node, which computes its value."""
    node.target, node.args, node.kwargs = aten.alias.default, (other,), {}


def become_several(node: Node, results: Sequence[Node | None]) -> None:
    """Turns a node with several results into a tuple of other nodes, which compute them."""
    node.target, node.args, node.kwargs = as_tuple, (list(results),), {}


# Reductions: the padding is set to the neutral element of each


def lowest(dtype: torch.dtype) -> Any:
    return -math.inf if dtype.is_floating_point else False if dtype == torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Any:
    return math.inf if dtype.is_floating_point else True if dtype == torch.bool else torch.iinfo(dtype).max


_NEUTRAL: dict[torch._ops.OpOverload, Callable[[torch.dtype], Any]] = {
    aten.sum.default: lambda _: 0,
    aten.sum.dim_IntList: lambda _: 0,
    aten.nansum.default: lambda _: 0,
    aten.count_nonzero.default: lambda _: 0,
    aten.count_nonzero.dim_IntList: lambda _: 0,
    aten.prod.default: lambda _: 1,
    aten.prod.dim_int: lambda _: 1,
    aten.any.default: lambda _: 0,
    aten.any.dim: lambda _: 0,
    aten.any.dims: lambda _: 0,
    aten.all.default: lambda _: 1,
    aten.all.dim: lambda _: 1,
    aten.all.dims: lambda _: 1,
    aten.amax.default: lowest,
    aten.max.default: lowest,
    aten.max.dim: lowest,
    aten.argmax.default: lowest,
    aten.amin.default: highest,
    aten.min.default: highest,
    aten.min.dim: highest,
    aten.argmin.default: highest,
    aten.logsumexp.default: lowest,
}
_POSITIONS = (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)


def reduced_dims(node: Node, rank: int) -> list[int]:
    names = {item.name for item in node.target._schema.arguments}
    given = argument(node, "dim") if "dim" in names else None
    if given is None or given == []:
        return list(range(rank))
    return sorted({wrap(dim, rank) for dim in ([given] if isinstance(given, int) else given)})


def without(extents: Extents, dims: Sequence[int], node: Node) -> Extents:
    """Returns the extents of a reduction's result. dims: the reduced dimensions."""
    several = node.meta["val"]
    rank = (several[0] if isinstance(several, (tuple, list)) else several).dim()
    if rank == len(extents):
        return tuple(Extent(()) if dim in dims else extent for dim, extent in enumerate(extents))
    return tuple(extent for dim, extent in enumerate(extents) if dim not in dims)


@rule(*_NEUTRAL)
def _reduction(masks: Masks, node: Node) -> Any:
    source = node.args[0]
    assert isinstance(source, Node)
    masks.exact(*others(node, "self"))
    extents = masks.of(source)
    dims = reduced_dims(node, len(extents))
    if node.target in _POSITIONS:
        one_dimension(masks, source, dims)
    if value(source).is_complex() and node.target is aten.logsumexp.default:
        raise NoPaddingRule("it computes with complex numbers")
    node.update_arg(0, masks.masked(source, dims, _NEUTRAL[node.target](value(source).dtype)))
    found = without(extents, dims, node)
    return [found, found] if isinstance(node.meta["val"], (tuple, list)) else found


def one_dimension(masks: Masks, source: Node, dims: Sequence[int]) -> None:
    """Raises NoPaddingRule unless linear positions in these dimensions are the same as with the true sizes.

    That holds if none of the dimensions is padded, or if there is only one and it is one prefix.
    """
    padded = [dim for dim in dims if masks.is_padded(masks.of(source)[dim])]
    if padded and (len(dims) > 1 or masks.of(source)[dims[0]].resolved != Extent.of(size_of(value(source).shape[dims[0]]))):
        raise NoPaddingRule("it needs a position among several dimensions")


@rule(aten.mean.default, aten.mean.dim)
def _mean(masks: Masks, node: Node) -> Extents:
    """Replaces the mean by the sum of the valid elements, divided by their true number."""
    source, tensor = node.args[0], value(node)
    assert isinstance(source, Node)
    extents = masks.of(source)
    dims = reduced_dims(node, len(extents))
    result = without(extents, dims, node)
    masks.exact(*others(node, "self"))
    if not any(masks.is_padded(extents[dim]) for dim in dims):
        return result
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    keeps = tensor.dim() == len(extents)
    masked = masks.masked(source, dims, 0)
    total = masks.add(aten.sum.dim_IntList, (masked, dims, keeps), tensor.shape, tensor, dtype=wide, gives=wide)
    count = masks.product([factor for dim in dims for factor in extents[dim].factors], tensor)
    mean = masks.add(aten.div.Tensor, (total, count), tensor.shape, tensor, gives=wide)
    become(node, masks.add(prims.convert_element_type.default, (mean, tensor.dtype), tensor.shape, tensor))
    return result


@rule(aten.linalg_vector_norm.default)
def _norm(masks: Masks, node: Node) -> Extents:
    masks.exact(*others(node, "self"))
    masks.fixed(argument(node, "ord"))
    extents = masks.of(node.args[0])
    dims = reduced_dims(node, len(extents))
    # A negative order is dominated by the least element, and infinity to a negative power is zero.
    node.update_arg(0, masks.masked(node.args[0], dims, 0 if argument(node, "ord") >= 0 else math.inf))
    return without(extents, dims, node)


_CUMULATIVE: dict[torch._ops.OpOverload, Callable[[torch.dtype], Any]] = {
    aten.cumsum.default: lambda _: 0,
    aten.cumprod.default: lambda _: 1,
    aten.cummax.default: lowest,
    aten.cummin.default: highest,
    aten.logcumsumexp.default: lowest,
}


@rule(*_CUMULATIVE)
def _cumulative(masks: Masks, node: Node) -> Any:
    source = node.args[0]
    assert isinstance(source, Node)
    extents = masks.of(source)
    if extents:
        dim = wrap(node.args[1], len(extents))
        one_dimension(masks, source, [dim])
        node.update_arg(0, masks.masked(source, [dim], _CUMULATIVE[node.target](value(source).dtype)))
        extents = replaced(extents, dim, extents[dim].resolved)
    return [extents, extents] if isinstance(node.meta["val"], (tuple, list)) else extents


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def _softmax(masks: Masks, node: Node) -> Extents:
    extents = masks.of(node.args[0])
    if extents:
        dim = wrap(node.args[1], len(extents))
        node.update_arg(0, masks.masked(node.args[0], [dim], -math.inf))
        extents = replaced(extents, dim, extents[dim].resolved)
    return extents


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(masks: Masks, node: Node) -> Extents:
    extents = broadcast([masks.of(node.args[0]), masks.of(node.args[1])])
    if extents:
        dim = wrap(node.args[2], len(extents))
        for index in (0, 1):
            node.update_arg(index, masks.masked(node.args[index], [dim], 0, extents))
        extents = replaced(extents, dim, extents[dim].resolved)
    return extents
