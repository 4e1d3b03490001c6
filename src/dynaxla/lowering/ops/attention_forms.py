"""The ways to compute scaled dot product attention and its gradients: with the scores in memory, or by cuDNN, which keeps none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array, lax

from .. import dtypes
from ..context import Context
from ..cpu.folding import reduce_max, reduce_sum
from ..cuda import fused_attention
from ..forms import Forms, Operand
from ..memory_order import eager_order, eager_spec
from ..promotion import convert, expand
from .matmul import Order, contract
from .products_of_updates import product_of_update

Gradients = tuple[Array, Array, Array, Array | None]


@dataclass(frozen=True)
class Problem:
    """An attention or its gradient, apart from its operands' values.

    Attributes: query, key, value, mask (None without one; batch and heads of size 1 where it is one for all); is_causal; scale;
    has_dropout; wants_mask_gradient; platform.

    It has no `operands`: cuDNN saves memory, and the tuner would measure time alone.
    """

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None
    is_causal: bool
    scale: float
    has_dropout: bool
    wants_mask_gradient: bool
    platform: str

    @property
    def fused(self) -> fused_attention.Settings:
        """For cuDNN. The key says how all lie in memory: it is what costs most to copy where a cache holds it."""
        return fused_attention.Settings(self.scale, self.is_causal, self.key.order == fused_attention.HEADS_INSIDE)


@dataclass(frozen=True)
class Attention:
    """One attention.

    Attributes: query (batch, heads, rows, size); key (batch, key heads, columns, size); value (batch, key heads, columns, value size);
    mask, added to the scores or, if bool, true where a score counts; is_causal; scale (None: 1 / sqrt(size)); ctx.
    With fewer key heads than heads, each serves as many neighbouring heads: their rows are taken together, as rows of one head.
    """

    query: Array
    key: Array
    value: Array
    mask: Array | None
    is_causal: bool
    scale: float | None
    ctx: Context

    def problem(self, has_dropout: bool, *, wants_mask_gradient: bool = False) -> Problem:
        """What decides how it is computed."""
        query, key, value = (Operand(x.shape, x.dtype, eager_order(self.ctx, x)) for x in (self.query, self.key, self.value))
        mask = None if self.mask is None else Operand(self.distinct_sizes, self.mask.dtype)
        return Problem(query, key, value, mask, self.is_causal, self.factor, has_dropout, wants_mask_gradient, self.ctx.platform)

    @property
    def distinct_sizes(self) -> tuple[int, ...]:
        """The mask's shape, with size 1 for batch and heads where it is one for all in eager's memory."""
        assert self.mask is not None
        spec = eager_spec(self.ctx, self.mask)
        if spec is None:
            return self.mask.shape
        return tuple(1 if dim < 2 and stride == 0 else size for dim, (size, stride) in enumerate(zip(spec.shape, spec.stride, strict=True)))

    @property
    def distinct_mask(self) -> Array | None:
        """The mask in `distinct_sizes`."""
        return None if self.mask is None else lax.slice(self.mask, (0,) * self.mask.ndim, self.distinct_sizes)

    @property
    def rows(self) -> tuple[int, ...]:
        """(batch, heads, rows), in which every score has its place."""
        return self.query.shape[:3]

    @property
    def factor(self) -> float:
        return 1 / math.sqrt(self.query.shape[3]) if self.scale is None else self.scale

    def by_key_head(self, x: Array) -> Array:
        """(batch, heads, rows, n) as (batch, key heads, rows of all its heads, n)."""
        batch, heads, rows, size = x.shape
        key_heads = self.key.shape[1]
        return x if heads == key_heads else lax.reshape(x, (batch, key_heads, heads // key_heads * rows, size))

    def times(self, x: Array, y: Array, over: tuple[int, int], order: Order = None) -> Array:
        """The product of x and y for each batch and head. Half types are added in float32. order: how the result is wanted in memory.

        Shape:  x (batch, heads, ...) and y (batch, key heads, ...).
        Dtype:  the accumulator's.
        """
        if self.query.shape[1] != self.key.shape[1]:
            order = None
        x = self.by_key_head(x)
        out = product_of_update(self.ctx, 1 if over[1] == 3 else 2, x, (over[0],), (0, 1))
        if out is None:
            out = contract(x, y, ((over[0],), (over[1],)), self.ctx, batch=((0, 1), (0, 1)), order=order)
        return out if over[0] == 2 else lax.reshape(out, (*self.rows, out.shape[3]))

    def scores(self) -> Array:
        """The scaled scores, with -inf where masked.

        Shape:  (batch, heads, rows, columns).
        Dtype:  the accumulator's.
        """
        scores = self.times(self.query, self.key, (3, 3))
        scores = lax.mul(scores, lax.full_like(scores, self.factor))
        if self.mask is not None:
            mask = self.mask
            if dtypes.is_bool(mask.dtype):
                scores = lax.select(expand(mask, scores.shape), scores, lax.full_like(scores, -math.inf))
            else:
                scores = lax.add(scores, expand(convert(mask, scores.dtype), scores.shape))
        if self.is_causal:
            row, column = (lax.broadcasted_iota(np.int32, scores.shape, dim) for dim in (2, 3))
            scores = lax.select(lax.le(column, row), scores, lax.full_like(scores, -math.inf))
        return scores


def _spread(x: Array, shape: Sequence[int]) -> Array:
    """A value per row, repeated along the columns."""
    return lax.broadcast_in_dim(x, shape, (0, 1, 2))


def _dropped(x: Array, key: Array | None, probability: float) -> Array:
    """The weights after dropout. The same key drops the same ones."""
    if key is None:
        return x
    kept = jax.random.bernoulli(key, 1 - probability, x.shape)
    factor = 0.0 if probability == 1 else 1 / (1 - probability)
    return lax.select(kept, lax.mul(x, lax.full_like(x, factor)), lax.full_like(x, 0))


ATTENTION: Forms[Problem] = Forms("attention")
ATTENTION_GRADIENT: Forms[Problem] = Forms("attention_gradient")


def attend(attention: Attention, dropout_p: float = 0.0, key: Array | None = None) -> tuple[Array, Array]:
    """The attended values, in the query's dtype, and the logarithm of each row's sum of exponentials. key: says what is dropped."""
    problem = attention.problem(key is not None)
    out, logsumexp = attention.ctx.choose(ATTENTION, problem).run(problem, attention, dropout_p, key)
    return out, logsumexp


def gradients(
    attention: Attention,
    grad: Array,
    out: Array,
    logsumexp: Array,
    dropout_p: float = 0.0,
    key: Array | None = None,
    wants_mask_gradient: bool = False,
) -> Gradients:
    """Gradients of query, key and value in their dtypes; and, if it is wanted, that of the scores in the accumulator's.

    out, logsumexp, dropout_p, key: the forward's.
    """
    problem = attention.problem(key is not None, wants_mask_gradient=wants_mask_gradient)
    found: Gradients = attention.ctx.choose(ATTENTION_GRADIENT, problem).run(problem, attention, grad, out, logsumexp, dropout_p, key)
    return found


def _fits_cudnn(problem: Problem) -> bool:
    """Whether cuDNN computes this as the other form does. Dropout is out of reach: its seed is a constant of the program, and XLA counts
    its offset for each program alone, so the gradient's could not drop the same."""
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    return (
        fused_attention.is_known()
        and query.dtype == key.dtype == value.dtype
        and len(query.shape) == 4
        and query.shape[::3] == key.shape[::3]
        and key.shape == value.shape
        and fused_attention.takes(query.dtype, query.shape[3])
        and 0 not in query.shape + key.shape
        and query.shape[1] % key.shape[1] == 0
        and (not problem.is_causal or (mask is None and query.shape[2] == key.shape[2]))
        and 0 < problem.scale < math.inf
        and not (problem.has_dropout or problem.wants_mask_gradient)
        and (mask is None or _fits_as_bias(mask, query, key))
    )


def _fits_as_bias(mask: Operand, query: Operand, key: Operand) -> bool:
    """Whether a mask can be cuDNN's bias: one number for each score, in the query's dtype. With odd sizes cuDNN has no gradient. That a
    bias may have one row for all it does not say, nor does JAX give it such a one."""
    rows, columns = query.shape[2], key.shape[2]
    return (
        (dtypes.is_bool(mask.dtype) or mask.dtype == query.dtype)
        and len(mask.shape) == 4
        and all(size in (1, whole) for size, whole in zip(mask.shape[:2], query.shape[:2], strict=True))
        and mask.shape[2:] == (rows, columns)
        and rows % 2 == columns % 2 == 0
    )


def _suits_cudnn(problem: Problem) -> bool:
    """A single query's scores are no more than the keys."""
    return problem.query.shape[2] > 1


@ATTENTION.form("cudnn", platforms=["cuda"], fits=_fits_cudnn, suits=_suits_cudnn, is_refusable=True)
def _by_cudnn(problem: Problem, attention: Attention, dropout_p: float, key: Array | None) -> tuple[Array, Array]:
    operands = attention.query, attention.key, attention.value, attention.distinct_mask
    return fused_attention.forward(*operands, problem.fused)


@ATTENTION.form("xla")
def _by_xla(problem: Problem, attention: Attention, dropout_p: float, key: Array | None) -> tuple[Array, Array]:
    scores = attention.scores()
    largest = reduce_max(scores, (3,))
    nothing = lax.eq(largest, lax.full_like(largest, -math.inf))
    largest = lax.select(nothing, lax.full_like(largest, 0), largest)
    weights = lax.exp(lax.sub(scores, _spread(largest, scores.shape)))
    total = reduce_sum(weights, (3,))
    total = lax.select(nothing, lax.full_like(total, 1), total)
    weights = _dropped(weights, key, dropout_p)
    out = attention.times(convert(weights, attention.value.dtype), attention.value, (3, 2), attention.ctx.output[0].order)
    # The division waits until after the product: it has fewer numbers to divide there.
    out = lax.div(out, _spread(total, out.shape))
    return convert(out, attention.query.dtype), lax.add(lax.log(total), largest)


@ATTENTION_GRADIENT.form("cudnn", platforms=["cuda"], fits=_fits_cudnn, suits=_suits_cudnn, is_refusable=True)
def _gradients_by_cudnn(
    problem: Problem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, key: Array | None
) -> Gradients:
    operands = attention.query, attention.key, attention.value, attention.distinct_mask
    return *fused_attention.backward(grad, *operands, out, logsumexp, problem.fused), None


@ATTENTION_GRADIENT.form("xla")
def _gradients_by_xla(
    problem: Problem, attention: Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float, key: Array | None
) -> Gradients:
    query, keys, value = attention.query, attention.key, attention.value
    scores = attention.scores()
    dtype = scores.dtype
    weights = lax.exp(lax.sub(scores, _spread(convert(logsumexp, dtype), scores.shape)))
    applied = convert(_dropped(weights, key, dropout_p), value.dtype)
    grad_value = attention.times(applied, attention.by_key_head(grad), (2, 2))
    grad_weights = _dropped(attention.times(grad, value, (3, 3)), key, dropout_p)
    # The sum over a row of weight times gradient is that of output times gradient: it needs no pass over the scores.
    shared = reduce_sum(lax.mul(convert(out, dtype), convert(grad, dtype)), (3,))
    grad_scores = lax.mul(weights, lax.sub(grad_weights, _spread(shared, scores.shape)))
    scaled = convert(lax.mul(grad_scores, lax.full_like(grad_scores, attention.factor)), query.dtype)
    grad_query = attention.times(scaled, keys, (3, 2))
    grad_key = attention.times(scaled, attention.by_key_head(query), (2, 2))
    return convert(grad_query, query.dtype), convert(grad_key, keys.dtype), convert(grad_value, value.dtype), grad_scores
