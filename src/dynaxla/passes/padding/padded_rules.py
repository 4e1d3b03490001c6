"""The table of padding rules: how each op is rewritten where its operands have rounded sizes.

The valid elements of a tensor (`valid_sizes.py`) have the same values as in a run with the true sizes. The padding may hold any values,
such as NaN or indices out of range. A rule returns the extents of an op's result. Where the op would mix valid elements with padding, the
rule also changes the graph: the rule masks an operand (sets its padding to a fixed value), or passes the true size as an operand. A graph
that has an op without a rule is compiled for exact sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...lowering.dimensions import wrap
from ...lowering.graphs import is_tensor
from ...lowering.ops.valid_size_ops import as_tuple, cat_valid
from ...torch_ops import aten, prims
from .padding_rewrite import PaddingRewrite
from .valid_sizes import (
    Extent,
    Extents,
    NoPaddingRule,
    broadcast,
    common_extent,
    is_nondecreasing,
    quotient,
    reshaped,
    size_of,
    sizes_of,
    with_extent,
)

# Takes the rewrite and a node. Returns the Extents of the node's result, or a list of Extents if the op returns several tensors.
Rule = Callable[[PaddingRewrite, Node], Any]
RULES: dict[torch._ops.OpOverload, Rule] = {}

# ATen's value of the argument `end` for a slice up to the end of a dimension.
END = 2**63 - 1


def rule(*ops: torch._ops.OpOverload) -> Callable[[Rule], Rule]:
    """Registers the decorated function as the padding rule of these ops."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return register


def find_rule(op: Any) -> Rule | None:
    """Returns the padding rule of an op; None if there is none. Pointwise ops without a rule of their own have the rule `pointwise`."""
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


def set_argument(node: Node, name: str, value: Any) -> None:
    """Sets an argument, by its name in the schema."""
    for index, item in enumerate(node.target._schema.arguments):
        if item.name == name:
            if index < len(node.args):
                node.update_arg(index, value)
            else:
                node.update_kwarg(name, value)


def number_of(item: Any) -> Any:
    """Returns the number of an argument: the number itself, or the value in the metadata of a node."""
    return item.meta["val"] if isinstance(item, Node) else item


def value(node: Node) -> torch.Tensor:
    """Returns the fake tensor of a node's result, with the sizes of the original graph as symbols."""
    return node.meta["val"]


def arguments_except(node: Node, *names: str) -> list[Any]:
    """Returns a node's arguments, except the arguments with these names."""
    return [argument(node, item.name) for item in node.target._schema.arguments if item.name not in names]


def require_all_unpadded(rewrite: PaddingRewrite, arguments: Any) -> None:
    """Raises NoPaddingRule if a tensor among these arguments has padding in any dimension."""
    for item in torch.utils._pytree.tree_leaves(arguments):
        if isinstance(item, Node):
            rewrite.require_unpadded(item, range(len(rewrite.extents_of(item))))


# Pointwise ops


def pointwise(rewrite: PaddingRewrite, node: Node) -> Any:
    """The rule of pointwise ops: the result has the broadcast extents of the operands."""
    _use_true_number(rewrite, node)
    leaves = torch.utils._pytree.tree_leaves((node.args, dict(node.kwargs)))
    tensors = list(filter(is_tensor, leaves))
    rewrite.require_exact(*[leaf for leaf in leaves if leaf not in tensors])
    found = broadcast([rewrite.extents_of(tensor) for tensor in tensors])
    several = value(node)
    if isinstance(several, (tuple, list)):
        return [found for _ in several]
    return found if len(found) == several.dim() else _refuse("its result has another rank than its broadcast operands")


def _use_true_number(rewrite: PaddingRewrite, node: Node) -> None:
    """Replaces a rounded size as second operand by the true size, as a tensor of rank 0, if the op then computes the same result.

    The result can differ: unlike a tensor, a number does not change the result's dtype, and is not rounded to half types.
    """
    if node.target in _BOUNDS:
        _use_true_bounds(rewrite, node)
        return
    tensor_op = _TENSOR_OVERLOADS.get(node.target)
    if tensor_op is None or len(node.args) != 2 or not rewrite.is_rounded(node.args[1]):
        return
    source = node.args[0]
    assert isinstance(source, Node)
    x = value(source)

    def operands(x: Node, number: Node) -> tuple[Node, Node]:
        return (number, x) if node.target is aten.rsub.Scalar else (x, number)

    if _is_half(x) and value(node).dtype == x.dtype and not node.kwargs:
        # Like torch's kernels: compute in float32, and round once.
        number = converted(rewrite, rewrite.true_float(node.args[1].meta["val"].node.expr, x), torch.float32)
        tensor_operands = operands(converted(rewrite, source, torch.float32), number)
        result = rewrite.add(tensor_op, tensor_operands, value(node).shape, x, result_dtype=torch.float32)
        rewrite.extents[result] = rewrite.extents_of(source)
        node.target, node.args, node.kwargs = prims.convert_element_type.default, (result, x.dtype), {}
        return
    true_number = _true_number(rewrite, node.args[1], x)
    if true_number is not None:
        node.target, node.args = tensor_op, operands(source, true_number)


def _is_half(x: torch.Tensor) -> bool:
    return x.dtype.is_floating_point and x.dtype.itemsize < 4


def _holds_sizes(dtype: torch.dtype) -> bool:
    """False if a number computed from sizes may be out of the dtype's range. There, some kernels raise and others saturate."""
    return dtype in (torch.int64, torch.float32, torch.float64)


def _true_number(rewrite: PaddingRewrite, number: Node, x: torch.Tensor) -> Node | None:
    """Returns the true value of a number computed from sizes, as a tensor of rank 0.

    Returns None if an op on x would give another result with this tensor than with the number.
    """
    symbolic = number.meta["val"]
    if _is_half(x):
        return None
    if isinstance(symbolic, torch.SymFloat):
        return converted(rewrite, rewrite.true_float(symbolic.node.expr, x), x.dtype) if x.dtype.is_floating_point else None
    is_wide = x.dim() or x.dtype.is_floating_point or x.dtype == torch.int64
    return rewrite.true_product([size_of(symbolic)], x) if is_wide else None


def _use_true_bounds(rewrite: PaddingRewrite, node: Node) -> None:
    """Replaces rounded sizes among the bounds of a clamp by the true sizes, as `_use_true_number` does."""
    x = value(node.args[0])
    bounds = [argument(node, name) if name in _BOUNDS[node.target] else None for name in ("min", "max")]
    if not any(map(rewrite.is_rounded, bounds)) or x.dtype != value(node).dtype or not _holds_sizes(x.dtype):
        return
    found: list[Node | None] = []
    for bound in bounds:
        if rewrite.is_rounded(bound):
            found.append(_true_number(rewrite, bound, x))
            if found[-1] is None:
                return
        elif bound is not None:
            found.append(rewrite.add(aten.full.default, ([], bound), (), x, dtype=x.dtype, device=x.device))
        else:
            found.append(None)
    node.target, node.args, node.kwargs = aten.clamp.Tensor, (node.args[0], *found), {}


_BOUNDS = {aten.clamp.default: ("min", "max"), aten.clamp_min.default: ("min",), aten.clamp_max.default: ("max",)}

_TENSOR_OVERLOADS: dict[Any, torch._ops.OpOverload] = {
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
def _division(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Sets the padding of an integer divisor to 1, since an integer division by zero is an error."""
    divisor = node.args[1]
    if isinstance(divisor, Node) and isinstance(divisor.meta["val"], torch.Tensor) and not value(divisor).is_floating_point():
        node.update_arg(1, rewrite.masked(divisor, range(value(divisor).dim()), 1))
    return pointwise(rewrite, node)


def _refuse(reason: str) -> Any:
    raise NoPaddingRule(reason)


# Constant tensors


@rule(
    aten.full.default, aten.full_like.default, aten.new_full.default, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default,
    aten.ones.default, aten.ones_like.default, aten.new_ones.default, aten.empty.memory_format, aten.empty_like.default,
    aten.new_empty.default, aten.fill.Scalar, aten.fill.Tensor, aten.zero.default,
)  # fmt: skip
def _constant(rewrite: PaddingRewrite, node: Node) -> Extents:
    rewrite.require_exact(*arguments_except(node, "size", "self"))
    return rewrite.prefixes(value(node), uniform=True)


@rule(aten.eye.default, aten.eye.m)
def _identity(rewrite: PaddingRewrite, node: Node) -> Extents:
    return rewrite.prefixes(value(node))


@rule(aten.scalar_tensor.default)
def _number(rewrite: PaddingRewrite, node: Node) -> Extents:
    if rewrite.is_rounded(node.args[0]):
        if not _holds_sizes(value(node).dtype):
            rewrite.require_exact(node.args[0])
        size = rewrite.true_product([size_of(node.args[0].meta["val"])], value(node))
        replace_by(node, rewrite.add(prims.convert_element_type.default, (size, value(node).dtype), (), value(node)))
    return ()


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(rewrite: PaddingRewrite, node: Node) -> Extents:
    rewrite.require_exact(*arguments_except(node, "end"))
    return rewrite.prefixes(value(node))


# Views


@rule(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(rewrite: PaddingRewrite, node: Node) -> Extents:
    before, sizes = rewrite.extents_of(node.args[0]), sizes_of(value(node))
    if sizes == sizes_of(value(node.args[0])):
        return before
    return reshaped(tuple(extent.non_uniform for extent in before), sizes, rewrite.rounded)


@rule(aten.view.dtype)
def _other_dtype(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Scales the last dimension by the ratio of the element sizes."""
    source = node.args[0]
    assert isinstance(source, Node)
    extents, before, after = rewrite.extents_of(source), value(source).dtype.itemsize, value(node).dtype.itemsize
    if before == after or not extents:
        return extents
    *outer, last = (*extents[:-1], extents[-1].non_uniform)
    if not last.factors:
        return (*outer, Extent.of(size_of(value(node).shape[-1])))
    final = quotient(last.factors[-1] * before, after)
    if final is None:
        raise NoPaddingRule("a view changes the item size, and does not divide a padded dimension")
    return (*outer, Extent((*last.factors[:-1], final)))


@rule(aten.expand.default)
def _expand(rewrite: PaddingRewrite, node: Node) -> Extents:
    before, result = rewrite.extents_of(node.args[0]), rewrite.prefixes(value(node), uniform=True)
    before = (Extent(()),) * (len(result) - len(before)) + before
    return tuple(own if own.factors else new for own, new in zip(before, result, strict=True))


@rule(aten.permute.default)
def _permute(rewrite: PaddingRewrite, node: Node) -> Extents:
    before = rewrite.extents_of(node.args[0])
    return tuple(before[dim] for dim in node.args[1])


@rule(aten.transpose.int, aten.t.default)
def _transpose(rewrite: PaddingRewrite, node: Node) -> Extents:
    found = list(rewrite.extents_of(node.args[0]))
    first, second = node.args[1:] if len(node.args) > 1 else (0, len(found) - 1)
    if found:
        found[first], found[second] = found[second], found[first]
    return tuple(found)


@rule(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def _unsqueeze(rewrite: PaddingRewrite, node: Node) -> Extents:
    before = rewrite.extents_of(node.args[0])
    dim = wrap(node.args[1], len(before) + 1)
    return (*before[:dim], Extent(()), *before[dim:])


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(rewrite: PaddingRewrite, node: Node) -> Extents:
    before = rewrite.extents_of(node.args[0])
    dims = range(len(before)) if len(node.args) == 1 else [node.args[1]] if isinstance(node.args[1], int) else node.args[1]
    dropped = {wrap(dim, len(before)) for dim in dims}
    return tuple(extent for dim, extent in enumerate(before) if dim not in dropped or extent.factors)


@rule(aten.slice.Tensor)
def _slice(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Replaces a slice whose start depends on the true size, for example because it counts from the end. Other slices stay as they are."""
    source = node.args[0]
    assert isinstance(source, Node)
    before = rewrite.extents_of(source)
    dim = wrap(argument(node, "dim"), len(before))
    start, end, step = argument(node, "start") or 0, argument(node, "end"), argument(node, "step")
    rewrite.require_exact(step)
    extent, after = before[dim], size_of(value(node).shape[dim])
    whole = Extent.of(size_of(value(source).shape[dim]))
    if start == 0 and step == 1 and after == size_of(value(source).shape[dim]):
        return before
    if not rewrite.is_padded(extent) and not any(map(rewrite.is_rounded, (start, end))):
        return with_extent(before, dim, Extent.of(after))
    if extent.non_uniform != whole:
        raise NoPaddingRule("it slices a flattened dimension")
    if not is_nondecreasing(after):
        raise NoPaddingRule(f"the length of a slice, {after}, may be larger than its rounded value")
    if isinstance(start, int) and start >= 0:
        return with_extent(before, dim, Extent.of(after))
    if step != 1:
        raise NoPaddingRule("a slice with a step starts at a dynamic size")
    if isinstance(start, int):
        if end is not None and end != END and not (isinstance(end, int) and end - start == after):
            raise NoPaddingRule("the start and the end of a slice count from the end")
        first = whole.factors[0] + start if isinstance(after, int) else whole.factors[0] - after
    else:
        first = size_of(value(start))
    shape = [*value(node).shape]
    replace_by(node, rewrite.slice_from(source, dim, first, shape))
    return with_extent(before, dim, Extent.of(after))


@rule(aten.select.int)
def _select(rewrite: PaddingRewrite, node: Node) -> Extents:
    source, dim, index = node.args
    assert isinstance(source, Node)
    before = rewrite.extents_of(source)
    dim = wrap(dim, len(before))
    extent = before[dim]
    if rewrite.is_padded(extent) or rewrite.is_rounded(index):
        whole = size_of(value(source).shape[dim])
        if extent.non_uniform != Extent.of(whole):
            raise NoPaddingRule("it indexes a flattened dimension")
        if not isinstance(index, int) or index < 0:
            first = whole + index if isinstance(index, int) else size_of(value(index))
            shape = [1 if d == dim else size for d, size in enumerate(value(source).shape)]
            node.args = (rewrite.slice_from(source, dim, first, shape), dim, 0)
    return before[:dim] + before[dim + 1 :]


@rule(aten.cat.default)
def _cat(rewrite: PaddingRewrite, node: Node) -> Extents:
    tensors = node.args[0]
    rank = value(node).dim()
    dim = wrap(argument(node, "dim"), rank)
    if any(value(item).dim() != rank for item in tensors):
        raise NoPaddingRule("one of the tensors is empty and has fewer dimensions than the result")
    input_extents = [rewrite.extents_of(item) for item in tensors]
    tensors = [converted(rewrite, item, value(node).dtype) for item in tensors]
    node.update_arg(0, tensors)
    result_extents = [
        common_extent([extents[d] for extents in input_extents]) if d != dim else Extent.of(size_of(value(node).shape[d]))
        for d in range(rank)
    ]
    sizes = [size_of(value(item).shape[dim]) for item in tensors]
    if any(
        extents[dim].non_uniform != Extent.of(size)
        for extents, size in zip(input_extents, sizes, strict=True)
        if rewrite.is_padded(extents[dim])
    ):
        raise NoPaddingRule("it extends a flattened dimension")
    if any(rewrite.is_padded(extents[dim]) for extents in input_extents[:-1]):
        start_indices = [rewrite.true_size_index(sum(sizes[:index])) for index in range(1, len(sizes))]
        replace_by(node, rewrite.add(cat_valid, (tensors, rewrite.true_sizes, dim, start_indices), value(node).shape, value(node)))
    if not is_nondecreasing(size_of(value(node).shape[dim])):
        raise NoPaddingRule("the size of the result may be larger than its rounded value")
    return tuple(result_extents)


@rule(aten.glu.default)
def _glu(rewrite: PaddingRewrite, node: Node) -> Extents:
    source = node.args[0]
    assert isinstance(source, Node)
    extents = rewrite.extents_of(source)
    dim = wrap(argument(node, "dim"), len(extents))
    rewrite.require_unpadded(source, [dim])
    return with_extent(extents, dim, Extent.of(size_of(value(node).shape[dim])))


@rule(aten.glu_backward.default)
def _glu_backward(rewrite: PaddingRewrite, node: Node) -> Extents:
    grad, source = (rewrite.extents_of(operand) for operand in node.args[:2])
    dim = wrap(argument(node, "dim"), len(source))
    rewrite.require_unpadded(node.args[1], [dim])
    return broadcast([with_extent(grad, dim, source[dim]), source])


@rule(aten.select_backward.default)
def _select_backward(rewrite: PaddingRewrite, node: Node) -> Extents:
    grad, _, dim, index = node.args
    rewrite.require_exact(index)
    result = rewrite.prefixes(value(node))
    dim = wrap(dim, len(result))
    own = rewrite.extents_of(grad)
    if rewrite.is_padded(result[dim]) and index < 0:
        shape = [*value(node).shape]
        shape[dim] = 1
        column = rewrite.add(aten.unsqueeze.default, (grad, dim), shape, value(node))
        replace_by(node, rewrite.embedded_in_zeros(column, dim, size_of(value(node).shape[dim]) + index, value(node).shape))
    return (*own[:dim], result[dim], *own[dim:])


@rule(aten.slice_backward.default)
def _slice_backward(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Sets the gradient's padding to zero, since the op writes this padding to valid positions of the result."""
    grad, _, dim, start, end, step = node.args
    result, own = rewrite.prefixes(value(node)), rewrite.extents_of(grad)
    dim = wrap(dim, len(result))
    size, count = size_of(value(node).shape[dim]), size_of(value(grad).shape[dim])
    if (start, step) == (0, 1) and count == size:
        return own
    rewrite.require_exact(start, step)
    if own[dim].non_uniform != Extent.of(count):
        raise NoPaddingRule("it reads a part of a flattened dimension")
    node.update_arg(0, rewrite.masked(grad, [dim], 0))
    if start < 0 and rewrite.is_padded(result[dim]):
        if step != 1 or (end != END and not (isinstance(end, int) and end - start == count)):
            raise NoPaddingRule("the start and the end of a slice count from the end")
        first = size + start if isinstance(count, int) else size - count
        replace_by(node, rewrite.embedded_in_zeros(node.args[0], dim, first, value(node).shape))
    return with_extent(own, dim, result[dim])


@rule(aten.tril.default, aten.triu.default)
def _triangle(rewrite: PaddingRewrite, node: Node) -> Extents:
    found, tensor = rewrite.extents_of(node.args[0]), value(node)
    rewrite.require_exact(*node.args[1:])
    if any(found[dim].non_uniform != Extent.of(size_of(tensor.shape[dim])) for dim in (-1, -2) if rewrite.is_padded(found[dim])):
        raise NoPaddingRule("its operand has a flattened dimension")
    return (*found[:-2], found[-2].non_uniform, found[-1].non_uniform)


def converted(rewrite: PaddingRewrite, node: Node, dtype: torch.dtype) -> Node:
    """Returns the tensor converted to a dtype."""
    x = value(node)
    if x.dtype == dtype:
        return node
    found = rewrite.add(prims.convert_element_type.default, (node, dtype), x.shape, x, result_dtype=dtype)
    rewrite.extents[found] = rewrite.extents_of(node)
    return found


def replace_by(node: Node, other: Node) -> None:
    """Turns a node into an alias of another node."""
    node.target, node.args, node.kwargs = aten.alias.default, (other,), {}


def replace_by_results(node: Node, results: Sequence[Node | None]) -> None:
    """Turns a node with several results into a tuple of other nodes, one for each result. None for a result that the op does not return."""
    node.target, node.args, node.kwargs = as_tuple, (list(results),), {}


# Reductions: the padding is set to the neutral element of the op


def lowest(dtype: torch.dtype) -> Any:
    """Returns the least value of a dtype."""
    return -math.inf if dtype.is_floating_point else False if dtype == torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Any:
    """Returns the greatest value of a dtype."""
    return math.inf if dtype.is_floating_point else True if dtype == torch.bool else torch.iinfo(dtype).max


# The neutral element of each reduction, as a function of the operand's dtype.
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
# Reductions that return positions.
_RETURN_POSITIONS = (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)


def reduced_dims(node: Node, rank: int) -> list[int]:
    names = {item.name for item in node.target._schema.arguments}
    dims = argument(node, "dim") if "dim" in names else None
    if dims is None or dims == []:
        return list(range(rank))
    return sorted({wrap(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims)})


def reduced_extents(extents: Extents, dims: Sequence[int], node: Node) -> Extents:
    """Returns the extents of a reduction's result. dims: the reduced dimensions."""
    several = node.meta["val"]
    rank = (several[0] if isinstance(several, (tuple, list)) else several).dim()
    if rank == len(extents):
        return tuple(Extent(()) if dim in dims else extent for dim, extent in enumerate(extents))
    return tuple(extent for dim, extent in enumerate(extents) if dim not in dims)


@rule(*_NEUTRAL)
def _reduction(rewrite: PaddingRewrite, node: Node) -> Any:
    source = node.args[0]
    assert isinstance(source, Node)
    rewrite.require_exact(*arguments_except(node, "self"))
    extents = rewrite.extents_of(source)
    dims = reduced_dims(node, len(extents))
    if node.target in _RETURN_POSITIONS:
        require_single_prefix(rewrite, source, dims)
    if not value(source).is_floating_point() and node.target is aten.logsumexp.default:
        raise NoPaddingRule("it computes with integers or complex numbers")
    node.update_arg(0, rewrite.masked(source, dims, _NEUTRAL[node.target](value(source).dtype)))
    found = reduced_extents(extents, dims, node)
    return [found, found] if isinstance(node.meta["val"], (tuple, list)) else found


def require_single_prefix(rewrite: PaddingRewrite, source: Node, dims: Sequence[int]) -> None:
    """Raises NoPaddingRule unless linear positions in these dimensions are the same as with the true sizes.

    The positions are the same if none of the dimensions is padded, or if there is only one dimension with one prefix of valid positions.
    """
    padded = [dim for dim in dims if rewrite.is_padded(rewrite.extents_of(source)[dim])]
    if padded and (len(dims) > 1 or rewrite.extents_of(source)[dims[0]].non_uniform != Extent.of(size_of(value(source).shape[dims[0]]))):
        raise NoPaddingRule("it needs a position among several dimensions")


@rule(aten.mean.default, aten.mean.dim)
def _mean(rewrite: PaddingRewrite, node: Node) -> Extents:
    """Replaces the mean by the sum of the valid elements, divided by their true number."""
    source, tensor = node.args[0], value(node)
    assert isinstance(source, Node)
    extents = rewrite.extents_of(source)
    dims = reduced_dims(node, len(extents))
    result = reduced_extents(extents, dims, node)
    rewrite.require_exact(*arguments_except(node, "self"))
    if not any(rewrite.is_padded(extents[dim]) for dim in dims):
        return result
    sum_dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    keepdim = tensor.dim() == len(extents)
    masked = rewrite.masked(source, dims, 0)
    total = rewrite.add(aten.sum.dim_IntList, (masked, dims, keepdim), tensor.shape, tensor, dtype=sum_dtype, result_dtype=sum_dtype)
    count = rewrite.true_product([factor for dim in dims for factor in extents[dim].factors], tensor)
    mean = rewrite.add(aten.div.Tensor, (total, count), tensor.shape, tensor, result_dtype=sum_dtype)
    replace_by(node, rewrite.add(prims.convert_element_type.default, (mean, tensor.dtype), tensor.shape, tensor))
    return result


@rule(aten.linalg_vector_norm.default)
def _norm(rewrite: PaddingRewrite, node: Node) -> Extents:
    rewrite.require_exact(*arguments_except(node, "self"))
    rewrite.require_constant(argument(node, "ord"))
    extents = rewrite.extents_of(node.args[0])
    dims = reduced_dims(node, len(extents))
    # The neutral element of a negative order is infinity, because infinity to a negative power is zero.
    node.update_arg(0, rewrite.masked(node.args[0], dims, 0 if argument(node, "ord") >= 0 else math.inf))
    return reduced_extents(extents, dims, node)


# The neutral element of each scan, as a function of the operand's dtype.
_CUMULATIVE: dict[torch._ops.OpOverload, Callable[[torch.dtype], Any]] = {
    aten.cumsum.default: lambda _: 0,
    aten.cumprod.default: lambda _: 1,
    aten.cummax.default: lowest,
    aten.cummin.default: highest,
    aten.logcumsumexp.default: lowest,
}


@rule(*_CUMULATIVE)
def _cumulative(rewrite: PaddingRewrite, node: Node) -> Any:
    source = node.args[0]
    assert isinstance(source, Node)
    extents = rewrite.extents_of(source)
    if value(source).is_complex() and node.target is aten.logcumsumexp.default:
        raise NoPaddingRule("it computes with complex numbers")
    if extents:
        dim = wrap(node.args[1], len(extents))
        require_single_prefix(rewrite, source, [dim])
        node.update_arg(0, rewrite.masked(source, [dim], _CUMULATIVE[node.target](value(source).dtype)))
        extents = with_extent(extents, dim, extents[dim].non_uniform)
    return [extents, extents] if isinstance(node.meta["val"], (tuple, list)) else extents


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def _softmax(rewrite: PaddingRewrite, node: Node) -> Extents:
    extents = rewrite.extents_of(node.args[0])
    if extents:
        dim = wrap(node.args[1], len(extents))
        node.update_arg(0, rewrite.masked(node.args[0], [dim], -math.inf))
        extents = with_extent(extents, dim, extents[dim].non_uniform)
    return extents


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(rewrite: PaddingRewrite, node: Node) -> Extents:
    extents = broadcast([rewrite.extents_of(node.args[0]), rewrite.extents_of(node.args[1])])
    if extents:
        dim = wrap(node.args[2], len(extents))
        for index in (0, 1):
            node.update_arg(index, rewrite.masked(node.args[index], [dim], 0, extents))
        extents = with_extent(extents, dim, extents[dim].non_uniform)
    return extents
