"""Lowerings of the CUDA ops from which `nn.SyncBatchNorm` composes batch normalization. Statistics of half types are float32."""

from __future__ import annotations

from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert, expand_leading, full_like, number, to_accumulator
from ..registry import lowers
from .moments import dims_but_channels, inverse_std, moments_over


def _per_channel(statistic: Array, x: Array) -> Array:
    return lax.broadcast_in_dim(convert(statistic, dtypes.accumulator(x.dtype)), x.shape, (1,))


def _moments(x: Array) -> tuple[Array, Array]:
    """Returns mean and biased variance of each channel."""
    mean, variance, _ = moments_over(to_accumulator(x), dims_but_channels(x))
    return mean, variance


def _reject_running_statistics(*statistics: Array | None) -> None:
    # These ops write to their running statistics. Their schemas do not declare the writes, so functionalization does not see them.
    if any(statistic is not None for statistic in statistics):
        raise UnsupportedOp("an op that changes running statistics, although its schema does not declare them as mutated")


@lowers(aten.batch_norm_stats.default)
def batch_norm_stats(x: Array, eps: float) -> tuple[Array, Array]:
    """Mean and 1 / standard deviation of each channel.

    Shape:  x (batch, channel, *space) gives (channel) twice.
    Dtype:  the accumulator's: float32 for half types.
    """
    mean, variance = _moments(x)
    return mean, inverse_std(variance, eps)


@lowers(aten.batch_norm_update_stats.default)
def batch_norm_update_stats(
    x: Array, running_mean: Array | None, running_var: Array | None, momentum: float, *, ctx: Context
) -> tuple[Array, ...]:
    """Mean and biased variance of each channel.

    Shape:  x (batch, channel, *space) gives (channel) twice.
    Raises: UnsupportedOp with running statistics, which the op mutates although its schema does not declare this.
    """
    _reject_running_statistics(running_mean, running_var)
    return tuple(convert(statistic, spec.jax_dtype) for statistic, spec in zip(_moments(x), ctx.output, strict=True))


@lowers(aten.batch_norm_gather_stats_with_counts.default)
def batch_norm_gather_stats_with_counts(
    x: Array,
    mean: Array,
    invstd: Array,
    running_mean: Array | None,
    running_var: Array | None,
    momentum: float,
    eps: float,
    counts: Array | int,
) -> tuple[Array, Array]:
    """Mean and 1 / standard deviation of each channel over several processes.

    Shape:  mean and invstd (process, channel), and counts, (process) or one number for all, give (channel) twice.
    Raises: UnsupportedOp with running statistics, which the op mutates although its schema does not declare this.
    """
    _reject_running_statistics(running_mean, running_var)
    means, deviations = to_accumulator(mean), lax.div(full_like(invstd, 1), to_accumulator(invstd))
    count = convert(counts, means.dtype)
    weights = expand_leading(count, means.shape)
    total = lax.reduce_sum(weights, (0,))
    total_mean = lax.div(lax.reduce_sum(lax.mul(means, weights), (0,)), total)
    distances = lax.sub(means, lax.broadcast_in_dim(total_mean, means.shape, (1,)))
    variances = lax.add(lax.sub(lax.square(deviations), number(eps, means.dtype)), lax.square(distances))
    variance = lax.div(lax.reduce_sum(lax.mul(variances, weights), (0,)), total)
    return convert(total_mean, mean.dtype), convert(inverse_std(variance, eps), invstd.dtype)


@lowers(aten.batch_norm_gather_stats.default)
def batch_norm_gather_stats(
    x: Array,
    mean: Array,
    invstd: Array,
    running_mean: Array | None,
    running_var: Array | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Array, Array]:
    """As `batch_norm_gather_stats_with_counts`, with one count for all processes."""
    return batch_norm_gather_stats_with_counts(x, mean, invstd, running_mean, running_var, momentum, eps, count)


@lowers(aten.batch_norm_elemt.default)
def batch_norm_elemt(x: Array, weight: Array | None, bias: Array | None, mean: Array, invstd: Array, eps: float) -> Array:
    """(x - mean) * invstd * weight + bias; all operands but x are per channel.

    Shape:  that of x.
    Dtype:  that of x.
    """
    out = lax.mul(lax.sub(to_accumulator(x), _per_channel(mean, x)), _per_channel(invstd, x))
    if weight is not None:
        out = lax.mul(out, _per_channel(weight, x))
    if bias is not None:
        out = lax.add(out, _per_channel(bias, x))
    return convert(out, x.dtype)


@lowers(aten.batch_norm_backward_reduce.default)
def batch_norm_backward_reduce(
    grad: Array, x: Array, mean: Array, invstd: Array, weight: Array | None, input_g: bool, weight_g: bool, bias_g: bool
) -> tuple[Array | None, ...]:
    """Per channel, the sum of grad, the sum of grad * (x - mean), and the gradients of weight and bias; None if not requested.

    Shape:  each (channel).
    Dtype:  that of the mean for both sums; that of the weight, or of x without a weight, for both gradients.
    """
    dims = dims_but_channels(x)
    wide = to_accumulator(grad)
    total = lax.reduce_sum(wide, dims)
    product = lax.reduce_sum(lax.mul(wide, lax.sub(to_accumulator(x), _per_channel(mean, x))), dims)
    dtype = x.dtype if weight is None else weight.dtype
    return (
        convert(total, mean.dtype) if input_g else None,
        convert(product, mean.dtype) if input_g else None,
        convert(lax.mul(product, convert(invstd, product.dtype)), dtype) if weight_g else None,
        convert(total, dtype) if bias_g else None,
    )


@lowers(aten.batch_norm_backward_elemt.default)
def batch_norm_backward_elemt(
    grad: Array, x: Array, mean: Array, invstd: Array, weight: Array | None, sum_dy: Array, sum_dy_xmu: Array, count: Array
) -> Array:
    """The gradient of x, from the sums of `batch_norm_backward_reduce` over all processes. `count`: elements per channel of each process.

    Shape:  that of x.
    Dtype:  that of x.
    """
    inverse = to_accumulator(invstd)
    total = lax.reduce_sum(convert(count, inverse.dtype), range(count.ndim))
    inverse_count = lax.broadcast_in_dim(lax.div(number(1, inverse.dtype), total), inverse.shape, ())
    factor_of_distance = lax.mul(lax.mul(convert(sum_dy_xmu, inverse.dtype), inverse_count), lax.square(inverse))
    out = lax.sub(to_accumulator(grad), _per_channel(lax.mul(convert(sum_dy, inverse.dtype), inverse_count), x))
    out = lax.sub(out, lax.mul(lax.sub(to_accumulator(x), _per_channel(mean, x)), _per_channel(factor_of_distance, x)))
    factor = inverse if weight is None else lax.mul(inverse, convert(weight, inverse.dtype))
    return convert(lax.mul(out, _per_channel(factor, x)), x.dtype)
