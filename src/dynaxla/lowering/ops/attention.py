"""Scaled dot product attention, forward and backward. PyTorch has one op per kernel; here all of them use attention_implementations.py.

Every forward op also returns the log-sum-exp of each row of scores, from which the backward op computes the attention weights again. A row
in which every position is masked gives zeros, as in PyTorch's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten, passed_arguments
from .. import dtypes
from ..context import Context
from ..metadata import TensorSpec
from ..promotion import convert
from ..registry import lowers
from .attention_implementations import Attention, attend, gradients

# --- CPU


def _refuse_dropout(dropout_p: float, ctx: Context) -> None:
    if dropout_p > 0:
        raise UnsupportedOp(
            f"{ctx.node.target} with dropout_p={dropout_p}: PyTorch's kernel for this op has no dropout",
            op=str(ctx.node.target),
            hint="call torch.nn.functional.scaled_dot_product_attention, which then chooses another kernel",
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
    """Returns attention's result, and the log-sum-exp of each row of scores.

    Shape:  that of the query, with value's last dimension; log-sum-exp: (batch, heads, rows).
    Dtype:  that of the query; log-sum-exp: float64 if the query is float64 and torch is 2.13 or later, else float32.
    Raises: UnsupportedOp for dropout, which PyTorch's kernel for this op does not have.
    """
    _refuse_dropout(dropout_p, ctx)
    out, logsumexp = attend(Attention(query, key, value, attn_mask, is_causal, scale, ctx))
    return out, convert(logsumexp, ctx.output[1].jax_dtype)


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
    """Gradients of query, key and value, each with its operand's shape and dtype."""
    _refuse_dropout(dropout_p, ctx)
    attention = Attention(query, key, value, attn_mask, is_causal, scale, ctx)
    if logsumexp.dtype != dtypes.accumulator(query.dtype):  # the forward rounded it to float32
        _, logsumexp = attend(attention)
    return gradients(attention, grad, out, logsumexp)[:3]


# --- CUDA
#
# These ops return the state of a random generator, which the backward op takes. dynaxla stores the bits of a JAX PRNG key in that state.

_Arguments = Mapping[str, Any]


def _attention(given: _Arguments, ctx: Context) -> Attention:
    """Returns the attention of the current node, a forward or backward op. `given` has the node's arguments by name.

    Raises: UnsupportedOp for flash attention (the only op without attn_bias) with is_causal and different numbers of queries and keys.
    """
    query, key, value, is_causal = (given[name] for name in ("query", "key", "value", "is_causal"))
    if "attn_bias" not in given and is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedOp(
            f"{ctx.node.target} with is_causal=True for {query.shape[2]} queries and {key.shape[2]} keys: "
            "this op aligns the causal mask to the bottom right, scaled_dot_product_attention to the top left",
            op=str(ctx.node.target),
            hint="call torch.nn.functional.scaled_dot_product_attention with an attn_mask",
        )
    return Attention(query, key, value, given.get("attn_bias"), is_causal, given["scale"], ctx)


@lowers(
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
def attention_with_generator_state(*args: Any, ctx: Context, **kwargs: Any) -> tuple[Any, ...]:
    """Returns attention's result, the log-sum-exp of each row of scores, and the other results of the op's schema.

    With dropout, the first integer tensor after the log-sum-exp holds the PRNG key. Tensors that no lowering reads are zero.

    Shape:  that of the query, with value's last dimension; log-sum-exp as in PyTorch's kernel: (batch, heads, rows), with zeros after the
            last row if PyTorch pads the rows; (batch, heads, 0) if PyTorch computes none; (batch, heads, rows, 1) for cuDNN.
    Dtype:  that of the query; log-sum-exp: float32.
    """
    given = passed_arguments(ctx.node.target, args, kwargs)
    prng_key = ctx.key() if given["dropout_p"] > 0 else None
    out, logsumexp = attend(_attention(given, ctx), given["dropout_p"], prng_key)
    spec = ctx.output[1]
    if spec.shape[2] > logsumexp.shape[2]:
        logsumexp = lax.pad(logsumexp, lax.full((), 0, logsumexp.dtype), [(0, 0, 0), (0, 0, 0), (0, spec.shape[2] - logsumexp.shape[2], 0)])
    elif spec.shape[2] < logsumexp.shape[2]:
        logsumexp = lax.full(spec.shape, 0, logsumexp.dtype)
    results: list[Any] = [out, convert(lax.reshape(logsumexp, spec.shape), spec.jax_dtype)]
    for spec in ctx.output[2:]:
        if isinstance(spec, TensorSpec) and dtypes.is_integer(spec.jax_dtype) and prng_key is not None:
            results.append(_pack_key(prng_key, spec))
            prng_key = None
        else:
            results.append(lax.full(spec.shape, 0, spec.jax_dtype) if isinstance(spec, TensorSpec) else spec)
    return tuple(results)


@lowers(
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
)
def attention_backward(grad: Array, *args: Any, ctx: Context, **kwargs: Any) -> tuple[Array | None, ...]:
    """Gradients of query, key, value and, for ops with `grad_input_mask`, attn_bias; each with its operand's shape and dtype.

    The gradient of attn_bias is None if there is no attn_bias, or if `grad_input_mask[3]` is False.
    """
    given = passed_arguments(ctx.node.target, (grad, *args), kwargs)
    attention, dropout_p, mask = _attention(given, ctx), given["dropout_p"], given.get("grad_input_mask")
    wants_bias = mask is not None and mask[3]
    logsumexp, prng_key = _without_padding(given["logsumexp"], attention), _unpack_key(given["philox_seed"], dropout_p)
    *grads, grad_scores = gradients(attention, grad, given["out"], logsumexp, dropout_p, prng_key, wants_bias)
    if mask is None:
        return tuple(grads)
    return *grads, _grad_bias(given["attn_bias"], grad_scores) if wants_bias else None


def _grad_bias(bias: Array | None, grad_scores: Array | None) -> Array | None:
    """Returns the gradient of attn_bias: the gradient of the scores, summed over the dimensions along which the bias is broadcast."""
    if bias is None or grad_scores is None:
        return None
    shape = (1,) * (grad_scores.ndim - bias.ndim) + bias.shape
    broadcast_dims = [dim for dim in range(grad_scores.ndim) if shape[dim] == 1]
    return convert(lax.reshape(lax.reduce_sum(grad_scores, broadcast_dims), bias.shape), bias.dtype)


def _pack_key(prng_key: Array, spec: TensorSpec) -> Array:
    """Returns a tensor of 64-bit integers whose first element holds a PRNG key. `_unpack_key` reverses this."""
    bits = lax.bitcast_convert_type(jax.random.key_data(prng_key), np.dtype(np.uint64))
    packed = lax.reshape(lax.bitcast_convert_type(bits, spec.jax_dtype), (1,))
    count = math.prod(spec.shape)
    return lax.reshape(lax.pad(packed, lax.full((), 0, packed.dtype), [(0, count - 1, 0)]), spec.shape)


def _unpack_key(state: Array, dropout_p: float) -> Array | None:
    """Returns the PRNG key that `_pack_key` has stored in a generator's state; None without dropout."""
    if dropout_p == 0:
        return None
    first = lax.reshape(lax.slice(lax.reshape(state, (state.size,)), (0,), (1,)), ())
    return jax.random.wrap_key_data(lax.bitcast_convert_type(first, np.dtype(np.uint32)), impl="threefry2x32")


def _without_padding(logsumexp: Array, attention: Attention) -> Array:
    """Returns the log-sum-exp as (batch, heads, rows): without padded rows, and without cuDNN's last dimension."""
    flat = logsumexp if logsumexp.ndim == 3 else lax.reshape(logsumexp, logsumexp.shape[:3])
    return lax.slice(flat, (0, 0, 0), attention.row_shape) if flat.shape != attention.row_shape else flat
