"""Lowerings of losses that check their arguments' values: negative log-likelihood, forward and backward, and binary cross entropy.

Margin losses are in margin_losses.py. Other losses are decomposed into elementwise ops and reductions.
"""

from __future__ import annotations

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert, expand, to_accumulator
from ..registry import lowers
from .reductions import mean_all, sum_all

# Values of the argument `reduction`.
_NONE, _MEAN, _SUM = 0, 1, 2


def _classes_dim(x: Array) -> int:
    return 0 if x.ndim == 1 else 1


def _require_classes(ctx: Context, x: Array, target: Array, ignore_index: int) -> None:
    """Makes the call raise IndexError if a target is neither a class of x nor `ignore_index`."""
    classes = x.shape[_classes_dim(x)]
    low, high, ignored = (lax.full_like(target, value) for value in (0, classes, ignore_index))
    inside = lax.bitwise_and(lax.ge(target, low), lax.lt(target, high))
    ctx.require(lax.bitwise_or(inside, lax.eq(target, ignored)), IndexError, f"Target is out of bounds: there are {classes} classes.")


def _mask_and_weights(target: Array, weight: Array | None, ignore_index: int, like: Array) -> tuple[Array, Array]:
    """Returns a mask of the targets that are not `ignore_index`, and each target's weight (0 if ignored), in the dtype of `like`."""
    is_counted = lax.ne(target, lax.full_like(target, ignore_index))
    weights = lax.full(target.shape, 1, like.dtype) if weight is None else _gather_or_nan(convert(weight, like.dtype), target)
    return is_counted, lax.select(is_counted, weights, lax.full_like(weights, 0))


def _gather_or_nan(weight: Array, target: Array) -> Array:
    """Returns weight[target], with NaN for a target out of range."""
    if weight.size == 0:
        return lax.full(target.shape, np.nan, weight.dtype)
    dimension_numbers = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    index = lax.reshape(target, (*target.shape, 1))
    return lax.gather(weight, index, dimension_numbers, (1,), mode=lax.GatherScatterMode.FILL_OR_DROP)


def _gather_classes(x: Array, target: Array) -> Array:
    """Returns the elements of x at the target classes, with NaN for a target out of range.

    Shape:  that of x without the dimension of classes.
    """
    if x.size == 0:
        return lax.full(target.shape, np.nan, x.dtype)
    dim = _classes_dim(x)
    others = [d for d in range(x.ndim) if d != dim]
    dimension_numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        operand_batching_dims=tuple(others),
        start_indices_batching_dims=tuple(range(target.ndim)),
    )
    index = lax.reshape(target, (*target.shape, 1))
    return lax.gather(x, index, dimension_numbers, (1,) * x.ndim, mode=lax.GatherScatterMode.FILL_OR_DROP)


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    x: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int, *, ctx: Context
) -> tuple[Array, Array]:
    """The negative log-likelihood loss, -x[target] * weight[target], reduced; and the sum of the weights weight[target].

    An ignored target has loss and weight 0. The mean is the sum of the losses divided by the sum of the weights. For a batch without a
    reduction, the second result is 0 instead of the sum of the weights.

    Shape:  x (classes), (batch, classes) or (batch, classes, height, width); target: the same without the classes. The loss has shape [],
            or without a reduction that of the target; the sum has shape [].
    Dtype:  both: that of x.
    Raises: IndexError when the program runs, for a target that is neither a class nor `ignore_index`.
    """
    _require_classes(ctx, x, target, ignore_index)
    if x.ndim == 1:
        target = lax.reshape(target, ())
    wide = to_accumulator(x)
    is_counted, weights = _mask_and_weights(target, weight, ignore_index, wide)
    losses = lax.neg(lax.mul(_gather_classes(wide, target), weights))
    losses = lax.select(is_counted, losses, lax.full_like(losses, 0))
    if reduction == _NONE and x.ndim > 1:
        return convert(losses, x.dtype), lax.full((), 0, x.dtype)
    all_dims = range(losses.ndim)
    loss, total = lax.reduce_sum(losses, all_dims), lax.reduce_sum(weights, all_dims)
    if reduction == _MEAN:
        loss = lax.div(loss, total)
    return convert(loss, x.dtype), convert(total, x.dtype)


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    grad: Array,
    x: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: Array,
    *,
    ctx: Context,
) -> Array:
    """The gradient of the negative log-likelihood loss: -weight[target] * grad (for a mean, / total_weight) at target classes, else zero.

    Shape:  that of x.
    Dtype:  that of x.
    Raises: as `nll_loss_forward`.
    """
    _require_classes(ctx, x, target, ignore_index)
    if x.ndim == 1:
        target, grad = lax.reshape(target, ()), lax.reshape(grad, ())
    dtype = dtypes.accumulator(x.dtype)
    wide = convert(grad, dtype)
    is_counted, weights = _mask_and_weights(target, weight, ignore_index, wide)
    if reduction == _MEAN:
        wide = lax.div(wide, convert(total_weight, dtype))
    if wide.ndim < target.ndim:
        wide = lax.broadcast_in_dim(wide, target.shape, ())
    target_grads = lax.neg(lax.mul(wide, weights))
    target_grads = lax.select(is_counted, target_grads, lax.full_like(target_grads, 0))
    dim = _classes_dim(x)
    others = [d for d in range(x.ndim) if d != dim]
    classes = lax.broadcasted_iota(target.dtype, x.shape, dim)
    is_target = lax.eq(classes, lax.broadcast_in_dim(target, x.shape, others))
    out = lax.select(is_target, lax.broadcast_in_dim(target_grads, x.shape, others), lax.full(x.shape, np.array(0, dtype)))
    return convert(out, x.dtype)


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(x: Array, target: Array, weight: Array | None = None, reduction: int = _MEAN, *, ctx: Context) -> Array:
    """-(target log(x) + (1 - target) log(1 - x)) * weight, reduced. As in ATen, logarithms are clamped to at least -100.

    Shape:  [], or without a reduction that of x.
    Dtype:  that of x.
    Raises: RuntimeError when the program runs, for elements of x or target that are not between 0 and 1.
    """
    for name, values in (("input", x), ("target", target)):
        low, high = (lax.full_like(values, bound) for bound in (0, 1))
        inside = lax.bitwise_and(lax.ge(values, low), lax.le(values, high))
        ctx.require(inside, RuntimeError, f"all elements of {name} should be between 0 and 1")
    dtype = dtypes.accumulator(x.dtype)
    wide, wide_target = convert(x, dtype), convert(target, dtype)
    min_log = lax.full_like(wide, -100)
    positive_term = lax.mul(wide_target, lax.max(lax.log(wide), min_log))
    negative_term = lax.mul(lax.sub(wide_target, lax.full_like(wide_target, 1)), lax.max(lax.log1p(lax.neg(wide)), min_log))
    losses = lax.sub(negative_term, positive_term)
    if weight is not None:
        losses = lax.mul(losses, expand(convert(weight, dtype), losses.shape))
    if reduction == _MEAN:
        losses = mean_all(losses, ctx=ctx)
    elif reduction == _SUM:
        losses = sum_all(losses, ctx=ctx)
    return convert(losses, x.dtype)
