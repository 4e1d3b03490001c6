"""Lowerings of multi-class margin losses and their gradients. `multi_margin_loss` itself is decomposed; only its gradient is here."""

from __future__ import annotations

import math
from typing import Any

from jax import Array, lax

from ...torch_ops import aten
from ..context import Context
from ..promotion import convert, expand_leading, full_like, number, to_accumulator
from ..registry import lowers
from .indexing import take_along
from .scans import running_sum

# Values of the argument `reduction`.
_NONE, _MEAN = 0, 1


def _with_rank(x: Array, rank: int) -> Array:
    """Returns x with leading dimensions of size 1 up to `rank` dimensions."""
    return x if x.ndim == rank else lax.reshape(x, (1,) * (rank - x.ndim) + x.shape)


def _grad_per_term(grad: Array, batch: int, classes: int, reduction: int) -> Array:
    """Returns the gradient of the reduced loss with respect to one term. A sample's loss is the sum of its terms, divided by `classes`.

    Shape:  (batch, 1).
    """
    wide = to_accumulator(grad)
    count = classes * batch if reduction == _MEAN else classes
    return lax.broadcast_in_dim(lax.div(wide, full_like(wide, count)), (batch, 1), (0,) if wide.ndim else ())


@lowers(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(
    grad: Array, x: Array, target: Array, p: Any, margin: Any, weight: Array | None = None, reduction: int = 1
) -> Array:
    """The gradient with respect to x of weight[target] * max(0, margin - x[target] + x[other]) ** p / classes, summed over other classes.

    Shape:  that of x.
    Dtype:  that of x.
    """
    rows, targets = _with_rank(to_accumulator(x), 2), lax.reshape(target, (target.size,))
    shape = batch, classes = rows.shape
    if x.size == 0:
        return x
    is_target = lax.eq(lax.broadcasted_iota(targets.dtype, shape, 1), expand_leading(targets, shape))
    zero = full_like(rows, 0)
    target_values = lax.reduce_sum(lax.select(is_target, rows, zero), (1,))
    margins = lax.add(lax.sub(number(margin, rows.dtype), expand_leading(target_values, shape)), rows)
    term_grads = expand_leading(_grad_per_term(grad, batch, classes, reduction), shape)
    if p == 2:
        term_grads = lax.mul(term_grads, lax.add(margins, margins))
    if weight is not None:
        term_grads = lax.mul(term_grads, expand_leading(convert(take_along(weight, 0, targets), rows.dtype), shape))
    other_grads = lax.select(lax.bitwise_or(is_target, lax.le(margins, zero)), zero, term_grads)
    target_grads = lax.neg(expand_leading(lax.reduce_sum(other_grads, (1,)), shape))
    return convert(lax.reshape(lax.select(is_target, target_grads, other_grads), x.shape), x.dtype)


def _margin_terms(x: Array, target: Array) -> tuple[Array, Array, Array, Array]:
    """Returns the margin terms of the multi-label loss, two masks of these terms, and x in the accumulator's dtype.

    The terms 1 - x[target] + x[class] have dimensions (sample, position in the sample's list of targets, class), of sizes
    (batch, classes, classes). The first mask is True for positions before the end of the list, which is the first negative target. The
    second mask is True where the class is the target itself. x has shape (batch, classes).
    """
    rows = _with_rank(to_accumulator(x), 2)
    targets = _with_rank(target, 2)
    shape = (*rows.shape, rows.shape[1])
    end_counts = running_sum(convert(lax.lt(targets, full_like(targets, 0)), targets.dtype), 1)
    is_listed = expand_leading(lax.eq(end_counts, full_like(end_counts, 0)), shape)
    is_own_class = lax.eq(lax.broadcasted_iota(targets.dtype, shape, 2), expand_leading(targets, shape))
    values = lax.broadcast_in_dim(rows, shape, (0, 2))
    target_values = lax.reduce_sum(lax.select(is_own_class, values, full_like(values, 0)), (2,))
    return lax.add(lax.sub(number(1, rows.dtype), expand_leading(target_values, shape)), values), is_listed, is_own_class, rows


@lowers(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss_forward(x: Array, target: Array, reduction: int, *, ctx: Context) -> tuple[Array, Array]:
    """The multi-label margin loss; and a mask with 1 for each class that is a target, else 0.

    A sample's loss is sum(max(0, 1 - x[target] + x[other])) / classes, over all its targets and all classes that are no targets. The list
    of targets ends at the first negative number. (Torch's decomposition is not used because it also counts the targets after that number.)

    Shape:  x (classes) or (batch, classes) gives [], or without a reduction the shape of x without the classes; and that of x.
    Dtype:  both: that of x.
    """
    spec = ctx.output[0]
    if x.size == 0:
        return lax.full(spec.shape, math.nan if reduction == _MEAN else 0, spec.jax_dtype), x
    margins, is_listed, is_own_class, rows = _margin_terms(x, target)
    is_target = lax.reduce_or(lax.bitwise_and(is_listed, is_own_class), (1,))
    is_counted = lax.bitwise_and(is_listed, lax.broadcast_in_dim(lax.bitwise_not(is_target), margins.shape, (0, 2)))
    zero = full_like(margins, 0)
    terms = lax.select(lax.bitwise_and(is_counted, lax.gt(margins, zero)), margins, zero)
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
    margins, is_listed, is_own_class, rows = _margin_terms(x, target)
    target_mask = _with_rank(is_target, 2)
    is_other = lax.broadcast_in_dim(lax.eq(target_mask, full_like(target_mask, 0)), margins.shape, (0, 2))
    zero = full_like(margins, 0)
    active = convert(lax.bitwise_and(lax.bitwise_and(is_listed, is_other), lax.gt(margins, zero)), rows.dtype)
    active_per_target = expand_leading(lax.reduce_sum(active, (2,)), margins.shape)
    target_counts = lax.reduce_sum(lax.select(is_own_class, active_per_target, zero), (1,))
    batch, classes = rows.shape
    term_grads = expand_leading(_grad_per_term(grad, batch, classes, reduction), rows.shape)
    out = lax.mul(lax.sub(lax.reduce_sum(active, (1,)), target_counts), term_grads)
    return convert(lax.reshape(out, x.shape), x.dtype)
