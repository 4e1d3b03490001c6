"""Random numbers: ATen's distributions, drawn from XLA's generator with keys from the context.

The numbers are not eager PyTorch's, but `torch.manual_seed` rules them: the context's key follows from torch's default generator.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax

from ...errors import LoweringError
from .. import dtypes
from ..context import Context, TensorSpec
from ..dtypes import DType
from ..promotion import convert, expand, full_like, number, result_type
from ..registry import lowers
from .activations import leaky_relu_backward
from .bounds import refuse_unless
from .scans import running_sum

aten = torch.ops.aten
Shape = tuple[int, ...]

# How many bits the mantissas of floats have. Uniform numbers have as many random bits: ATen core/TransformationHelper.h, uniform_real
_MANTISSA_BITS = {np.dtype(np.float32): 24, np.dtype(np.float64): 53, np.dtype(np.float16): 11, dtypes.to_jax(torch.bfloat16): 8}


def _uniform(ctx: Context, shape: Shape, dtype: DType) -> Array:
    """float32 or float64 numbers from [0, 1), or complex ones of such."""
    if dtypes.is_complex(dtype):
        return lax.complex(_uniform(ctx, shape, dtypes.real(dtype)), _uniform(ctx, shape, dtypes.real(dtype)))
    word = np.dtype(np.uint64 if dtype.itemsize == 8 else np.uint32)
    kept = _MANTISSA_BITS[dtype]
    bits = lax.shift_right_logical(jax.random.bits(ctx.key(), shape, word), number(word.itemsize * 8 - kept, word))
    return lax.mul(lax.convert_element_type(bits, dtype), number(2.0**-kept, dtype))


def _between(ctx: Context, shape: Shape, dtype: DType, low: float, high: float) -> Array:
    """Numbers between two others, both parts of complex ones. As a half type they may be rounded to the upper end."""
    drawn = _uniform(ctx, shape, dtypes.accumulator(dtype))
    return convert(lax.add(lax.mul(drawn, number(high - low, drawn.dtype)), _both_parts(low, drawn.dtype)), dtype)


def _both_parts(value: float, dtype: DType) -> Any:
    return number(complex(value, value) if dtypes.is_complex(dtype) else value, dtype)


def _normal(ctx: Context, shape: Shape, dtype: DType) -> Array:
    """Standard normal numbers in the dtype in which ATen computes; complex ones have variance 1 in all."""
    return jax.random.normal(ctx.key(), shape, dtypes.accumulator(dtype))


def _computation(dtype: DType) -> DType:
    """The float dtype in which to draw for a result that may be of integers."""
    return dtypes.accumulator(dtype) if dtypes.is_inexact(dtype) else np.dtype(np.float32)


# From nothing


def _half_open(ctx: Context, shape: Shape, dtype: DType, low: float, high: float) -> Array:
    """As _between, without the upper end: what is rounded to that becomes the lower end, as in ATen."""
    drawn = _between(ctx, shape, dtype, low, high)
    at_end = lax.eq(drawn, _both_parts(high, dtype))
    return lax.select(at_end, lax.full(shape, _both_parts(low, dtype)), drawn)


@lowers(aten.rand.default, aten.rand.generator)
def rand(size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    return _half_open(ctx, ctx.output.shape, ctx.output.jax_dtype, 0, 1)


@lowers(aten.rand_like.default, aten.rand_like.generator)
def rand_like(x: Array, *, dtype: DType | None = None, ctx: Context) -> Array:
    return rand(x.shape, ctx=ctx)


@lowers(aten.randn.default, aten.randn.generator)
def randn(size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    return convert(_normal(ctx, ctx.output.shape, ctx.output.jax_dtype), ctx.output.jax_dtype)


@lowers(aten.randn_like.default, aten.randn_like.generator)
def randn_like(x: Array, *, dtype: DType | None = None, ctx: Context) -> Array:
    return randn(x.shape, ctx=ctx)


def _integers(ctx: Context, low: Any, high: Any) -> Array:
    """Integers from [low, high), for the current node's result.

    Source: ATen core/TransformationHelper.h, uniform_int_from_to: 32 random bits where they are enough, modulo the range.
    """
    spec: TensorSpec = ctx.output
    message = "random_ expects 'from' to be less than 'to'"
    if isinstance(high, jax.Array):
        ctx.require(lax.lt(convert(low, np.dtype(np.int64)), convert(high, np.dtype(np.int64))), RuntimeError, message)
        bits = jax.random.bits(ctx.key(), spec.shape, np.uint64)
        numbers = lax.rem(bits, expand(convert(lax.sub(convert(high, np.dtype(np.int64)), np.int64(low)), bits.dtype), spec.shape))
    elif high <= low:
        refuse_unless(ctx, False, RuntimeError, f"{message}, but got from={low} >= to={high}")
        return lax.full(spec.shape, 0, spec.jax_dtype)
    elif high - low < 2**32:
        bits = jax.random.bits(ctx.key(), spec.shape, np.uint32)
        numbers = lax.rem(bits, np.uint32(high - low))
    else:
        bits = jax.random.bits(ctx.key(), spec.shape, np.uint64)
        numbers = lax.rem(bits, np.uint64(high - low))
    return convert(lax.add(lax.convert_element_type(numbers, np.int64), np.int64(low)), spec.jax_dtype)


@lowers(aten.randint.default, aten.randint.generator)
def randint(high: int, size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    return _integers(ctx, 0, high)


@lowers(aten.randint.low, aten.randint.low_generator)
def randint_low(low: int, high: int, size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    return _integers(ctx, low, high)


@lowers(aten.randint_like.default, aten.randint_like.generator, aten.randint_like.Tensor, aten.randint_like.Tensor_generator)
def randint_like(x: Array, high: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    return _integers(ctx, 0, high)


@lowers(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def randint_like_low(x: Array, low: int, high: int, *, dtype: DType | None = None, ctx: Context) -> Array:
    return _integers(ctx, low, high)


@lowers(aten.random.default)
def random(x: Array, ctx: Context) -> Array:
    """Every integer that the dtype holds, from 0 up; for floats those up to which it holds all integers.

    Source: ATen native/DistributionTemplates.h, random_impl
    """
    dtype = np.dtype(x.dtype)
    if dtypes.is_bool(dtype):
        return _integers(ctx, 0, 2)
    if dtypes.is_float(dtype):
        return _integers(ctx, 0, 2 ** _MANTISSA_BITS[dtype] + 1)
    return _integers(ctx, 0, min(int(np.iinfo(dtype).max) + 1, 2**63 - 1))


@lowers(aten.random.to)
def random_to(x: Array, high: int, ctx: Context) -> Array:
    return _integers(ctx, 0, high)


@lowers(getattr(aten.random, "from"))
def random_from(x: Array, low: int, high: int | None, ctx: Context) -> Array:
    if high is None:
        high = int(np.iinfo(np.dtype(x.dtype)).max) + 1 if dtypes.is_integer(x.dtype) else 2 ** _MANTISSA_BITS[np.dtype(x.dtype)] + 1
    return _integers(ctx, low, high)


@lowers(aten.randperm.default, aten.randperm.generator)
def randperm(n: int, *, dtype: DType | None = None, ctx: Context) -> Array:
    return convert(jax.random.permutation(ctx.key(), lax.iota(np.int64, n)), ctx.output.jax_dtype)


# Bernoulli and dropout


_BERNOULLI = "Expected p_in >= 0 && p_in <= 1 to be true, but got false."


def _bernoulli(ctx: Context, p: Array, dtype: DType) -> Array:
    ctx.require(lax.bitwise_and(lax.ge(p, full_like(p, 0)), lax.le(p, full_like(p, 1))), RuntimeError, _BERNOULLI)
    # ATen draws the numbers to compare with a half p in float32
    probability = convert(p, np.dtype(np.float64) if p.dtype == np.float64 else np.dtype(np.float32))
    return convert(lax.lt(_uniform(ctx, p.shape, probability.dtype), probability), dtype)


def _keep(ctx: Context, shape: Shape, probability: float) -> Array:
    """A mask that is True with a probability."""
    return lax.lt(_uniform(ctx, shape, np.dtype(np.float32)), np.float32(probability))


@lowers(aten.bernoulli.default)
def bernoulli(p: Array, ctx: Context) -> Array:
    return _bernoulli(ctx, p, np.dtype(p.dtype))


@lowers(aten.bernoulli.p)
def bernoulli_p(x: Array, p: float, ctx: Context) -> Array:
    refuse_unless(ctx, 0 <= p <= 1, RuntimeError, f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    return convert(_keep(ctx, x.shape, p), np.dtype(x.dtype))


@lowers(aten.bernoulli.Tensor)
def bernoulli_tensor(x: Array, p: Array, ctx: Context) -> Array:
    return _bernoulli(ctx, expand(p, x.shape), np.dtype(x.dtype))


@lowers(aten.native_dropout.default)
def native_dropout(x: Array, p: float, train: bool | None, ctx: Context) -> tuple[Array, Array]:
    """x with each element kept with probability 1 - p and then divided by it; and the mask of those kept, in bool."""
    if train is False:
        return x, lax.full(x.shape, True)
    if train is None and _is_view_of_input(ctx):
        # No UnsupportedOp: torch's kernel cannot stand in either, since what the outputs share was planned with that belief.
        raise LoweringError("native_dropout with train=None: PyTorch's tracing believes that it drops nothing", hint="pass train=True")
    mask = _keep(ctx, x.shape, 1 - p)
    return _masked_scale(x, mask, 0.0 if p == 1 else 1 / (1 - p)), mask


def _is_view_of_input(ctx: Context) -> bool:
    result, source = ctx.node.meta["val"][0], ctx.node.args[0]
    assert isinstance(source, torch.fx.Node)
    return bool(result.untyped_storage()._cdata == source.meta["val"].untyped_storage()._cdata)


def _masked_scale(x: Array, mask: Array, scale: float) -> Array:
    # A product, as ATen's, and no selection: a nan that is dropped stays nan.
    wide = convert(x, dtypes.accumulator(x.dtype))
    return convert(lax.mul(wide, lax.select(mask, full_like(wide, scale), full_like(wide, 0))), np.dtype(x.dtype))


@lowers(aten.native_dropout_backward.default)
def native_dropout_backward(grad: Array, mask: Array, scale: float) -> Array:
    return _masked_scale(convert(grad, result_type((grad, scale))), mask, scale)


@lowers(aten._fused_dropout.default)
def fused_dropout(x: Array, p: float, ctx: Context) -> tuple[Array, Array]:
    """As native_dropout, but p is the probability to keep, and the mask is uint8."""
    mask = _keep(ctx, x.shape, p)
    return _masked_scale(x, mask, 0.0 if p == 0 else 1 / p), convert(mask, np.dtype(np.uint8))


@lowers(aten.rrelu_with_noise_functional.default)
def rrelu_with_noise_functional(
    x: Array, noise: Array, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, *, ctx: Context
) -> tuple[Array, Array]:
    """Leaky ReLU with a random slope for each element, and the slopes (1 where x is positive or nan)."""
    if not training:
        positive = lax.gt(x, number(0, x.dtype))
        slope = number((lower + upper) / 2, x.dtype)
        return lax.select(positive, x, lax.mul(x, slope)), noise
    slopes = lax.select(lax.le(x, number(0, x.dtype)), _between(ctx, x.shape, np.dtype(x.dtype), lower, upper), full_like(x, 1))
    return lax.mul(x, slopes), slopes


@lowers(aten.rrelu_with_noise_backward.default)
def rrelu_with_noise_backward(grad: Array, x: Array, noise: Array, lower: float, upper: float, training: bool, is_result: bool) -> Array:
    if training and upper - lower > 1e-6:
        return lax.mul(grad, noise)
    return leaky_relu_backward(grad, x, (lower + upper) / 2, is_result)


# With the shape and dtype of a tensor


@lowers(aten.uniform.default)
def uniform(x: Array, low: float = 0, high: float = 1, *, ctx: Context) -> Array:
    refuse_unless(ctx, low <= high, RuntimeError, f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")
    return _half_open(ctx, x.shape, np.dtype(x.dtype), low, high)


def _scaled_normal(ctx: Context, shape: Shape, dtype: DType, mean: Any, std: Any) -> Array:
    if isinstance(std, jax.Array):
        ctx.require(lax.ge(std, full_like(std, 0)), RuntimeError, "normal expects all elements of std >= 0.0")
    else:
        refuse_unless(ctx, std >= 0, RuntimeError, f"normal expects std >= 0.0, but found std {std}")
    drawn = _normal(ctx, shape, dtype)
    scaled = lax.mul(drawn, expand(convert(std, np.dtype(drawn.dtype)), shape))
    return convert(lax.add(scaled, expand(convert(mean, np.dtype(drawn.dtype)), shape)), dtype)


@lowers(aten.normal_functional.default)
def normal_functional(x: Array, mean: float = 0, std: float = 1, *, ctx: Context) -> Array:
    """A number as mean is that of both parts of complex numbers."""
    return _scaled_normal(ctx, x.shape, np.dtype(x.dtype), _both_parts(mean, np.dtype(x.dtype)), std)


@lowers(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(mean: Any, std: Any = 1, *, ctx: Context) -> Array:
    return _scaled_normal(ctx, ctx.output.shape, ctx.output.jax_dtype, mean, std)


@lowers(aten.normal.float_float)
def normal_numbers(mean: float, std: float, size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    return normal(_both_parts(mean, ctx.output.jax_dtype), std, ctx=ctx)


@lowers(aten.exponential.default)
def exponential(x: Array, rate: float = 1, *, ctx: Context) -> Array:
    """Never 0, so that one may divide by it."""
    refuse_unless(ctx, rate > 0, RuntimeError, f"exponential_ expects lambda > 0.0, but found lambda={rate}")
    drawn = _standard_exponential(ctx, x.shape, np.dtype(x.dtype))
    return convert(lax.div(drawn, full_like(drawn, rate)), np.dtype(x.dtype))


def _standard_exponential(ctx: Context, shape: Shape, dtype: DType) -> Array:
    drawn = _uniform(ctx, shape, _computation(dtype))
    return lax.max(lax.neg(lax.log1p(lax.neg(drawn))), number(np.finfo(drawn.dtype).tiny, drawn.dtype))


@lowers(aten.geometric.default)
def geometric(x: Array, p: float, ctx: Context) -> Array:
    """The number of trials up to and with the first success."""
    if not 0 < p < 1:
        refuse_unless(ctx, False, RuntimeError, f"geometric_ expects p to be in (0, 1), but got p={p}")
        return x
    drawn = _standard_exponential(ctx, x.shape, np.dtype(x.dtype))
    return convert(lax.ceil(lax.div(drawn, full_like(drawn, -math.log1p(-p)))), np.dtype(x.dtype))


@lowers(aten.log_normal.default)
def log_normal(x: Array, mean: float = 1, std: float = 2, *, ctx: Context) -> Array:
    refuse_unless(ctx, std > 0, RuntimeError, f"log_normal_ expects std > 0.0, but found std={std}")
    wide = dtypes.accumulator(x.dtype)
    return convert(lax.exp(_scaled_normal(ctx, x.shape, wide, mean, std)), np.dtype(x.dtype))


@lowers(aten.cauchy.default)
def cauchy(x: Array, median: float = 0, sigma: float = 1, *, ctx: Context) -> Array:
    refuse_unless(ctx, sigma > 0, RuntimeError, f"cauchy_ expects sigma > 0.0, but found sigma={sigma}")
    drawn = _uniform(ctx, x.shape, dtypes.accumulator(x.dtype))
    angle = lax.mul(lax.sub(drawn, number(0.5, drawn.dtype)), number(math.pi, drawn.dtype))
    return convert(lax.add(lax.mul(lax.tan(angle), number(sigma, drawn.dtype)), number(median, drawn.dtype)), np.dtype(x.dtype))


@lowers(aten.poisson.default)
def poisson(rate: Array, ctx: Context) -> Array:
    ctx.require(lax.ge(rate, full_like(rate, 0)), RuntimeError, "invalid Poisson rate, expected rate to be non-negative")
    return convert(jax.random.poisson(ctx.key(), convert(rate, _computation(rate.dtype)), rate.shape, np.int64), np.dtype(rate.dtype))


@lowers(aten._standard_gamma.default)
def standard_gamma(concentration: Array, ctx: Context) -> Array:
    """At least the smallest number, also where the concentration is not positive."""
    wide = dtypes.accumulator(concentration.dtype)
    drawn = jax.random.gamma(ctx.key(), convert(concentration, wide), concentration.shape, wide)
    drawn = convert(drawn, np.dtype(concentration.dtype))
    smallest = full_like(drawn, float(jax.numpy.finfo(drawn.dtype).tiny))
    return lax.select(lax.gt(drawn, smallest), drawn, smallest)


@lowers(aten._sample_dirichlet.default)
def sample_dirichlet(concentration: Array, ctx: Context) -> Array:
    wide = dtypes.accumulator(concentration.dtype)
    drawn = jax.random.dirichlet(ctx.key(), convert(concentration, wide), concentration.shape[:-1], wide)
    return convert(drawn, np.dtype(concentration.dtype))


@lowers(aten.binomial.default)
def binomial(count: Array, p: Array, ctx: Context) -> Array:
    """Source: ATen native/Distributions.cpp, sample_binomial: none of no trials or at no chance, all at certainty."""
    wide = dtypes.accumulator(count.dtype)
    trials, chance = (expand(convert(x, wide), ctx.output.shape) for x in (count, p))
    zero, one = full_like(trials, 0), full_like(trials, 1)
    none = lax.bitwise_or(lax.le(trials, zero), lax.le(chance, zero))
    all_ = lax.ge(chance, one)
    drawn = jax.random.binomial(ctx.key(), lax.max(trials, zero), lax.clamp(zero, chance, one), trials.shape, wide)
    return convert(lax.select(none, zero, lax.select(all_, trials, drawn)), np.dtype(count.dtype))


@lowers(aten.multinomial.default)
def multinomial(weights: Array, count: int, replacement: bool = False, *, ctx: Context) -> Array:
    """Indices in the last dimension, drawn with probabilities proportional to the weights."""
    choices = weights.shape[-1]
    refuse_unless(ctx, dtypes.is_float(weights.dtype), RuntimeError, "multinomial only supports floating-point dtypes for input")
    if not replacement and count > choices:
        refuse_unless(ctx, False, RuntimeError, "cannot sample n_sample > prob_dist.size(-1) samples without replacement")
        return lax.full(ctx.output.shape, 0, np.int64)
    wide = convert(weights, np.dtype(np.float64))
    valid = lax.bitwise_and(lax.ge(wide, full_like(wide, 0)), lax.is_finite(wide))
    ctx.require(valid, RuntimeError, "probability tensor contains either `inf`, `nan` or element < 0")
    sums = lax.reduce_sum(wide, (weights.ndim - 1,))
    ctx.require(lax.gt(sums, full_like(sums, 0)), RuntimeError, "invalid multinomial distribution (sum of probabilities <= 0)")
    if not replacement:
        # The largest of weight / exponential is a draw; the next largest is one among the rest.
        ratio = lax.div(wide, _standard_exponential(ctx, weights.shape, np.dtype(np.float64)))
        return convert(lax.top_k(ratio, count)[1], np.dtype(np.int64))
    cumulative = running_sum(wide, weights.ndim - 1)
    total = lax.slice_in_dim(cumulative, choices - 1, choices, axis=weights.ndim - 1)
    # float32's numbers times a float64 total stay below it, so that no index lies past the last weight.
    drawn = convert(_uniform(ctx, (*weights.shape[:-1], count), np.dtype(np.float32)), np.dtype(np.float64))
    search = lambda row, values: jax.numpy.searchsorted(row, values, side="right")  # noqa: E731
    for _ in range(weights.ndim - 1):
        search = jax.vmap(search)
    return convert(search(cumulative, lax.mul(drawn, expand(total, drawn.shape))), np.dtype(np.int64))
