"""ATen ops that fuse several simpler ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu.vectorized_reductions import reduce_max, reduce_sum
from ..promotion import broadcast_back, convert, full_like, number, to_accumulator
from ..registry import lowers
from .activations import gelu
from .elementwise import add
from .matmul import addmm
from .softmax import minus_largest


def _relu(x: Array) -> Array:
    return lax.max(x, number(0, x.dtype))


@lowers(aten._add_relu.Tensor)
def add_relu(x: Array, y: Array, *, alpha: Any = 1) -> Array:
    return _relu(add(x, y, alpha=alpha))


@lowers(aten._add_relu.Scalar)
def add_relu_scalar(x: Array, y: Any, alpha: Any = 1) -> Array:
    return _relu(add(x, y, alpha=alpha))


@lowers(aten._addmm_activation.default)
def addmm_activation(x: Array, y: Array, z: Array, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False, ctx: Context) -> Array:
    """ReLU of addmm, or GELU of addmm if `use_gelu`. On a GPU, GELU is approximated by tanh, as in cuBLAS.

    Dtype:  that of y.
    """
    out = addmm(x, y, z, beta=beta, alpha=alpha, ctx=ctx)
    return gelu(out, approximate=ctx.eager.fused_gelu) if use_gelu else _relu(out)


@lowers(aten._masked_scale.default)
def masked_scale(x: Array, mask: Array, scale: float) -> Array:
    """x * mask * scale.

    Shape:  that of x.
    Dtype:  that of x.
    """
    wide = to_accumulator(x)
    return convert(lax.mul(lax.mul(wide, convert(mask, wide.dtype)), number(scale, wide.dtype)), x.dtype)


@lowers(aten._transform_bias_rescale_qkv.default)
def transform_bias_rescale_qkv(qkv: Array, qkv_bias: Array, num_heads: int) -> tuple[Array, ...]:
    """Query, key and value: the three parts of qkv + qkv_bias. The query is divided by sqrt(size).

    Shape:  qkv (batch, rows, 3 * heads * size) gives (batch, heads, rows, size) three times.
    Dtype:  all: that of qkv.
    """
    batch, rows, width = qkv.shape
    size = width // (3 * num_heads)
    wide = to_accumulator(qkv)
    wide = lax.add(wide, lax.broadcast_in_dim(convert(qkv_bias, wide.dtype), wide.shape, (2,)))
    stacked = lax.transpose(lax.reshape(wide, (batch, rows, 3, num_heads, size)), (2, 0, 3, 1, 4))
    query, key, value = (lax.index_in_dim(stacked, index, keepdims=False) for index in range(3))
    query = lax.mul(query, number(1 / math.sqrt(size), wide.dtype))
    return tuple(convert(x, qkv.dtype) for x in (query, key, value))


# Values of the argument `mask_type`. The mask's shape is (rows, columns) for 0, and (batch, columns) for 1.
_PER_ROW_AND_COLUMN, _PER_BATCH_AND_COLUMN = 0, 1


def _mask_dims(mask_type: int | None, rank: int) -> Sequence[int]:
    """Returns, for each dimension of the mask, the dimension of the scores to which it corresponds.

    Args:
        rank: The number of dimensions of the scores.
    """
    dims_by_type: dict[int | None, Sequence[int]] = {_PER_ROW_AND_COLUMN: (rank - 2, rank - 1), _PER_BATCH_AND_COLUMN: (0, rank - 1)}
    return dims_by_type.get(mask_type, range(rank))


@lowers(aten._masked_softmax.default)
def masked_softmax(x: Array, mask: Array, dim: int | None = None, mask_type: int | None = None) -> Array:
    """Softmax over the elements where the mask is False; 0 where the mask is True, and NaN if it is True everywhere along `dim`.

    Shape:  that of x; mask (rows, columns) for mask_type 0, (batch, columns) for 1, else that of x.
    Dtype:  that of x.
    """
    dim = x.ndim - 1 if dim is None else dim % x.ndim
    expanded_mask = lax.broadcast_in_dim(mask, x.shape, _mask_dims(mask_type, x.ndim))
    wide = to_accumulator(x)
    wide = lax.select(expanded_mask, full_like(wide, -math.inf), wide)
    weights = lax.exp(minus_largest(wide, broadcast_back(reduce_max(wide, (dim,)), x.shape, (dim,))))
    return convert(lax.div(weights, broadcast_back(reduce_sum(weights, (dim,)), x.shape, (dim,))), x.dtype)


@lowers(aten._masked_softmax_backward.default)
def masked_softmax_backward(grad: Array, output: Array, mask: Array, dim: int | None = None) -> Array:
    """The gradient of masked_softmax's operand: 0 where the mask is True.

    Shape:  that of grad, which output and mask have, too.
    Dtype:  that of grad.
    """
    dim = grad.ndim - 1 if dim is None else dim % grad.ndim
    wide, out = (convert(x, dtypes.accumulator(grad.dtype)) for x in (grad, output))
    zero = full_like(wide, 0)
    product = lax.select(mask, zero, lax.mul(wide, out))
    total = broadcast_back(lax.reduce_sum(product, (dim,)), grad.shape, (dim,))
    return convert(lax.select(mask, zero, lax.mul(out, lax.sub(wide, total))), grad.dtype)


# Forward-mode derivatives of GLU


def _halves(x: Array, dim: int) -> tuple[Array, Array, Array]:
    """Returns both halves of x along `dim`, and the sigmoid of the second half."""
    first, second = lax.split(x, [x.shape[dim] // 2] * 2, axis=dim)
    return first, second, lax.logistic(second)


@lowers(aten.glu_jvp.default)
def glu_jvp(out: Array, x: Array, dx: Array, dim: int) -> Array:
    """The tangent of GLU's result, for the tangent dx of x.

    Shape:  that of out, which is half of x along `dim`.
    Dtype:  that of x.
    """
    dim %= x.ndim
    wide, out_wide, dx_wide = (convert(value, dtypes.accumulator(x.dtype)) for value in (x, out, dx))
    _, _, sigmoid = _halves(wide, dim)
    d_first, d_second, _ = _halves(dx_wide, dim)
    derivative = lax.mul(out_wide, lax.sub(number(1, wide.dtype), sigmoid))
    return convert(lax.add(lax.mul(d_first, sigmoid), lax.mul(derivative, d_second)), x.dtype)


@lowers(aten.glu_backward_jvp.default)
def glu_backward_jvp(grad_x: Array, grad_glu: Array, x: Array, dgrad_glu: Array, dx: Array, dim: int) -> Array:
    """The tangent of x's gradient, for the tangents dgrad_glu of grad_glu and dx of x.

    For x = [a, b], the sigmoid s and g = grad_glu, the gradient is [g s(b), g a s(b) (1 - s(b))].

    Shape:  that of x.
    Dtype:  that of grad_x.
    """
    dim %= x.ndim
    wide, grad, dgrad, dx_wide = (convert(value, dtypes.accumulator(x.dtype)) for value in (x, grad_glu, dgrad_glu, dx))
    first, _, sigmoid = _halves(wide, dim)
    d_first, d_second, _ = _halves(dx_wide, dim)
    one = number(1, wide.dtype)
    derivative = lax.mul(sigmoid, lax.sub(one, sigmoid))
    second_derivative = lax.mul(derivative, lax.sub(one, lax.add(sigmoid, sigmoid)))
    tangent_first = lax.add(lax.mul(dgrad, sigmoid), lax.mul(lax.mul(grad, derivative), d_second))
    tangent_second = lax.mul(lax.add(lax.mul(dgrad, first), lax.mul(grad, d_first)), derivative)
    tangent_second = lax.add(tangent_second, lax.mul(lax.mul(lax.mul(grad, first), second_derivative), d_second))
    return convert(lax.concatenate([tangent_first, tangent_second], dim), grad_x.dtype)


@lowers(aten._weight_norm_interface_backward.default)
def weight_norm_backward(grad: Array, v: Array, g: Array, norms: Array, dim: int) -> tuple[Array, Array]:
    """Gradients of v and g, where the weight is v * (g / norm of v over all dimensions but `dim`).

    Shape:  those of v and g.
    Dtype:  those of v and g.
    """
    dtype = dtypes.accumulator(v.dtype)
    reduced_dims = [d for d in range(v.ndim) if d != dim % v.ndim]
    grad_wide, v_wide, g_wide, norms_wide = (convert(x, dtype) for x in (grad, v, g, norms))
    dot = lax.reshape(lax.reduce_sum(lax.mul(grad_wide, v_wide), reduced_dims), g.shape)
    projection = lax.div(dot, lax.square(norms_wide))
    orthogonal = lax.sub(grad_wide, lax.mul(v_wide, lax.broadcast_in_dim(projection, v.shape, range(v.ndim))))
    grad_v = lax.mul(lax.broadcast_in_dim(lax.div(g_wide, norms_wide), v.shape, range(v.ndim)), orthogonal)
    return convert(grad_v, v.dtype), convert(lax.div(dot, norms_wide), g.dtype)
