"""Sums of the gradients of a tensor's slices, lowered without additions.

The gradient of a tensor that a model reads in slices (`x[..., :d]` and `x[..., d:]`, or `x[t]` for each t) is a sum of tensors. Each term
is the gradient of one slice, with zeros outside the slice. If the slices do not overlap, their gradients are not added: gradients of
equal sizes that cover the tensor are concatenated, others are written into one array of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax import Array, lax
from torch.fx import Node

from ...torch_ops import aten
from ..context import Context
from ..dimensions import clamp_slice, is_static, wrap
from ..promotion import expand
from .shape import concatenate_nonempty

# Ops that return zeros.
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


@dataclass(frozen=True)
class _SliceGradient:
    """The gradient of a slice.

    Attributes:
        dim: The sliced dimension.
        start: The index of the slice's first element.
        count: The number of elements along `dim`.
        grad: The node that computes the gradient.
    """

    dim: int
    start: int
    count: int
    grad: Node


def sum_of_slice_gradients(ctx: Context) -> Array | None:
    """Returns the value of the current node, a sum of two tensors, if the node is a sum of gradients of disjoint slices.

    Returns None if the node is no such sum, or if it is part of a longer sum, which is lowered as a whole.
    """
    node: Node = ctx.node
    if not _is_sum_of_slice_gradients(node) or _is_in_longer_sum(node):
        return None
    terms, shape = list(_terms(node)), ctx.output.shape
    if not is_static(shape) or 0 in shape or any(ctx.spec(term).dtype != ctx.output.dtype for term in terms):
        return None
    slices: list[_SliceGradient] = []
    for term in terms:
        term_slices = _slice_gradients(term, shape, ctx)
        if term_slices is None:
            return None
        slices += term_slices
    slices.sort(key=lambda slice_grad: slice_grad.start)
    ends = [0, *(slice_grad.start + slice_grad.count for slice_grad in slices)]
    if not slices or any(slice_grad.dim != slices[0].dim or slice_grad.start < end for slice_grad, end in zip(slices, ends, strict=False)):
        return None
    dim = slices[0].dim

    grads = []
    for slice_grad in slices:
        grad = ctx.values[slice_grad.grad]
        grad = grad if grad.ndim == len(shape) else lax.expand_dims(grad, [dim])
        grads.append(expand(grad, [*shape[:dim], slice_grad.count, *shape[dim + 1 :]]))
    if len({grad.shape for grad in grads}) == 1 and sum(slice_grad.count for slice_grad in slices) == shape[dim]:
        return concatenate_nonempty(grads, dim)
    # XLA:CPU writes each gradient in place into one array, and vectorizes the writes.
    out = lax.full(shape, 0, ctx.output.jax_dtype)
    for slice_grad, grad in zip(slices, grads, strict=True):
        out = lax.dynamic_update_slice(out, grad, [slice_grad.start if index == dim else 0 for index in range(len(shape))])
    return out


def _is_sum_of_slice_gradients(node: Node) -> bool:
    """True if, judging by the ops of its arguments, the node adds gradients of slices, or sums of such gradients."""
    is_sum = node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs
    return is_sum and all(isinstance(arg, Node) and (arg.target in _GRADIENT_OPS or arg.target is aten.add.Tensor) for arg in node.args)


# Ops whose results are gradients of slices with zeros outside the slices. A cat is such a gradient if it concatenates gradients and zeros.
_GRADIENT_OPS = (aten.slice_backward.default, aten.select_backward.default, aten.cat.default)


def _is_in_longer_sum(node: Node) -> bool:
    """True if the node's only user is a longer sum of gradients of slices."""
    return len(node.users) == 1 and _is_sum_of_slice_gradients(next(iter(node.users)))


def _terms(node: Node) -> Iterator[Node]:
    """Yields the terms of a sum of gradients of slices, which may be nested."""
    stack = [node]
    while stack:
        term = stack.pop()
        if _is_sum_of_slice_gradients(term):
            stack += [arg for arg in term.args if isinstance(arg, Node)]
        else:
            yield term


def _slice_gradients(node: Node, shape: tuple[int, ...], ctx: Context) -> list[_SliceGradient] | None:
    """Returns the gradients of slices in the value of a term, which is 0 elsewhere; None if the term is not known to be such a value.

    Args:
        shape: The shape of the sum.
    """
    args: Any = node.args
    if node.target is aten.cat.default:
        if ctx.spec(node).shape != shape:  # the sum broadcasts the cat
            return None
        dim, start, slices = wrap(args[1] if len(args) > 1 else 0, len(shape)), 0, []
        for operand in args[0]:
            operand_shape = ctx.spec(operand).shape
            if len(operand_shape) != len(shape):  # cat also accepts tensors of shape [0]
                return None
            if operand.target not in ZEROS:
                slices.append(_SliceGradient(dim, start, operand_shape[dim], operand))
            start += operand_shape[dim]
        return slices if all(ctx.spec(slice_grad.grad).dtype == ctx.output.dtype for slice_grad in slices) else None
    if node.target not in _GRADIENT_OPS:
        return None
    grad, sizes, dim, start, *end_and_step = args
    if tuple(sizes) != tuple(shape) or not all(type(argument) is int for argument in (dim, start, *end_and_step)):
        return None
    dim = wrap(dim, len(shape))
    if node.target is aten.select_backward.default:
        return [_SliceGradient(dim, start % shape[dim], 1, grad)]
    end, step = end_and_step
    clamped_start, _, count = clamp_slice(shape[dim], start, end, step)
    return [_SliceGradient(dim, clamped_start, count, grad)] if step == 1 else None
