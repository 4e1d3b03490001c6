"""Lowerings of ATen's random distributions. The numbers come from XLA's generator, with keys from the context.

The numbers differ from those of eager mode, but `torch.manual_seed` determines them: the context's key is drawn from torch's default
generator.
"""

from __future__ import annotations

import fractions
import math
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax

from ...errors import LoweringError, UnsupportedOp
from ...runtime import private
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dtypes import DType
from ..promotion import convert, expand, full_like, number, result_type, to_accumulator
from ..registry import lowers
from .activations import leaky_relu_backward
from .bounds import require_static

Shape = tuple[int, ...]

# The number of significant bits of each float dtype, which is the number of random bits in a uniform number.
# Source: ATen core/TransformationHelper.h, uniform_real
MANTISSA_BITS = {np.dtype(np.float32): 24, np.dtype(np.float64): 53, np.dtype(np.float16): 11, dtypes.to_jax(torch.bfloat16): 8}


def uniform_numbers(ctx: Context, shape: Shape, dtype: DType) -> Array:
    """Uniform numbers from [0, 1). For complex dtypes, both parts are drawn.

    Dtype:  `dtype`: float32, float64, complex64 or complex128.
    """
    if dtypes.is_complex(dtype):
        return lax.complex(uniform_numbers(ctx, shape, dtypes.real(dtype)), uniform_numbers(ctx, shape, dtypes.real(dtype)))
    return uniform_with_key(ctx.key(), shape, dtype)


def uniform_with_key(key: Array, shape: Shape, dtype: DType) -> Array:
    """Uniform numbers from [0, 1) for a given key. `dtype` must be a float dtype of `MANTISSA_BITS`."""
    bits_dtype = np.dtype(np.uint64 if dtype.itemsize == 8 else np.uint32)
    mantissa_bits = MANTISSA_BITS[dtype]
    bits = lax.shift_right_logical(jax.random.bits(key, shape, bits_dtype), number(bits_dtype.itemsize * 8 - mantissa_bits, bits_dtype))
    return lax.mul(lax.convert_element_type(bits, dtype), number(2.0**-mantissa_bits, dtype))


def _uniform_between(ctx: Context, shape: Shape, dtype: DType, low: float, high: float) -> Array:
    """Uniform numbers between low and high, in both parts for complex dtypes. Rounding to a half type may give `high` itself."""
    drawn = uniform_numbers(ctx, shape, dtypes.accumulator(dtype))
    return convert(lax.add(lax.mul(drawn, number(high - low, drawn.dtype)), _in_both_parts(low, drawn.dtype)), dtype)


def _in_both_parts(value: float, dtype: DType) -> Any:
    """Returns the value as a number of `dtype`; for a complex dtype, with the value as the real and the imaginary part."""
    return number(complex(value, value) if dtypes.is_complex(dtype) else value, dtype)


def _normal(ctx: Context, shape: Shape, dtype: DType) -> Array:
    """Standard normal numbers in the accumulator of `dtype`. Complex numbers have a total variance of 1."""
    return jax.random.normal(ctx.key(), shape, dtypes.accumulator(dtype))


def _drawn_dtype(dtype: DType) -> DType:
    """Returns the float dtype in which to draw for a result of `dtype`, which may be an integer dtype."""
    return dtypes.accumulator(dtype) if dtypes.is_inexact(dtype) else np.dtype(np.float32)


# Distributions with a given size


def _uniform_half_open(ctx: Context, shape: Shape, dtype: DType, low: float, high: float) -> Array:
    """Like `_uniform_between`, but never returns `high`: numbers that round to `high` become `low`, as in ATen."""
    drawn = _uniform_between(ctx, shape, dtype, low, high)
    is_high = lax.eq(drawn, _in_both_parts(high, dtype))
    return lax.select(is_high, lax.full(shape, _in_both_parts(low, dtype)), drawn)


@lowers(aten.rand.default, aten.rand.generator)
def rand(size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Uniform numbers from [0, 1), in both parts for complex dtypes.

    Dtype:  `dtype` if given, else the default float.
    """
    return _uniform_half_open(ctx, ctx.output.shape, ctx.output.jax_dtype, 0, 1)


@lowers(aten.rand_like.default, aten.rand_like.generator)
def rand_like(x: Array, *, dtype: DType | None = None, ctx: Context) -> Array:
    """As `rand`.

    Shape:  that of x.
    Dtype:  `dtype` if given, else that of x.
    """
    return rand(x.shape, ctx=ctx)


@lowers(aten.randn.default, aten.randn.generator)
def randn(size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Standard normal numbers. Complex numbers have a total variance of 1.

    Dtype:  `dtype` if given, else the default float.
    """
    return convert(_normal(ctx, ctx.output.shape, ctx.output.jax_dtype), ctx.output.jax_dtype)


@lowers(aten.randn_like.default, aten.randn_like.generator)
def randn_like(x: Array, *, dtype: DType | None = None, ctx: Context) -> Array:
    """As `randn`.

    Shape:  that of x.
    Dtype:  `dtype` if given, else that of x.
    """
    return randn(x.shape, ctx=ctx)


# Bernoulli and dropout


_BERNOULLI_MESSAGE = "Expected p_in >= 0 && p_in <= 1 to be true, but got false."


def _bernoulli(ctx: Context, p: Array, dtype: DType) -> Array:
    ctx.require(lax.bitwise_and(lax.ge(p, full_like(p, 0)), lax.le(p, full_like(p, 1))), RuntimeError, _BERNOULLI_MESSAGE)
    # For a half type, ATen draws the random numbers in float32.
    probability = convert(p, np.dtype(np.float64) if p.dtype == np.float64 else np.dtype(np.float32))
    return convert(lax.lt(uniform_numbers(ctx, p.shape, probability.dtype), probability), dtype)


def _dropout_mask(ctx: Context, shape: Shape, probability: float) -> Array:
    """Returns a mask whose elements are True with this probability, up to a relative error of 2**-16."""
    if not 0 < probability < 1:
        return lax.full(shape, probability >= 1)
    bits_dtype = np.uint32 if 2.0**-16 < probability < 1 - 2.0**-16 else np.uint64
    limit = round(fractions.Fraction(probability) * 2 ** np.iinfo(bits_dtype).bits)
    return lax.lt(jax.random.bits(ctx.key(), shape, bits_dtype), bits_dtype(min(limit, np.iinfo(bits_dtype).max)))


@lowers(aten.bernoulli.default)
def bernoulli(p: Array, ctx: Context) -> Array:
    """1 with the probability in the same element of p, else 0.

    Shape:  that of p.
    Dtype:  that of p.
    """
    return _bernoulli(ctx, p, np.dtype(p.dtype))


@lowers(aten.bernoulli.p)
def bernoulli_p(x: Array, p: float, ctx: Context) -> Array:
    """1 with probability p, else 0.

    Shape:  that of x.
    Dtype:  that of x.
    """
    require_static(ctx, 0 <= p <= 1, RuntimeError, f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    return convert(_dropout_mask(ctx, x.shape, p), np.dtype(x.dtype))


@lowers(aten.bernoulli.Tensor)
def bernoulli_tensor(x: Array, p: Array, ctx: Context) -> Array:
    """1 with the probability in the same element of p, else 0.

    Shape:  that of x, to which p is broadcast.
    Dtype:  that of x.
    """
    return _bernoulli(ctx, expand(p, x.shape), np.dtype(x.dtype))


@lowers(aten.native_dropout.default)
def native_dropout(x: Array, p: float, train: bool | None, ctx: Context) -> tuple[Array, Array]:
    """Keeps each element of x with probability 1 - p and divides it by 1 - p; also returns the mask of kept elements.

    Shape:  both: that of x.
    Dtype:  that of x; bool.
    """
    if train is False:
        return x, lax.full(x.shape, True)
    if train is None and _is_view_of_input(ctx):
        # An UnsupportedOp would call torch's kernel. But the aliases of outputs are already planned for an op that returns its input.
        raise LoweringError("native_dropout with train=None: PyTorch traces it as if it dropped nothing", hint="pass train=True")
    if not 0 <= p <= 1:
        raise UnsupportedOp(f"torch's kernel refuses a probability of {p}")
    mask = _dropout_mask(ctx, x.shape, 1 - p)
    return _masked_scale(x, mask, 0.0 if p == 1 else 1 / (1 - p)), mask


def _is_view_of_input(ctx: Context) -> bool:
    result, source = ctx.node.meta["val"][0], ctx.node.args[0]
    assert isinstance(source, torch.fx.Node)
    return bool(private.storage_id(result) == private.storage_id(source.meta["val"]))


def _masked_scale(x: Array, mask: Array, scale: float) -> Array:
    # A product as in ATen, not a select: a dropped nan stays nan.
    wide = to_accumulator(x)
    return convert(lax.mul(wide, lax.select(mask, full_like(wide, scale), full_like(wide, 0))), np.dtype(x.dtype))


@lowers(aten.native_dropout_backward.default)
def native_dropout_backward(grad: Array, mask: Array, scale: float) -> Array:
    """grad * mask * scale.

    Shape:  that of grad.
    Dtype:  that of grad; the default float for bool and integers.
    """
    return _masked_scale(convert(grad, result_type((grad, scale))), mask, scale)


@lowers(aten._fused_dropout.default)
def fused_dropout(x: Array, p: float, ctx: Context) -> tuple[Array, Array]:
    """As native_dropout, but p is the probability of keeping an element.

    Shape:  both: that of x.
    Dtype:  that of x; uint8.
    """
    mask = _dropout_mask(ctx, x.shape, p)
    return _masked_scale(x, mask, 0.0 if p == 0 else 1 / p), convert(mask, np.dtype(np.uint8))


@lowers(aten.rrelu_with_noise_functional.default)
def rrelu_with_noise_functional(
    x: Array, noise: Array, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, *, ctx: Context
) -> tuple[Array, Array]:
    """Leaky ReLU with a random slope for each element; also returns the slopes (1 where x is positive or nan).

    Without `training` the slope is (lower + upper) / 2, and the second result is `noise`.

    Shape:  both: that of x.
    Dtype:  both: that of x.
    """
    if not training:
        positive = lax.gt(x, number(0, x.dtype))
        slope = number((lower + upper) / 2, x.dtype)
        return lax.select(positive, x, lax.mul(x, slope)), noise
    slopes = lax.select(lax.le(x, number(0, x.dtype)), _uniform_between(ctx, x.shape, np.dtype(x.dtype), lower, upper), full_like(x, 1))
    return lax.mul(x, slopes), slopes


@lowers(aten.rrelu_with_noise_backward.default)
def rrelu_with_noise_backward(grad: Array, x: Array, noise: Array, lower: float, upper: float, training: bool, is_result: bool) -> Array:
    """The gradient of x: grad times the slopes. In training, `noise` holds the slopes.

    Without training, and as in ATen if lower and upper are almost equal, negative elements of x have the slope (lower + upper) / 2.

    Shape:  that of x.
    """
    if training and upper - lower > 1e-6:
        return lax.mul(grad, noise)
    return leaky_relu_backward(grad, x, (lower + upper) / 2, is_result)


# Distributions with the shape and dtype of a tensor


@lowers(aten.uniform.default)
def uniform(x: Array, low: float = 0, high: float = 1, *, ctx: Context) -> Array:
    """Uniform numbers from [low, high), in both parts for complex dtypes.

    Shape:  that of x.
    Dtype:  that of x.
    """
    require_static(ctx, low <= high, RuntimeError, f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")
    return _uniform_half_open(ctx, x.shape, np.dtype(x.dtype), low, high)


def _scaled_normal(ctx: Context, shape: Shape, dtype: DType, mean: Any, std: Any) -> Array:
    if isinstance(std, jax.Array):
        ctx.require(lax.ge(std, full_like(std, 0)), RuntimeError, "normal expects all elements of std >= 0.0")
    else:
        require_static(ctx, std >= 0, RuntimeError, f"normal expects std >= 0.0, but found std {std}")
    drawn = _normal(ctx, shape, dtype)
    scaled = lax.mul(drawn, expand(convert(std, np.dtype(drawn.dtype)), shape))
    return convert(lax.add(scaled, expand(convert(mean, np.dtype(drawn.dtype)), shape)), dtype)


@lowers(aten.normal_functional.default)
def normal_functional(x: Array, mean: float = 0, std: float = 1, *, ctx: Context) -> Array:
    """Normal numbers. For complex dtypes, `mean` is the mean of both parts.

    Shape:  that of x.
    Dtype:  that of x.
    """
    return _scaled_normal(ctx, x.shape, np.dtype(x.dtype), _in_both_parts(mean, np.dtype(x.dtype)), std)


@lowers(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(mean: Any, std: Any = 1, *, ctx: Context) -> Array:
    """Normal numbers with elementwise means and standard deviations.

    Shape:  mean and std, broadcast.
    Raises: RuntimeError at run time, for a negative standard deviation.
    """
    return _scaled_normal(ctx, ctx.output.shape, ctx.output.jax_dtype, mean, std)


@lowers(aten.normal.float_float)
def normal_numbers(mean: float, std: float, size: Any, *, dtype: DType | None = None, ctx: Context) -> Array:
    """Normal numbers with one mean and one standard deviation.

    Shape:  `size`.
    Dtype:  `dtype` if given, else the default float.
    """
    return normal(_in_both_parts(mean, ctx.output.jax_dtype), std, ctx=ctx)


@lowers(aten.exponential.default)
def exponential(x: Array, rate: float = 1, *, ctx: Context) -> Array:
    """Exponentially distributed numbers, which are never 0, so that callers may divide by them.

    Shape:  that of x.
    Dtype:  that of x.
    """
    require_static(ctx, rate > 0, RuntimeError, f"exponential_ expects lambda > 0.0, but found lambda={rate}")
    drawn = standard_exponential(ctx, x.shape, np.dtype(x.dtype))
    return convert(lax.div(drawn, full_like(drawn, rate)), np.dtype(x.dtype))


def standard_exponential(ctx: Context, shape: Shape, dtype: DType) -> Array:
    """Exponentially distributed numbers with rate 1, at least the smallest positive normal number of their dtype.

    Dtype:  the dtype in which a result of `dtype` is computed: a float of 32 bits or more.
    """
    drawn = uniform_numbers(ctx, shape, _drawn_dtype(dtype))
    return lax.max(lax.neg(lax.log1p(lax.neg(drawn))), number(np.finfo(drawn.dtype).tiny, drawn.dtype))


@lowers(aten.log_normal.default)
def log_normal(x: Array, mean: float = 1, std: float = 2, *, ctx: Context) -> Array:
    """The exponential of normal numbers.

    Shape:  that of x.
    Dtype:  that of x.
    """
    require_static(ctx, std > 0, RuntimeError, f"log_normal_ expects std > 0.0, but found std={std}")
    wide = dtypes.accumulator(x.dtype)
    return convert(lax.exp(_scaled_normal(ctx, x.shape, wide, mean, std)), np.dtype(x.dtype))


@lowers(aten.cauchy.default)
def cauchy(x: Array, median: float = 0, sigma: float = 1, *, ctx: Context) -> Array:
    """Cauchy-distributed numbers.

    Shape:  that of x.
    Dtype:  that of x.
    """
    require_static(ctx, sigma > 0, RuntimeError, f"cauchy_ expects sigma > 0.0, but found sigma={sigma}")
    drawn = uniform_numbers(ctx, x.shape, dtypes.accumulator(x.dtype))
    angle = lax.mul(lax.sub(drawn, number(0.5, drawn.dtype)), number(math.pi, drawn.dtype))
    return convert(lax.add(lax.mul(lax.tan(angle), number(sigma, drawn.dtype)), number(median, drawn.dtype)), np.dtype(x.dtype))


@lowers(aten._standard_gamma.default)
def standard_gamma(concentration: Array, ctx: Context) -> Array:
    """Gamma-distributed numbers, at least the smallest positive normal number, also where the concentration is not positive.

    Shape:  that of the concentration.
    Dtype:  that of the concentration.
    """
    wide = dtypes.accumulator(concentration.dtype)
    drawn = jax.random.gamma(ctx.key(), convert(concentration, wide), concentration.shape, wide)
    return _replace_below_tiny(convert(drawn, np.dtype(concentration.dtype)))


@lowers(aten._sample_dirichlet.default)
def sample_dirichlet(concentration: Array, ctx: Context) -> Array:
    """Dirichlet-distributed numbers: their sum along the last dimension is 1. Each is at least the smallest positive normal number.

    Shape:  that of the concentration.
    Dtype:  that of the concentration.
    """
    wide = dtypes.accumulator(concentration.dtype)
    drawn = jax.random.dirichlet(ctx.key(), convert(concentration, wide), concentration.shape[:-1], wide)
    return _replace_below_tiny(convert(drawn, np.dtype(concentration.dtype)))


def _replace_below_tiny(drawn: Array) -> Array:
    """Returns the numbers, with the smallest positive normal number of their dtype in place of nan and of smaller numbers."""
    smallest = full_like(drawn, float(jax.numpy.finfo(drawn.dtype).tiny))
    return lax.select(lax.gt(drawn, smallest), drawn, smallest)
