"""Lowerings of multi-class margin losses and their gradients. `multi_margin_loss` itself is decomposed; only its gradient is here."""

from __future__ import annotations

import math
from typing import Any

from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert, full_like, number
from ..registry import lowers
from .indexing import take_along
from .scans import running_sum

# Values of the argument `reduction`.
_NONE, _MEAN = 0, 1


def _batched(x: Array, rank: int) -> Array:
    """Returns x with leading dimensions of size 1 up to `rank` dimensions."""
    return x if x.ndim == rank else lax.reshape(x, (1,) * (rank - x.ndim) + x.shape)


def _per_sample(grad: Array, batch: int, classes: int, reduction: int) -> Array:
    """Returns the gradient of each term in the sum of each sample's loss.

    Shape:  (batch, 1).
    """
    wide = convert(grad, dtypes.accumulator(grad.dtype))
    count = classes * batch if reduction == _MEAN else classes
    return lax.broadcast_in_dim(lax.div(wide, full_like(wide, count)), (batch, 1), (0,) if wide.ndim else ())


def _spread(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(x, shape, range(x.ndim))


@lowers(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(
    grad: Array, x: Array, target: Array, p: Any, margin: Any, weight: Array | None = None, reduction: int = 1
) -> Array:
    """The gradient with respect to x of sum(max(0, margin - x[target] + x[other]) ** p) / classes, summed over the classes but the target.

    Shape:  that of x.
    Dtype:  that of x.
    """
    rows, targets = _batched(convert(x, dtypes.accumulator(x.dtype)), 2), lax.reshape(target, (target.size,))
    shape = batch, classes = rows.shape
    if x.size == 0:
        return x
    is_target = lax.eq(lax.broadcasted_iota(targets.dtype, shape, 1), _spread(targets, shape))
    zero = full_like(rows, 0)
    at_target = lax.reduce_sum(lax.select(is_target, rows, zero), (1,))
    distance = lax.add(lax.sub(number(margin, rows.dtype), _spread(at_target, shape)), rows)
    flow = _spread(_per_sample(grad, batch, classes, reduction), shape)
    if p == 2:
        flow = lax.mul(flow, lax.add(distance, distance))
    if weight is not None:
        flow = lax.mul(flow, _spread(convert(take_along(weight, 0, targets), rows.dtype), shape))
    others = lax.select(lax.bitwise_or(is_target, lax.le(distance, zero)), zero, flow)
    total = lax.neg(_spread(lax.reduce_sum(others, (1,)), shape))
    return convert(lax.reshape(lax.select(is_target, total, others), x.shape), x.dtype)


def _distances(x: Array, target: Array) -> tuple[Array, Array, Array, Array]:
    """Returns the margin terms of the multi-label loss, two masks of them, and x in the accumulator's dtype.

    The terms 1 - x[target] + x[class] have dimensions (sample, position in the sample's list of targets, class), which is
    (batch, classes, classes). The first mask is True for positions before the end of the list (the first negative target); the second
    where the class is the target itself. x is (batch, classes).
    """
    rows = _batched(convert(x, dtypes.accumulator(x.dtype)), 2)
    targets = _batched(target, 2)
    shape = (*rows.shape, rows.shape[1])
    ended = running_sum(convert(lax.lt(targets, full_like(targets, 0)), targets.dtype), 1)
    listed = _spread(lax.eq(ended, full_like(ended, 0)), shape)
    own = lax.eq(lax.broadcasted_iota(targets.dtype, shape, 2), _spread(targets, shape))
    every = lax.broadcast_in_dim(rows, shape, (0, 2))
    at_target = lax.reduce_sum(lax.select(own, every, full_like(every, 0)), (2,))
    return lax.add(lax.sub(number(1, rows.dtype), _spread(at_target, shape)), every), listed, own, rows


@lowers(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss_forward(x: Array, target: Array, reduction: int, *, ctx: Context) -> tuple[Array, Array]:
    """The multi-label margin loss, and 1 for each class that is a target, else 0.

    A sample's loss is sum(max(0, 1 - x[target] + x[other])) / classes, over all its targets and all classes that are no targets. The list
    of targets ends at the first -1. (Torch's decomposition also counts the targets after the -1.)

    Shape:  x (classes) or (batch, classes) gives [], or without a reduction x without the classes; and that of x.
    Dtype:  both: that of x.
    """
    spec = ctx.output[0]
    if x.size == 0:
        return lax.full(spec.shape, math.nan if reduction == _MEAN else 0, spec.jax_dtype), x
    distance, listed, own, rows = _distances(x, target)
    is_target = lax.reduce_or(lax.bitwise_and(listed, own), (1,))
    counts = lax.bitwise_and(listed, lax.broadcast_in_dim(lax.bitwise_not(is_target), distance.shape, (0, 2)))
    zero = full_like(distance, 0)
    terms = lax.select(lax.bitwise_and(counts, lax.gt(distance, zero)), distance, zero)
    loss = lax.reduce_sum(terms, (1, 2))
    loss = lax.div(loss, full_like(loss, rows.shape[1]))
    if reduction != _NONE:
        loss = lax.reduce_sum(loss, (0,))
    if reduction == _MEAN:
        loss = lax.div(loss, full_like(loss, rows.shape[0]))
    return convert(lax.reshape(loss, spec.shape), x.dtype), convert(lax.reshape(is_target, x.shape), x.dtype)


@lowers(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(grad: Array, x: Array, target: Array, reduction: int, is_target: Array) -> Array:
    """The gradient of the multi-label margin loss with respect to x. is_target: the second result of the forward op.

    Shape:  that of x.
    Dtype:  that of x.
    """
    if x.size == 0:
        return x
    distance, listed, own, rows = _distances(x, target)
    among = _batched(is_target, 2)
    other = lax.broadcast_in_dim(lax.eq(among, full_like(among, 0)), distance.shape, (0, 2))
    zero = full_like(distance, 0)
    active = convert(lax.bitwise_and(lax.bitwise_and(listed, other), lax.gt(distance, zero)), rows.dtype)
    per_target = _spread(lax.reduce_sum(active, (2,)), distance.shape)
    back = lax.reduce_sum(lax.select(own, per_target, zero), (1,))
    batch, classes = rows.shape
    flow = _spread(_per_sample(grad, batch, classes, reduction), rows.shape)
    out = lax.mul(lax.sub(lax.reduce_sum(active, (1,)), back), flow)
    return convert(lax.reshape(out, x.shape), x.dtype)
