"""Lowerings of the fused ops that `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call in inference."""

from __future__ import annotations

import math

from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert, to_accumulator
from ..registry import lowers
from .matmul import contract
from .normalization import normalize_last
from .softmax import minus_largest

# Values of the argument `mask_type`: a mask has the shape (rows, columns), (batch, columns), or that of the scores.
_PER_ROW_AND_COLUMN, _PER_BATCH_AND_COLUMN, _FULL = 0, 1, 2


def _linear(x: Array, weight: Array, bias: Array, ctx: Context) -> Array:
    """Returns x @ weight.T + bias for x (batch, rows, n)."""
    out = contract(x, weight, ((2,), (1,)), ctx)
    out = lax.add(out, lax.broadcast_in_dim(convert(bias, out.dtype), out.shape, (2,)))
    return convert(out, x.dtype)


def _project_qkv(inputs: tuple[Array, Array, Array], weight: Array, bias: Array, ctx: Context) -> list[Array]:
    """Returns the projections of query, key and value, each by its third of the weight and the bias."""
    size = weight.shape[0] // 3
    if inputs[0] is inputs[1] is inputs[2]:
        projected = _linear(inputs[0], weight, bias, ctx)
        return [lax.slice_in_dim(projected, third * size, (third + 1) * size, axis=2) for third in range(3)]
    parts = [slice(third * size, (third + 1) * size) for third in range(3)]
    return [
        _linear(x, lax.slice_in_dim(weight, part.start, part.stop), lax.slice_in_dim(bias, part.start, part.stop), ctx)
        for x, part in zip(inputs, parts, strict=True)
    ]


def _mask_scores(scores: Array, mask: Array | None, mask_type: int | None) -> Array:
    """Returns the scores with -inf wherever the mask is nonzero."""
    if mask is None:
        return scores
    is_masked = mask if dtypes.is_bool(mask.dtype) else lax.ne(mask, lax.full_like(mask, 0))
    dims = {_PER_ROW_AND_COLUMN: (2, 3), _PER_BATCH_AND_COLUMN: (0, 3)}.get(mask_type if mask_type is not None else -1, (0, 1, 2, 3))
    is_masked = lax.broadcast_in_dim(is_masked, scores.shape, dims)
    return lax.select(is_masked, lax.full_like(scores, -math.inf), scores)


def _attend(
    inputs: tuple[Array, Array, Array],
    num_head: int,
    qkv: tuple[Array, Array],
    projection: tuple[Array, Array],
    mask: Array | None,
    mask_type: int | None,
    ctx: Context,
) -> tuple[Array, Array]:
    """Returns the projected output, and the attention weights (batch, heads, rows, columns) in the accumulator's dtype.

    Args:
        inputs: Query, key and value, each (batch, rows, size).
        num_head: The number of heads.
        qkv: The weight and the bias of the input projection.
        projection: The weight and the bias of the output projection.
        mask: A mask that is nonzero where a score is hidden, or None.
        mask_type: The meaning of the mask's dimensions: `_PER_ROW_AND_COLUMN`, `_PER_BATCH_AND_COLUMN` or `_FULL`.
        ctx: The context of the current node.
    """
    query, key, value = (lax.reshape(x, (*x.shape[:2], num_head, x.shape[2] // num_head)) for x in _project_qkv(inputs, *qkv, ctx))
    scores = contract(query, key, ((3,), (3,)), ctx, batch=((0, 2), (0, 2)))
    scores = _mask_scores(lax.mul(scores, lax.full_like(scores, 1 / math.sqrt(query.shape[3]))), mask, mask_type)
    rows = (0, 1, 2)
    weights = lax.exp(minus_largest(scores, lax.broadcast_in_dim(lax.reduce_max(scores, (3,)), scores.shape, rows)))
    weights = lax.div(weights, lax.broadcast_in_dim(lax.reduce_sum(weights, (3,)), scores.shape, rows))
    out = contract(convert(weights, value.dtype), value, ((3,), (1,)), ctx, batch=((0, 1), (0, 2)))
    out = lax.reshape(lax.transpose(convert(out, value.dtype), (0, 2, 1, 3)), inputs[0].shape)
    return _linear(out, *projection, ctx), weights


@lowers(aten._native_multi_head_attention.default)
def native_multi_head_attention(
    query: Array,
    key: Array,
    value: Array,
    embed_dim: int,
    num_head: int,
    qkv_weight: Array,
    qkv_bias: Array,
    proj_weight: Array,
    proj_bias: Array,
    mask: Array | None,
    need_weights: bool,
    average_attn_weights: bool,
    mask_type: int | None,
    *,
    ctx: Context,
) -> tuple[Array, Array]:
    """Attention with its input and output projections; also returns the attention weights.

    Shape:  that of the query (batch, rows, size). The weights are (batch, rows, columns) if averaged over heads, else (batch, heads, rows,
            columns); without `need_weights` they are an empty array.
    Dtype:  that of the query.
    Source: ATen native/transformers/attention.cpp, native_multi_head_attention_cpu
    """
    inputs, qkv = (query, key, value), (qkv_weight, qkv_bias)
    out, weights = _attend(inputs, num_head, qkv, (proj_weight, proj_bias), mask, mask_type, ctx)
    spec = ctx.output[1]
    if not need_weights:
        return out, lax.full(spec.shape, 0, spec.jax_dtype)
    if average_attn_weights:
        total = lax.reduce_sum(weights, (1,))
        weights = lax.div(total, lax.full_like(total, num_head))
    return out, convert(weights, spec.jax_dtype)


@lowers(aten._transformer_encoder_layer_fwd.default)
def transformer_encoder_layer(
    x: Array,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Array,
    qkv_bias: Array,
    proj_weight: Array,
    proj_bias: Array,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Array,
    norm_bias_1: Array,
    norm_weight_2: Array,
    norm_bias_2: Array,
    ffn_weight_1: Array,
    ffn_bias_1: Array,
    ffn_weight_2: Array,
    ffn_bias_2: Array,
    mask: Array | None,
    mask_type: int | None,
    *,
    ctx: Context,
) -> Array:
    """An encoder layer: attention and a feed-forward network, each with a residual connection and a layer norm.

    Shape:  that of x (batch, rows, size).
    Dtype:  that of x.
    Source: ATen native/transformers/transformer.cpp, transformer_encoder_layer_forward
    """

    def normalized(y: Array, weight: Array, bias: Array) -> Array:
        return convert(normalize_last(y, 1, weight, bias, eps)[0], y.dtype)

    def activation(y: Array) -> Array:
        if not use_gelu:
            return lax.max(y, lax.full_like(y, 0))
        wide = to_accumulator(y)
        half = lax.full_like(wide, 0.5)
        inner = lax.erf(lax.mul(wide, lax.full_like(wide, math.sqrt(0.5))))
        return convert(lax.mul(lax.mul(half, wide), lax.add(inner, lax.full_like(wide, 1))), y.dtype)

    residual = x
    if norm_first:
        x = normalized(x, norm_weight_1, norm_bias_1)
    x, _ = _attend((x, x, x), num_heads, (qkv_weight, qkv_bias), (proj_weight, proj_bias), mask, mask_type, ctx)
    x = lax.add(x, residual)
    if not norm_first:
        x = normalized(x, norm_weight_1, norm_bias_1)
    residual = x
    if norm_first:
        x = normalized(x, norm_weight_2, norm_bias_2)
    x = _linear(activation(_linear(x, ffn_weight_1, ffn_bias_1, ctx)), ffn_weight_2, ffn_bias_2, ctx)
    x = lax.add(x, residual)
    return x if norm_first else normalized(x, norm_weight_2, norm_bias_2)
