"""Sums of the gradients of a tensor's slices, each of which is zero outside its slice.

The gradient of a tensor that a model reads in slices (`x[..., :d]` and `x[..., d:]`, or `x[t]` for each t) is such a sum. Where the slices
do not overlap, their gradients are put next to each other instead: nothing is added, and slices that cover the tensor need no zeros.
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
from .shape import joined

ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


@dataclass(frozen=True)
class _Piece:
    """The gradient of a slice.

    Attributes:
        dim: the sliced dimension.
        start: index of the slice's first element.
        count: number of elements along `dim`.
        grad: the node that computes the gradient.
    """

    dim: int
    start: int
    count: int
    grad: Node


def sum_of_slices(ctx: Context) -> Array | None:
    """The value of the current node, a sum of two tensors, if it is a sum of gradients of disjoint slices. None if it is not, or if it is
    part of a longer such sum."""
    node: Node = ctx.node
    if not _is_of_pieces(node) or _is_part(node):
        return None
    leaves, shape = list(_leaves(node)), ctx.output.shape
    if not is_static(shape) or 0 in shape or any(ctx.spec(leaf).dtype != ctx.output.dtype for leaf in leaves):
        return None
    found: list[_Piece] = []
    for leaf in leaves:
        pieces = _pieces(leaf, shape, ctx)
        if pieces is None:
            return None
        found += pieces
    found.sort(key=lambda piece: piece.start)
    ends = [0, *(piece.start + piece.count for piece in found)]
    if not found or any(piece.dim != found[0].dim or piece.start < end for piece, end in zip(found, ends, strict=False)):
        return None
    dim = found[0].dim

    grads = []
    for piece in found:
        grad = ctx.values[piece.grad]
        grad = grad if grad.ndim == len(shape) else lax.expand_dims(grad, [dim])
        grads.append(expand(grad, [*shape[:dim], piece.count, *shape[dim + 1 :]]))
    if len({grad.shape for grad in grads}) == 1 and sum(piece.count for piece in found) == shape[dim]:
        return joined(grads, dim)
    # XLA:CPU writes each piece in place into one array, and vectorizes the writes.
    out = lax.full(shape, 0, ctx.output.jax_dtype)
    for piece, grad in zip(found, grads, strict=True):
        out = lax.dynamic_update_slice(out, grad, [piece.start if index == dim else 0 for index in range(len(shape))])
    return out


def _is_of_pieces(node: Node) -> bool:
    """True if the node adds gradients of slices, or sums of them, judging by its arguments' ops alone."""
    is_sum = node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs
    return is_sum and all(isinstance(arg, Node) and (arg.target in _OPS or arg.target is aten.add.Tensor) for arg in node.args)


_OPS = (aten.slice_backward.default, aten.select_backward.default, aten.cat.default)


def _is_part(node: Node) -> bool:
    """True if the node's only user is a longer sum of gradients of slices."""
    return len(node.users) == 1 and _is_of_pieces(next(iter(node.users)))


def _leaves(node: Node) -> Iterator[Node]:
    """The terms of the sum."""
    waiting = [node]
    while waiting:
        found = waiting.pop()
        if _is_of_pieces(found):
            waiting += [arg for arg in found.args if isinstance(arg, Node)]
        else:
            yield found


def _pieces(node: Node, shape: tuple[int, ...], ctx: Context) -> list[_Piece] | None:
    """The gradients of slices that a node's value consists of, apart from zeros; None if it has other parts."""
    args: Any = node.args
    if node.target is aten.cat.default:
        dim, start, found = wrap(args[1] if len(args) > 1 else 0, len(shape)), 0, []
        for part in args[0]:
            size = ctx.spec(part).shape
            if len(size) != len(shape):  # a tensor of shape [0], which cat accepts among others
                return None
            if part.target not in ZEROS:
                found.append(_Piece(dim, start, size[dim], part))
            start += size[dim]
        return found if all(ctx.spec(piece.grad).dtype == ctx.output.dtype for piece in found) else None
    if node.target not in _OPS:
        return None
    grad, sizes, dim, start, *rest = args
    if tuple(sizes) != tuple(shape) or not all(type(number) is int for number in (dim, start, *rest)):
        return None
    dim = wrap(dim, len(shape))
    if node.target is aten.select_backward.default:
        return [_Piece(dim, start % shape[dim], 1, grad)]
    first, _, count = clamp_slice(shape[dim], start, rest[0], rest[1])
    return [_Piece(dim, first, count, grad)] if rest[1] == 1 else None
