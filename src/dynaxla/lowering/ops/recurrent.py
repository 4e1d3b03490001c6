"""The fused cells of LSTMs and GRUs, which `torch.lstm_cell`, `nn.LSTMCell` and their like become on a GPU.

Gates lie side by side in the last dimension: input, forget, cell, output for an LSTM; reset, update, new for a GRU.
Source: ATen native/cuda/RNN.cu
"""

from __future__ import annotations

import torch
from jax import Array, lax

from .. import dtypes
from ..promotion import convert, number
from ..registry import lowers

aten = torch.ops.aten


def _wide(x: Array) -> Array:
    return convert(x, dtypes.accumulator(x.dtype))


def _gates(x: Array, bias: Array | None, count: int) -> list[Array]:
    """x (batch, count * hidden) plus a bias, as `count` parts, in the accumulator's dtype."""
    x = _wide(x)
    if bias is not None:
        x = lax.add(x, lax.broadcast_in_dim(_wide(bias), x.shape, (1,)))
    size = x.shape[1] // count
    return [lax.slice_in_dim(x, part * size, (part + 1) * size, axis=1) for part in range(count)]


def _joined(parts: list[Array], like: Array) -> Array:
    return convert(lax.concatenate(parts, 1), like.dtype)


def _less_one(x: Array) -> Array:
    """1 - x"""
    return lax.sub(number(1, x.dtype), x)


def _sigmoid_slope(out: Array) -> Array:
    return lax.mul(_less_one(out), out)


def _tanh_slope(out: Array) -> Array:
    return _less_one(lax.square(out))


def _bias_gradient(gates: Array) -> Array:
    """Summed over the batch."""
    return convert(lax.reduce_sum(_wide(gates), (0,)), gates.dtype)


@lowers(aten._thnn_fused_lstm_cell.default)
def lstm_cell(
    input_gates: Array, hidden_gates: Array, cx: Array, input_bias: Array | None = None, hidden_bias: Array | None = None
) -> tuple[Array, Array, Array]:
    """The new hidden and cell states, and the activated gates for the gradient."""
    pairs = zip(_gates(input_gates, input_bias, 4), _gates(hidden_gates, hidden_bias, 4), strict=True)
    into, forget, cell, out = (lax.add(x, h) for x, h in pairs)
    into, forget, cell, out = lax.logistic(into), lax.logistic(forget), lax.tanh(cell), lax.logistic(out)
    cy = lax.add(lax.mul(forget, _wide(cx)), lax.mul(into, cell))
    hy = lax.mul(out, lax.tanh(cy))
    return convert(hy, cx.dtype), convert(cy, cx.dtype), _joined([into, forget, cell, out], input_gates)


@lowers(aten._thnn_fused_lstm_cell_backward_impl.default)
def lstm_cell_backward(
    grad_hy: Array | None, grad_cy: Array | None, cx: Array, cy: Array, workspace: Array, has_bias: bool
) -> tuple[Array | None, ...]:
    """Gradients of the gates (both kinds), of cx and of the biases (both)."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    into, forget, cell, out = _gates(workspace, None, 4)
    tanh = lax.tanh(_wide(cy))
    nothing = lax.full_like(tanh, 0)
    of_hy = nothing if grad_hy is None else _wide(grad_hy)
    of_cy = nothing if grad_cy is None else _wide(grad_cy)
    state = lax.add(lax.mul(lax.mul(of_hy, out), _tanh_slope(tanh)), of_cy)
    gates = [
        lax.mul(lax.mul(state, cell), _sigmoid_slope(into)),
        lax.mul(lax.mul(state, _wide(cx)), _sigmoid_slope(forget)),
        lax.mul(lax.mul(state, into), _tanh_slope(cell)),
        lax.mul(lax.mul(of_hy, tanh), _sigmoid_slope(out)),
    ]
    grad_gates = _joined(gates, workspace)
    return grad_gates, convert(lax.mul(state, forget), cx.dtype), _bias_gradient(grad_gates) if has_bias else None


@lowers(aten._thnn_fused_gru_cell.default)
def gru_cell(
    input_gates: Array, hidden_gates: Array, hx: Array, input_bias: Array | None = None, hidden_bias: Array | None = None
) -> tuple[Array, Array]:
    """The new hidden state, and for the gradient: gates, hx, and the hidden part of the new gate."""
    x_reset, x_update, x_new = _gates(input_gates, input_bias, 3)
    h_reset, h_update, h_new = _gates(hidden_gates, hidden_bias, 3)
    reset, update = lax.logistic(lax.add(x_reset, h_reset)), lax.logistic(lax.add(x_update, h_update))
    new = lax.tanh(lax.add(x_new, lax.mul(reset, h_new)))
    state = _wide(hx)
    hy = lax.add(new, lax.mul(update, lax.sub(state, new)))
    return convert(hy, hx.dtype), _joined([reset, update, new, state, h_new], hx)


@lowers(aten._thnn_fused_gru_cell_backward.default)
def gru_cell_backward(grad_hy: Array, workspace: Array, has_bias: bool) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Gradients of input gates, hidden gates, hx, input bias and hidden bias."""
    reset, update, new, state, h_new = _gates(workspace, None, 5)
    grad = _wide(grad_hy)
    of_update = lax.mul(lax.mul(grad, lax.sub(state, new)), _sigmoid_slope(update))
    of_new = lax.mul(lax.mul(grad, _less_one(update)), _tanh_slope(new))
    of_reset = lax.mul(lax.mul(of_new, h_new), _sigmoid_slope(reset))
    input_gates = _joined([of_reset, of_update, of_new], workspace)
    hidden_gates = _joined([of_reset, of_update, lax.mul(of_new, reset)], workspace)
    biases = (_bias_gradient(input_gates), _bias_gradient(hidden_gates)) if has_bias else (None, None)
    return input_gates, hidden_gates, convert(lax.mul(grad, update), grad_hy.dtype), *biases
