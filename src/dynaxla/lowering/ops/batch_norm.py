"""Batch normalization, forward and backward. Statistics of half types are computed in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert, to_accumulator
from ..registry import lowers
from .moments import affine, dims_but_channels, inverse_std, moments_over

Gradients = tuple[Array | None, Array | None, Array | None]


def _normalize_by_batch(x: Array, weight: Array | None, bias: Array | None, eps: float, ctx: Context) -> tuple[Array, Array, Array, Array]:
    """Returns x normalized by the statistics of x, and the mean, biased variance and 1 / standard deviation of each channel.

    Dtype:  of all results: float32 for half types, else that of x.
    """
    upcast = to_accumulator(x)
    mean, variance, centered = moments_over(upcast, dims_but_channels(x), ctx.sum)
    invstd = inverse_std(variance, eps)
    factor = invstd if weight is None else lax.mul(invstd, convert(weight, upcast.dtype))
    return affine(centered, factor, bias, (1,)), mean, variance, invstd


def _normalize_by_running(
    x: Array, weight: Array | None, bias: Array | None, running_mean: Array, running_var: Array, eps: float, ctx: Context
) -> Array:
    """Returns x normalized by the running statistics, in float32 for half types, else in x's dtype."""
    dtype = dtypes.accumulator(x.dtype)
    factor = inverse_std(convert(running_var, dtype), eps)
    if weight is not None:
        factor = lax.mul(factor, convert(weight, dtype))
    if ctx.eager.centers_first:
        centered = lax.sub(convert(x, dtype), lax.broadcast_in_dim(convert(running_mean, dtype), x.shape, (1,)))
        return affine(centered, factor, bias, (1,))
    # As in ATen, each channel has one factor and one shift: an element takes one multiplication and one addition.
    shift = lax.neg(lax.mul(convert(running_mean, dtype), factor))
    if bias is not None:
        shift = lax.add(convert(bias, dtype), shift)
    return affine(convert(x, dtype), factor, shift, (1,))


def _update_running(running: Array, statistic: Array, momentum: float) -> Array:
    """Returns (1 - momentum) * running + momentum * statistic, in the statistic's dtype."""
    upcast = convert(running, statistic.dtype)
    updated = lax.add(lax.mul(upcast, lax.full_like(upcast, 1 - momentum)), lax.mul(statistic, lax.full_like(upcast, momentum)))
    return updated


def _statistic_output(ctx: Context, index: int, statistic: Array | None) -> Array:
    """Returns a statistic as the node's result at `index`, in ATen's dtype; for None, the empty tensor that ATen returns."""
    spec = ctx.output[index]
    return lax.full(spec.shape, 0, spec.jax_dtype) if statistic is None else convert(statistic, spec.jax_dtype)


def _batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
    ctx: Context,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Returns the normalized x, the saved mean and 1 / standard deviation, and the running mean and variance, updated if `training`."""
    _require_vectors(running_mean, running_var)
    # ATen's forward kernels accept weight and bias of any shape with one element per channel.
    weight, bias = (None if item is None else lax.reshape(item, (item.size,)) for item in (weight, bias))
    if not training:
        assert running_mean is not None
        assert running_var is not None
        out = _normalize_by_running(x, weight, bias, running_mean, running_var, eps, ctx)
        return convert(out, x.dtype), _statistic_output(ctx, 1, None), _statistic_output(ctx, 2, None), running_mean, running_var
    out, mean, variance, invstd = _normalize_by_batch(x, weight, bias, eps, ctx)
    count = math.prod(x.shape[dim] for dim in dims_but_channels(x))
    if running_mean is not None:
        running_mean = _update_running(running_mean, mean, momentum)
    if running_var is not None:
        # ATen updates the running variance with the unbiased variance, which is 0 / 0 if a channel has a single value.
        unbiased = lax.mul(variance, lax.full_like(variance, count / (count - 1) if count != 1 else math.nan))
        running_var = _update_running(running_var, unbiased, momentum)
    return convert(out, x.dtype), _statistic_output(ctx, 1, mean), _statistic_output(ctx, 2, invstd), running_mean, running_var


def _require_vectors(*parameters: Array | None) -> None:
    """Raises UnsupportedOp for a tensor that is not a vector. ATen's kernels reject such tensors."""
    if any(item is not None and item.ndim != 1 for item in parameters):
        raise UnsupportedOp("batch norm needs running statistics (and in the backward pass a weight) of one dimension, as in eager mode")


@lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    training: bool,
    momentum: float,
    eps: float,
    *,
    ctx: Context,
) -> tuple[Array | None, ...]:
    """Batch norm: the result, the saved mean and 1 / standard deviation, and the new running mean and variance.

    Shape:  that of x (batch, channel, *space); statistics: (channel). Without `training` the saved statistics are empty.
    Dtype:  that of x; statistics: as in PyTorch.
    """
    *results, new_mean, new_var = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, ctx)
    return *results, _statistic_output(ctx, 3, new_mean), _statistic_output(ctx, 4, new_var)


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    x: Array, weight: Array | None, bias: Array | None, training: bool, momentum: float, eps: float, *, ctx: Context
) -> tuple[Array, Array, Array]:
    """Batch norm by x's own statistics: the result, mean and 1 / standard deviation. `training` is not read.

    Shape:  that of x (batch, channel, *space); statistics: (channel).
    Dtype:  that of x; statistics: as in PyTorch.
    """
    return _batch_norm(x, weight, bias, None, None, True, momentum, eps, ctx)[:3]


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
    *,
    ctx: Context,
) -> tuple[Array, Array, Array]:
    """Batch norm by running statistics: the result, and two empty vectors in place of the saved statistics.

    Shape:  that of x.
    """
    return _batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps, ctx)[:3]


@lowers(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    momentum: float,
    eps: float,
    *,
    ctx: Context,
) -> tuple[Array | None, ...]:
    """Batch norm by x's own statistics: the result, mean, 1 / standard deviation, an empty reserve, and the new running mean and variance.

    Shape:  that of x (batch, channel, *space); statistics: (channel).
    Dtype:  that of x; statistics: as in PyTorch.
    """
    out, mean, invstd, new_mean, new_var = _batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps, ctx)
    return out, mean, invstd, _statistic_output(ctx, 3, None), _statistic_output(ctx, 4, new_mean), _statistic_output(ctx, 5, new_var)


@lowers(aten._batch_norm_no_update.default)
def batch_norm_no_update(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    momentum: float,
    eps: float,
    *,
    ctx: Context,
) -> tuple[Array, ...]:
    """Batch norm by running statistics or, if there are none, by x's own statistics.

    The results are the normalized x, the saved mean and 1 / standard deviation, and an empty reserve.

    Shape:  that of x (batch, channel, *space); saved statistics: (channel), or empty with running statistics.
    """
    training = running_mean is None or running_var is None
    out, mean, invstd, *_ = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, ctx)
    return out, mean, invstd, _statistic_output(ctx, 3, None)


@lowers(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad: Array,
    x: Array,
    weight: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    save_mean: Array | None,
    save_invstd: Array | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
    *,
    ctx: Context,
) -> Gradients:
    """Gradients of input, weight and bias; None for each gradient that output_mask leaves out.

    Shape:  that of x, (channel) and (channel).
    Dtype:  that of x; weight and bias: that of the weight, or of x without a weight.
    """
    _require_vectors(weight, running_mean, running_var)
    dtype = dtypes.accumulator(x.dtype)
    dims = dims_but_channels(x)
    upcast_grad = convert(grad, dtype)
    if train:
        assert save_mean is not None
        assert save_invstd is not None
        mean, invstd = convert(save_mean, dtype), convert(save_invstd, dtype)
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, invstd = convert(running_mean, dtype), inverse_std(convert(running_var, dtype), eps)
    centered = lax.sub(convert(x, dtype), lax.broadcast_in_dim(mean, x.shape, (1,)))
    grad_bias = ctx.sum(upcast_grad, dims)
    grad_weight = lax.mul(ctx.sum(lax.mul(upcast_grad, centered), dims), invstd)
    grad_input = None
    if output_mask[0]:
        factor = invstd if weight is None else lax.mul(invstd, convert(weight, dtype))
        if train:
            count = lax.full_like(invstd, math.prod(x.shape[dim] for dim in dims))
            # Adding a constant to x, or scaling `centered`, leaves the normalized x unchanged. So grad's components in these two directions
            # are subtracted.
            coefficient = lax.div(lax.mul(grad_weight, invstd), count)
            upcast_grad = lax.sub(upcast_grad, lax.broadcast_in_dim(lax.div(grad_bias, count), x.shape, (1,)))
            upcast_grad = lax.sub(upcast_grad, lax.mul(centered, lax.broadcast_in_dim(coefficient, x.shape, (1,))))
        grad_input = convert(lax.mul(upcast_grad, lax.broadcast_in_dim(factor, x.shape, (1,))), x.dtype)
    parameter_dtype = x.dtype if weight is None else weight.dtype
    return (
        grad_input,
        convert(grad_weight, parameter_dtype) if output_mask[1] else None,
        convert(grad_bias, parameter_dtype) if output_mask[2] else None,
    )


@lowers(aten.batch_norm_backward.default)
def batch_norm_backward(
    grad: Array,
    x: Array,
    weight: Array,
    running_mean: Array | None,
    running_var: Array | None,
    save_mean: Array | None,
    save_var: Array | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Array,
    *,
    ctx: Context,
) -> Gradients:
    """Same as `native_batch_norm_backward`. `reserve` is not read: only cuDNN's kernel needs it."""
    return native_batch_norm_backward(grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask, ctx=ctx)
