"""Lowerings of random integers: integers of a range, permutations, counting distributions and multinomial choices.

All draws are in float64 or in integers, as in ATen's kernels: float32's 24 random bits would leave gaps.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dtypes import DType
from ..metadata import TensorSpec
from ..promotion import convert, expand, full_like, number
from ..registry import lowers
from .bounds import require_static
from .float_bits import nextafter
from .random import MANTISSA_BITS, Shape, standard_exponential, uniform_numbers, uniform_with_key
from .scans import running_sum

_FLOAT64 = np.dtype(np.float64)


def _integers(ctx: Context, low: int, high: int) -> Array:
    """Returns integers from [low, high), with the shape and dtype of the current node's result.

    Source: ATen native/DistributionTemplates.h, random_from_to_impl
    """
    dtype = ctx.output.jax_dtype
    message = "random_ expects 'from' to be less than 'to', but got from={} >= to={}"
    if low < high and dtypes.is_float(dtype):
        message = message.replace("'from'", "'from' casted to dtype").replace("'to'", "'to' casted to dtype")
        low, high = _representable(low, high, dtype)
    return _integers_from_to(ctx, low, high - 1, message.format(low, high))


def _integers_from_to(ctx: Context, low: int, last: int, message: str) -> Array:
    """Returns integers from low to last, both included, with the shape and dtype of the current node's result.

    The call raises RuntimeError for an empty range (with `message`), and if a bound is out of range for the dtype.
    """
    spec: TensorSpec = ctx.output
    dtype = spec.jax_dtype
    require_static(ctx, low <= last, RuntimeError, message)
    limits = _integer_limits(dtype)
    in_limits = [limits[0] <= value <= limits[1] for value in (low, last)]
    for name, within in zip(("from", "to - 1"), in_limits, strict=True):
        require_static(ctx, within, RuntimeError, f"{name} is out of bounds for {_C_NAMES[dtype]}")
    if low > last or not all(in_limits):
        return lax.full(spec.shape, 0, dtype)
    offset = np.int64(low)
    return convert(lax.add(lax.convert_element_type(integers_below(ctx, spec.shape, last - low + 1), np.int64), offset), dtype)


def integers_below(ctx: Context, shape: Shape, count: int | Array) -> Array:
    """Returns integers from [0, count), uniformly distributed; count is at most 2**64.

    The relative error of each probability is at most 2**-16, and far smaller if count is above 2**16. An array of counts is converted to
    uint64.

    Dtype:  uint64.
    """
    if not isinstance(count, int):
        return _scaled_fraction(_random_words(ctx, shape), _random_words(ctx, shape), expand(convert(count, np.dtype(np.uint64)), shape))
    if count > 1 << 32:
        if count & (count - 1) == 0:
            return lax.shift_right_logical(_random_words(ctx, shape), np.uint64(65 - count.bit_length()))
        return _scaled_fraction(_random_words(ctx, shape), _random_words(ctx, shape), lax.full(shape, np.uint64(count)))
    # The result is the integer part of count times a random fraction of 32 or 64 bits.
    factor, shift = np.uint64(count), np.uint64(32)
    if count <= 1 << 16 or count & (count - 1) == 0:
        bits = lax.convert_element_type(jax.random.bits(ctx.key(), shape, np.uint32), np.uint64)
        return lax.shift_right_logical(lax.mul(bits, factor), shift)
    high, low = (lax.convert_element_type(jax.random.bits(ctx.key(), shape, np.uint32), np.uint64) for _ in range(2))
    carry = lax.shift_right_logical(lax.mul(low, factor), shift)
    return lax.shift_right_logical(lax.add(lax.mul(high, factor), carry), shift)


def _random_words(ctx: Context, shape: Shape) -> Array:
    return jax.random.bits(ctx.key(), shape, np.uint64)


def _scaled_fraction(high: Array, low: Array, factor: Array) -> Array:
    """Returns the integer part of `factor` times a fraction of 128 bits: (high * 2**64 + low) / 2**128.

    Dtype:  uint64, as all operands.
    """
    upper, lower, carry = _upper_64(high, factor), lax.mul(high, factor), _upper_64(low, factor)
    total = lax.add(lower, carry)
    return lax.add(upper, lax.convert_element_type(lax.lt(total, carry), np.uint64))


def _upper_64(x: Array, y: Array) -> Array:
    """Returns the upper 64 bits of the product of two uint64 numbers, computed from the products of their 32-bit halves."""
    shift, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    (x_high, x_low), (y_high, y_low) = ((lax.shift_right_logical(value, shift), lax.bitwise_and(value, mask)) for value in (x, y))
    cross_products = lax.mul(x_high, y_low), lax.mul(x_low, y_high)
    middle = lax.shift_right_logical(lax.mul(x_low, y_low), shift)
    upper = lax.mul(x_high, y_high)
    for product in cross_products:
        middle = lax.add(middle, lax.bitwise_and(product, mask))
        upper = lax.add(upper, lax.shift_right_logical(product, shift))
    return lax.add(upper, lax.shift_right_logical(middle, shift))


# The names of dtypes in ATen's messages.
_C_NAMES = {
    dtypes.to_jax(dtype): name
    for dtype, name in {
        torch.bool: "bool", torch.uint8: "unsigned char", torch.int8: "signed char", torch.int16: "short int", torch.int32: "int",
        torch.int64: "long int", torch.uint16: "short unsigned int", torch.uint32: "unsigned int", torch.uint64: "long unsigned int",
        torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.float32: "float", torch.float64: "double",
    }.items()
}  # fmt: skip


def _integer_limits(dtype: DType) -> tuple[float, float]:
    """Returns the smallest and the largest integer that random_ may draw for a dtype."""
    if dtypes.is_bool(dtype):
        return 0, 1
    if dtypes.is_integer(dtype):
        return int(np.iinfo(dtype).min), min(int(np.iinfo(dtype).max), 2**63 - 1)
    return float(jax.numpy.finfo(dtype).min), float(jax.numpy.finfo(dtype).max)


def _representable(low: int, high: int, dtype: DType) -> tuple[int, int]:
    """Returns bounds, moved inwards, such that integers from [low, high) stay between the given bounds when they are converted to `dtype`.

    Source: ATen native/DistributionTemplates.h, update_from and update_to
    """
    mantissa_bits = MANTISSA_BITS[dtype]

    def step(value: int) -> int:
        return 1 << (abs(value).bit_length() - mantissa_bits)

    def rounded(value: int) -> int:
        """Returns the value cast to the dtype and back, as x86 does it."""
        cast = float(number(value, dtype))
        return int(cast) if abs(cast) < 2.0**63 else -(2**63)

    first, last = rounded(low + 1), rounded(high - 1)
    if first < low and abs(low + 1).bit_length() >= mantissa_bits:
        low = first + step(low + 1)
    if last >= high and abs(high - 1).bit_length() >= mantissa_bits:
        high = last - step(high - 1)
    return low, high


@lowers(aten.randint.default, aten.randint.generator)
def randint(high: int, size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Integers from [0, high).

    Shape:  `size`.
    Dtype:  `dtype` if given, else int64.
    """
    return _integers(ctx, 0, high)


@lowers(aten.randint.low, aten.randint.low_generator)
def randint_low(low: int, high: int, size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Integers from [low, high).

    Shape:  `size`.
    Dtype:  `dtype` if given, else int64.
    """
    return _integers(ctx, low, high)


@lowers(aten.randint_like.default, aten.randint_like.generator)
def randint_like(x: Array, high: int, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Integers from [0, high).

    Shape:  that of x.
    Dtype:  `dtype` if given, else that of x.
    """
    return _integers(ctx, 0, high)


@lowers(aten.randint_like.Tensor, aten.randint_like.Tensor_generator)
def randint_like_tensor(x: Array, high: Array, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Integers from [0, high). `high` is known at run time only, and is checked against the result's dtype then.

    Shape:  that of x.
    Dtype:  `dtype` if given, else that of x.
    """
    spec: TensorSpec = ctx.output
    wide = convert(high, np.dtype(np.int64))
    ctx.require(lax.gt(wide, full_like(wide, 0)), RuntimeError, "random_ expects 'from' to be less than 'to'")
    last = _integer_limits(spec.jax_dtype)[1]
    if last < 2**63 - 1:
        message = f"to - 1 is out of bounds for {_C_NAMES[spec.jax_dtype]}"
        ctx.require(lax.le(wide, full_like(wide, int(last) + 1)), RuntimeError, message)
    return convert(lax.convert_element_type(integers_below(ctx, spec.shape, wide), np.int64), spec.jax_dtype)


@lowers(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def randint_like_low(x: Array, low: int, high: int, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Integers from [low, high).

    Shape:  that of x.
    Dtype:  `dtype` if given, else that of x.
    """
    return _integers(ctx, low, high)


def _largest_default(dtype: DType) -> int:
    """Returns the largest integer that random_ draws by default: for floats, the largest n such that all integers up to n are exact."""
    return 2 ** MANTISSA_BITS[dtype] if dtypes.is_float(dtype) else int(_integer_limits(dtype)[1])


@lowers(aten.random.default)
def random(x: Array, ctx: Context) -> Array:
    """Integers from 0 to the largest of the dtype, included. For floats, this is the largest n such that all integers up to n are exact.

    Shape:  that of x.
    Dtype:  that of x.
    Source: ATen core/TransformationHelper.h, uniform_int
    """
    return _integers_from_to(ctx, 0, _largest_default(ctx.output.jax_dtype), "")


@lowers(aten.random.to)
def random_to(x: Array, high: int, ctx: Context) -> Array:
    """Integers from [0, high).

    Shape:  that of x.
    Dtype:  that of x.
    """
    return _integers(ctx, 0, high)


@lowers(getattr(aten.random, "from"))
def random_from(x: Array, low: int, high: int | None, ctx: Context) -> Array:
    """Integers from [low, high), or without `high` from low to the largest integer that `random` draws.

    Shape:  that of x.
    Dtype:  that of x.
    """
    dtype = ctx.output.jax_dtype
    if high is not None:
        return _integers(ctx, low, high)
    if low == -(2**63):
        is_supported = dtype in (np.int64, np.float32, np.float64, dtypes.to_jax(torch.bfloat16))
        require_static(
            ctx, is_supported, RuntimeError, "random_full_64_bits_range_kernel_cpu handles only int64, double, float and bfloat16"
        )
        return convert(lax.convert_element_type(integers_below(ctx, x.shape, 2**64), np.int64), dtype)
    last = _largest_default(dtype)
    if dtypes.is_float(dtype):
        low, _ = _representable(low, last, dtype)
    return _integers_from_to(
        ctx, low, last, f"random_ expects 'from' casted to dtype to be less than or equal to 'to_inc', got {low} > {last}"
    )


@lowers(aten.randperm.default, aten.randperm.generator)
def randperm(n: int, *, dtype: DType | None = None, ctx: Context) -> Array:
    """The integers from [0, n) in random order.

    Shape:  [n].
    Dtype:  `dtype` if given, else int64.
    """
    dtype = ctx.output.jax_dtype
    name = dtypes.to_torch(dtype)
    if n - 1 > _integer_limits(dtype)[1]:
        require_static(ctx, False, RuntimeError, f"value cannot be converted to type {dtype.name}_t without overflow")
    elif name in _PERMUTATION_LIMITS:
        largest, text = _PERMUTATION_LIMITS[name]
        require_static(ctx, n <= largest, RuntimeError, f"n cannot be greater than {text} type.")
    return convert(jax.random.permutation(ctx.key(), lax.iota(np.int64, n)), dtype)


# Source: ATen native/TensorFactories.h, check_supported_max_int_with_precision
_PERMUTATION_LIMITS = {
    torch.float16: (2**11 + 1, "2049 for Half"),
    torch.float32: (2**24 + 1, "2^24+1 for Float"),
    torch.float64: (2**53 + 1, "2^53+1 for Double"),
}


# Counting distributions and multinomial choices


@lowers(aten.geometric.default)
def geometric(x: Array, p: float, ctx: Context) -> Array:
    """The number of trials up to and including the first success.

    Shape:  that of x.
    Dtype:  that of x.
    """
    if not 0 < p < 1:
        require_static(ctx, False, RuntimeError, f"geometric_ expects p to be in (0, 1), but got p={p}")
        return x
    # In float64, as in ATen: for small p the numbers are large, and float32's random bits would leave gaps between them.
    drawn = standard_exponential(ctx, x.shape, _FLOAT64)
    return convert(lax.ceil(lax.div(drawn, full_like(drawn, -math.log1p(-p)))), np.dtype(x.dtype))


@lowers(aten.poisson.default)
def poisson(rate: Array, ctx: Context) -> Array:
    """Poisson-distributed numbers, drawn in float64.

    Shape:  that of the rate.
    Dtype:  that of the rate.
    Raises: RuntimeError at run time, for a negative rate.
    """
    valid = lax.ge(rate, full_like(rate, 0))
    ctx.require(valid, RuntimeError, "invalid Poisson rate, expected rate to be non-negative")
    wide = convert(rate, _FLOAT64)
    wide = lax.select(valid, wide, full_like(wide, 0))  # with a rate of nan, rejection sampling would never end
    is_small = lax.lt(wide, full_like(wide, _SMALL_RATE))
    by_inversion = _poisson_by_inversion(ctx, lax.select(is_small, wide, full_like(wide, 0)))
    by_rejection = _poisson_by_rejection(ctx, lax.clamp(_SMALL_RATE, wide, _LARGE_RATE))
    drawn = lax.select(is_small, by_inversion, by_rejection)
    # For rates above _LARGE_RATE, the draw is the rate itself. The cast to int64 below then determines the value.
    drawn = lax.select(lax.gt(wide, full_like(wide, _LARGE_RATE)), wide, drawn)
    return convert(convert(drawn, np.dtype(np.int64)), np.dtype(rate.dtype))


# Rejection sampling needs a rate of at least _SMALL_RATE. With rates above _LARGE_RATE, the numbers come close to the limit of int64.
_SMALL_RATE, _LARGE_RATE = np.float64(10), np.float64(2.0**62)


def _poisson_by_inversion(ctx: Context, rate: Array) -> Array:
    """Returns Poisson-distributed numbers by inversion: the first k whose cumulative probability is above a uniform number."""
    drawn = uniform_numbers(ctx, rate.shape, _FLOAT64)

    def unfinished(state: tuple[Array, Array, Array, Array]) -> Array:
        count, _, cumulative, _ = state
        return lax.bitwise_and(lax.lt(count, np.float64(_MAX_INVERSION_STEPS)), _any(lax.le(cumulative, drawn)))

    def step(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        count, probability, cumulative, result = state
        is_done = lax.gt(cumulative, drawn)
        count = lax.add(count, np.float64(1))
        probability = lax.mul(probability, lax.div(rate, count))
        return count, probability, lax.add(cumulative, probability), lax.select(is_done, result, lax.add(result, full_like(result, 1)))

    first = lax.exp(lax.neg(rate))
    return lax.while_loop(unfinished, step, (np.float64(0), first, first, full_like(rate, 0)))[3]


# The loop ends after this many steps if the sum of probabilities, which is rounded, never exceeds the largest uniform numbers. With a rate
# of 10, the numbers above the limit have a total probability of 1e-27.
_MAX_INVERSION_STEPS = 60


def _poisson_by_rejection(ctx: Context, rate: Array) -> Array:
    """Returns Poisson-distributed numbers for large rates.

    Source: W. Hoermann, The transformed rejection method for generating Poisson random variables (1993), PTRS; as ATen
    native/Distributions.h, sample_poisson
    """
    log_rate = lax.log(rate)
    b = 0.931 + 2.53 * lax.sqrt(rate)
    a = -0.059 + 0.02483 * b
    log_inverse_alpha = lax.log(1.1239 + 1.1328 / (b - 3.4))
    v_r = 0.9277 - 3.6224 / (b - 2)

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        key, result, accepted = state
        key, first, second = jax.random.split(key, 3)
        u, v = (uniform_with_key(item, rate.shape, _FLOAT64) for item in (first, second))
        u = u - 0.5
        distance = 0.5 - lax.abs(u)
        count = lax.floor((2 * a / distance + b) * u + rate + 0.43)
        accepted_at_once = (distance >= 0.07) & (v <= v_r)
        rejected = (count < 0) | ((distance < 0.013) & (v > distance))
        score = lax.log(v) + log_inverse_alpha - lax.log(a / (distance * distance) + b)
        accepted_now = accepted_at_once | (~rejected & (score <= count * log_rate - rate - lax.lgamma(count + 1)))
        return key, lax.select(accepted_now & ~accepted, count, result), accepted | accepted_now

    start = (ctx.key(), full_like(rate, 0), lax.full(rate.shape, False))
    return lax.while_loop(lambda state: _any(~state[2]), step, start)[1]


def _any(mask: Array) -> Array:
    return lax.reduce_or(mask, range(mask.ndim))


@lowers(aten.binomial.default)
def binomial(count: Array, p: Array, ctx: Context) -> Array:
    """The number of successes in `count` trials: 0 if count or p is 0 or less, `count` if p is 1 or more.

    Shape:  count and p, broadcast.
    Dtype:  that of the count.
    Source: ATen native/Distributions.cpp, sample_binomial
    """
    trials, probability = (expand(convert(x, _FLOAT64), ctx.output.shape) for x in (count, p))
    zero, one = full_like(trials, 0), full_like(trials, 1)
    is_zero = lax.bitwise_or(lax.le(trials, zero), lax.le(probability, zero))
    is_count = lax.ge(probability, one)
    drawn = jax.random.binomial(ctx.key(), lax.max(trials, zero), lax.clamp(zero, probability, one), trials.shape, _FLOAT64)
    return convert(lax.select(is_zero, zero, lax.select(is_count, trials, drawn)), np.dtype(count.dtype))


@lowers(aten.multinomial.default)
def multinomial(weights: Array, count: int, replacement: bool = False, *, ctx: Context) -> Array:
    """Indices in the last dimension, drawn with probabilities proportional to the weights.

    Shape:  weights (*batch, choices) give (*batch, count).
    Dtype:  int64.
    Raises: RuntimeError when the program runs, for weights that are negative, infinite or nan, and for weights without a positive sum.
    """
    choices = weights.shape[-1]
    require_static(ctx, dtypes.is_float(weights.dtype), RuntimeError, "multinomial only supports floating-point dtypes for input")
    if not replacement and count > choices:
        require_static(ctx, False, RuntimeError, "cannot sample n_sample > prob_dist.size(-1) samples without replacement")
        return lax.full(ctx.output.shape, 0, np.int64)
    wide = convert(weights, _FLOAT64)
    is_valid = lax.bitwise_and(lax.ge(wide, full_like(wide, 0)), lax.is_finite(wide))
    ctx.require(is_valid, RuntimeError, "probability tensor contains either `inf`, `nan` or element < 0")
    sums = lax.reduce_sum(wide, (weights.ndim - 1,))
    ctx.require(lax.gt(sums, full_like(sums, 0)), RuntimeError, "invalid multinomial distribution (sum of probabilities <= 0)")
    if not replacement:
        # The index of the largest weight / exponential is the first draw. The index of the next largest is a draw from the rest.
        ratio = lax.div(wide, standard_exponential(ctx, weights.shape, _FLOAT64))
        return convert(lax.top_k(ratio, count)[1], np.dtype(np.int64))
    cumulative = running_sum(wide, weights.ndim - 1)
    total = lax.slice_in_dim(cumulative, choices - 1, choices, axis=weights.ndim - 1)
    drawn = uniform_numbers(ctx, (*weights.shape[:-1], count), _FLOAT64)
    search = functools.partial(jax.numpy.searchsorted, side="right")
    for _ in range(weights.ndim - 1):
        search = jax.vmap(search)
    # drawn * total may round up to the total, for which the search would return an index after the last nonzero weight.
    largest = expand(nextafter(total, full_like(total, 0)), drawn.shape)
    return convert(search(cumulative, lax.min(lax.mul(drawn, expand(total, drawn.shape)), largest)), np.dtype(np.int64))
