"""Scaled dot product attention, forward and backward: one computation under the names of PyTorch's several kernels.

All of them return the logarithm of the softmax's denominators, and the backward computes the weights again from it. A row in which
every position is masked gives zeros, as the kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax

from ...errors import UnsupportedOp
from .. import dtypes
from ..context import Context
from ..cpu.folding import reduce_max, reduce_sum
from ..metadata import TensorSpec
from ..promotion import convert, expand
from ..registry import lowers
from .matmul import Order, contract

aten = torch.ops.aten


@dataclass(frozen=True)
class _Attention:
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
        out = contract(self.by_key_head(x), y, ((over[0],), (over[1],)), self.ctx, batch=((0, 1), (0, 1)), order=order)
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


def _forward(attention: _Attention, dropout_p: float = 0.0, key: Array | None = None) -> tuple[Array, Array]:
    """The attended values, in the query's dtype, and the logarithm of each row's sum of exponentials."""
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


def _backward(
    attention: _Attention, grad: Array, out: Array, logsumexp: Array, dropout_p: float = 0.0, key: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """Gradients of query, key and value in their dtypes, and of the scores in the accumulator's."""
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


# --- CPU


def _refuse_dropout(dropout_p: float, ctx: Context) -> None:
    if dropout_p > 0:
        raise UnsupportedOp(
            f"{ctx.node.target} with dropout_p={dropout_p}: PyTorch's own kernel has no dropout",
            op=str(ctx.node.target),
            hint="call torch.nn.functional.scaled_dot_product_attention, which chooses another kernel then",
        )


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_attention_for_cpu(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
    ctx: Context,
) -> tuple[Array, Array]:
    """Attention, and the logarithm of each row's sum of exponentials.

    Shape:  that of the query, with value's last dimension; (batch, heads, rows).
    Dtype:  that of the query; the accumulator's.
    Raises: UnsupportedOp for dropout, which this kernel does not have.
    """
    _refuse_dropout(dropout_p, ctx)
    return _forward(_Attention(query, key, value, attn_mask, is_causal, scale, ctx))


@lowers(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_for_cpu_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
    ctx: Context,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, each of its operand's shape and dtype."""
    _refuse_dropout(dropout_p, ctx)
    return _backward(_Attention(query, key, value, attn_mask, is_causal, scale, ctx), grad, out, logsumexp)[:3]


# --- CUDA
#
# These kernels return the state of their random generator, for the backward. Here it holds the bits of a JAX key.


def _forward_with_state(attention: _Attention, dropout_p: float) -> tuple[Any, ...]:
    """The forward's results as the kernel lists them: the generator's state stands in the first integer tensor after the log-sum-exp,
    padding and what we have no use for is zero."""
    ctx = attention.ctx
    key = ctx.key() if dropout_p > 0 else None
    out, logsumexp = _forward(attention, dropout_p, key)
    spec = ctx.output[1]
    if spec.shape[2] > logsumexp.shape[2]:
        logsumexp = lax.pad(logsumexp, lax.full((), 0, logsumexp.dtype), [(0, 0, 0), (0, 0, 0), (0, spec.shape[2] - logsumexp.shape[2], 0)])
    elif spec.shape[2] < logsumexp.shape[2]:
        logsumexp = lax.full(spec.shape, 0, logsumexp.dtype)
    results: list[Any] = [out, convert(lax.reshape(logsumexp, spec.shape), spec.jax_dtype)]
    for spec in ctx.output[2:]:
        if isinstance(spec, TensorSpec) and dtypes.is_integer(spec.jax_dtype) and key is not None:
            results.append(_pack_key(key, spec))
            key = None
        else:
            results.append(lax.full(spec.shape, 0, spec.jax_dtype) if isinstance(spec, TensorSpec) else spec)
    return tuple(results)


def _pack_key(key: Array, spec: TensorSpec) -> Array:
    bits = lax.bitcast_convert_type(jax.random.key_data(key), np.dtype(np.uint64))
    packed = lax.reshape(lax.bitcast_convert_type(bits, spec.jax_dtype), (1,))
    count = math.prod(spec.shape)
    return lax.reshape(lax.pad(packed, lax.full((), 0, packed.dtype), [(0, count - 1, 0)]), spec.shape)


def _unpack_key(state: Array, dropout_p: float) -> Array | None:
    if dropout_p == 0:
        return None
    first = lax.reshape(lax.slice(lax.reshape(state, (state.size,)), (0,), (1,)), ())
    return jax.random.wrap_key_data(lax.bitcast_convert_type(first, np.dtype(np.uint32)), impl="threefry2x32")


def _rows_of(logsumexp: Array, attention: _Attention) -> Array:
    """The log-sum-exp without its padding."""
    flat = logsumexp if logsumexp.ndim == 3 else lax.reshape(logsumexp, logsumexp.shape[:3])
    return lax.slice(flat, (0, 0, 0), attention.rows) if flat.shape != attention.rows else flat


def _check_causal(query: Array, key: Array, is_causal: bool, ctx: Context) -> None:
    if is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedOp(
            f"{ctx.node.target} with is_causal=True for {query.shape[2]} queries and {key.shape[2]} keys: "
            "this kernel masks from the bottom right, scaled_dot_product_attention from the top left",
            op=str(ctx.node.target),
            hint="give an attn_mask",
        )


@lowers(aten._scaled_dot_product_efficient_attention.default)
def efficient_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_bias: Array | None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
    ctx: Context,
) -> tuple[Any, ...]:
    """Attention, the logarithm of each row's sum of exponentials, and the random generator's state for the gradient.

    Shape:  that of the query, with value's last dimension; (batch, heads, rows), filled up with zeros or empty as PyTorch's kernel has it.
    Dtype:  that of the query; the second is float32.
    """
    return _forward_with_state(_Attention(query, key, value, attn_bias, is_causal, scale, ctx), dropout_p)


@lowers(aten._scaled_dot_product_cudnn_attention.default)
def cudnn_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_bias: Array | None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    ctx: Context,
) -> tuple[Any, ...]:
    """As `efficient_attention`, with cuDNN's list of results: the logarithms are (batch, heads, rows, 1), and what only cuDNN's own
    gradient needs is zero.
    """
    return _forward_with_state(_Attention(query, key, value, attn_bias, is_causal, scale, ctx), dropout_p)


@lowers(aten._scaled_dot_product_fused_attention_overrideable.default)
def overrideable_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_bias: Array | None,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    ctx: Context,
) -> tuple[Any, ...]:
    """As `efficient_attention`, with this op's list of results."""
    return _forward_with_state(_Attention(query, key, value, attn_bias, is_causal, scale, ctx), dropout_p)


@lowers(aten._scaled_dot_product_flash_attention.default)
def flash_attention(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    ctx: Context,
) -> tuple[Any, ...]:
    """As `efficient_attention`, without a mask and with this op's list of results.

    Raises: UnsupportedOp for a causal mask with different numbers of queries and keys.
    """
    _check_causal(query, key, is_causal, ctx)
    return _forward_with_state(_Attention(query, key, value, None, is_causal, scale, ctx), dropout_p)


@lowers(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_attention_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    attn_bias: Array | None,
    out: Array,
    logsumexp: Array,
    philox_seed: Array,
    philox_offset: Array,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool,
    *,
    scale: float | None = None,
    ctx: Context,
) -> tuple[Array | None, ...]:
    """Gradients of query, key, value and, if grad_input_mask asks for it, attn_bias; each of its operand's shape and dtype."""
    attention = _Attention(query, key, value, attn_bias, is_causal, scale, ctx)
    state = _unpack_key(philox_seed, dropout_p)
    *grads, grad_scores = _backward(attention, grad, out, _rows_of(logsumexp, attention), dropout_p, state)
    grad_bias = _grad_bias(attn_bias, grad_scores) if grad_input_mask[3] else None
    return *grads, grad_bias


def _grad_bias(bias: Array | None, grad_scores: Array) -> Array | None:
    if bias is None:
        return None
    shape = (1,) * (grad_scores.ndim - bias.ndim) + bias.shape
    repeated = [dim for dim in range(grad_scores.ndim) if shape[dim] == 1]
    return convert(lax.reshape(lax.reduce_sum(grad_scores, repeated), bias.shape), bias.dtype)


@lowers(aten._scaled_dot_product_cudnn_attention_backward.default)
def cudnn_attention_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    philox_seed: Array,
    philox_offset: Array,
    attn_bias: Array | None,
    cum_seq_q: Array | None,
    cum_seq_k: Array | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
    ctx: Context,
) -> tuple[Array, ...]:
    """Gradients of query, key and value, each of its operand's shape and dtype."""
    attention = _Attention(query, key, value, attn_bias, is_causal, scale, ctx)
    return _backward(attention, grad, out, _rows_of(logsumexp, attention), dropout_p, _unpack_key(philox_seed, dropout_p))[:3]


@lowers(aten._scaled_dot_product_fused_attention_overrideable_backward.default)
def overrideable_attention_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    attn_bias: Array | None,
    grad_input_mask: Sequence[bool],
    out: Array,
    logsumexp: Array,
    cum_seq_q: Array | None,
    cum_seq_k: Array | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Array,
    philox_offset: Array,
    *,
    scale: float | None = None,
    ctx: Context,
) -> tuple[Array | None, ...]:
    """Gradients of query, key, value and, if grad_input_mask asks for it, attn_bias; each of its operand's shape and dtype."""
    attention = _Attention(query, key, value, attn_bias, is_causal, scale, ctx)
    state = _unpack_key(philox_seed, dropout_p)
    *grads, grad_scores = _backward(attention, grad, out, _rows_of(logsumexp, attention), dropout_p, state)
    return *grads, _grad_bias(attn_bias, grad_scores) if grad_input_mask[3] else None


@lowers(aten._scaled_dot_product_flash_attention_backward.default)
def flash_attention_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    cum_seq_q: Array | None,
    cum_seq_k: Array | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Array,
    philox_offset: Array,
    *,
    scale: float | None = None,
    ctx: Context,
) -> tuple[Array, ...]:
    """Gradients of query, key and value, each of its operand's shape and dtype."""
    _check_causal(query, key, is_causal, ctx)
    attention = _Attention(query, key, value, None, is_causal, scale, ctx)
    return _backward(attention, grad, out, _rows_of(logsumexp, attention), dropout_p, _unpack_key(philox_seed, dropout_p))[:3]
