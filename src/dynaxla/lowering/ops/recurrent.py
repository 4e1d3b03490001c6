"""Lowerings of the fused LSTM and GRU cells of CUDA (`torch.lstm_cell`, `nn.LSTMCell` and so on), and of oneDNN's LSTM layers on the CPU.

Gates are concatenated in the last dimension: input, forget, cell, output for an LSTM; reset, update, new for a GRU.
Source: ATen native/cuda/RNN.cu
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from ..context import Context
from ..promotion import convert, to_accumulator
from ..registry import lowers


def split_gates(x: Array, bias: Array | None, count: int) -> list[Array]:
    """Returns x plus a bias, split into `count` gates.

    Shape:  x (batch, count * hidden) gives (batch, hidden) for each gate.
    Dtype:  the accumulator's.
    """
    x = to_accumulator(x)
    if bias is not None:
        x = lax.add(x, lax.broadcast_in_dim(to_accumulator(bias), x.shape, (1,)))
    size = x.shape[1] // count
    return [lax.slice_in_dim(x, part * size, (part + 1) * size, axis=1) for part in range(count)]


def _concatenated(parts: list[Array], like: Array) -> Array:
    return convert(lax.concatenate(parts, 1), like.dtype)


def _sigmoid_derivative(out: Array) -> Array:
    return lax.mul(1 - out, out)


def _tanh_derivative(out: Array) -> Array:
    return 1 - lax.square(out)


def _bias_gradient(gates: Array) -> Array:
    """Returns the gradient of a bias: the gradient of the gates, summed over the batch."""
    return convert(lax.reduce_sum(to_accumulator(gates), (0,)), gates.dtype)


@lowers(aten._thnn_fused_lstm_cell.default)
def lstm_cell(
    input_gates: Array, hidden_gates: Array, cx: Array, input_bias: Array | None = None, hidden_bias: Array | None = None
) -> tuple[Array, Array, Array]:
    """Returns the new hidden and cell states, and the activated gates, which the backward op reads.

    Shape:  cx (batch, hidden) and gates (batch, 4 * hidden) give (batch, hidden) twice, and (batch, 4 * hidden).
    Dtype:  that of cx twice, and that of input_gates; computed in float32 for half types.
    """
    pairs = zip(split_gates(input_gates, input_bias, 4), split_gates(hidden_gates, hidden_bias, 4), strict=True)
    input_gate, forget_gate, cell_gate, output_gate = (lax.add(x, h) for x, h in pairs)
    input_gate, forget_gate, cell_gate, output_gate = (
        lax.logistic(input_gate),
        lax.logistic(forget_gate),
        lax.tanh(cell_gate),
        lax.logistic(output_gate),
    )
    cy = lax.add(lax.mul(forget_gate, to_accumulator(cx)), lax.mul(input_gate, cell_gate))
    hy = lax.mul(output_gate, lax.tanh(cy))
    return convert(hy, cx.dtype), convert(cy, cx.dtype), _concatenated([input_gate, forget_gate, cell_gate, output_gate], input_gates)


@lowers(aten._thnn_fused_lstm_cell_backward_impl.default)
def lstm_cell_backward(
    grad_hy: Array | None, grad_cy: Array | None, cx: Array, cy: Array, workspace: Array, has_bias: bool
) -> tuple[Array | None, ...]:
    """Gradients of the gates, of cx and of the biases (None without biases). All are None if neither state has a gradient.

    The input and the hidden gates have the same gradient, and so have the two biases.

    Shape:  (batch, 4 * hidden), (batch, hidden) and (4 * hidden).
    """
    if grad_hy is None and grad_cy is None:
        return None, None, None
    input_gate, forget_gate, cell_gate, output_gate = split_gates(workspace, None, 4)
    tanh = lax.tanh(to_accumulator(cy))
    zeros = lax.full_like(tanh, 0)
    grad_hidden = zeros if grad_hy is None else to_accumulator(grad_hy)
    grad_cell = zeros if grad_cy is None else to_accumulator(grad_cy)
    grad_state = lax.add(lax.mul(lax.mul(grad_hidden, output_gate), _tanh_derivative(tanh)), grad_cell)
    gradients = [
        lax.mul(lax.mul(grad_state, cell_gate), _sigmoid_derivative(input_gate)),
        lax.mul(lax.mul(grad_state, to_accumulator(cx)), _sigmoid_derivative(forget_gate)),
        lax.mul(lax.mul(grad_state, input_gate), _tanh_derivative(cell_gate)),
        lax.mul(lax.mul(grad_hidden, tanh), _sigmoid_derivative(output_gate)),
    ]
    grad_gates = _concatenated(gradients, workspace)
    return grad_gates, convert(lax.mul(grad_state, forget_gate), cx.dtype), _bias_gradient(grad_gates) if has_bias else None


@lowers(aten._thnn_fused_gru_cell.default)
def gru_cell(
    input_gates: Array, hidden_gates: Array, hx: Array, input_bias: Array | None = None, hidden_bias: Array | None = None
) -> tuple[Array, Array]:
    """Returns the new hidden state, and a workspace for the backward op: the activated gates, hx, and the part of the new gate from hx.

    Shape:  hx (batch, hidden) and gates (batch, 3 * hidden) give (batch, hidden) and (batch, 5 * hidden).
    Dtype:  both: that of hx; computed in float32 for half types.
    """
    x_reset, x_update, x_new = split_gates(input_gates, input_bias, 3)
    h_reset, h_update, h_new = split_gates(hidden_gates, hidden_bias, 3)
    reset, update = lax.logistic(lax.add(x_reset, h_reset)), lax.logistic(lax.add(x_update, h_update))
    new = lax.tanh(lax.add(x_new, lax.mul(reset, h_new)))
    state = to_accumulator(hx)
    hy = lax.add(new, lax.mul(update, lax.sub(state, new)))
    return convert(hy, hx.dtype), _concatenated([reset, update, new, state, h_new], hx)


@lowers(aten._thnn_fused_gru_cell_backward.default)
def gru_cell_backward(grad_hy: Array, workspace: Array, has_bias: bool) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Gradients of input gates, hidden gates, hx, input bias and hidden bias. The last two are None without biases.

    Shape:  (batch, 3 * hidden) twice, (batch, hidden), and (3 * hidden) twice.
    """
    reset, update, new, state, h_new = split_gates(workspace, None, 5)
    grad = to_accumulator(grad_hy)
    grad_update = lax.mul(lax.mul(grad, lax.sub(state, new)), _sigmoid_derivative(update))
    grad_new = lax.mul(lax.mul(grad, 1 - update), _tanh_derivative(new))
    grad_reset = lax.mul(lax.mul(grad_new, h_new), _sigmoid_derivative(reset))
    grad_input_gates = _concatenated([grad_reset, grad_update, grad_new], workspace)
    grad_hidden_gates = _concatenated([grad_reset, grad_update, lax.mul(grad_new, reset)], workspace)
    grad_biases = (_bias_gradient(grad_input_gates), _bias_gradient(grad_hidden_gates)) if has_bias else (None, None)
    return grad_input_gates, grad_hidden_gates, convert(lax.mul(grad, update), grad_hy.dtype), *grad_biases


# --- oneDNN's recurrent layers, on CPU

_LSTM = 2  # the value of `mode` for an LSTM, ideep's rnn_kind


def _layer(
    x: Array, weights: tuple[Array, ...], hx: Array, cx: Array, has_biases: bool, reverse: bool, precision: lax.Precision
) -> tuple[Array, Array, Array]:
    """Returns the hidden states of all steps, and the last hidden and cell states, of an LSTM layer in one direction.

    Shape:  x (time, batch, in), hx and cx (batch, hidden) give (time, batch, hidden), and (batch, hidden) twice.
    """
    input_weight, hidden_weight, *biases = weights
    gates = lax.dot_general(x, to_accumulator(input_weight), (((2,), (1,)), ((), ())), precision=precision)
    for bias in biases if has_biases else ():
        gates = lax.add(gates, lax.broadcast_in_dim(to_accumulator(bias), gates.shape, (2,)))
    wide_hidden_weight = to_accumulator(hidden_weight)

    def step(state: tuple[Array, Array], gates_of_step: Array) -> tuple[tuple[Array, Array], Array]:
        hidden, cell = state
        gates_of_step = lax.add(gates_of_step, lax.dot_general(hidden, wide_hidden_weight, (((1,), (1,)), ((), ())), precision=precision))
        input_gate, forget_gate, cell_gate, output_gate = split_gates(gates_of_step, None, 4)
        cell = lax.add(lax.mul(lax.logistic(forget_gate), cell), lax.mul(lax.logistic(input_gate), lax.tanh(cell_gate)))
        hidden = lax.mul(lax.logistic(output_gate), lax.tanh(cell))
        return (hidden, cell), hidden

    (hy, cy), states = lax.scan(step, (hx, cx), gates, reverse=reverse)
    return states, hy, cy


def _check_layer(batch_sizes: Sequence[int], mode: int) -> None:
    if mode != _LSTM or batch_sizes:
        raise UnsupportedOp("a recurrent layer of oneDNN that is not an LSTM, or that has packed sequences")


@lowers(aten.mkldnn_rnn_layer.default)
def rnn_layer(
    x: Array,
    weight0: Array,
    weight1: Array,
    weight2: Array,
    weight3: Array,
    hx: Array,
    cx: Array,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
    *,
    ctx: Context,
) -> tuple[Array, ...]:
    """One LSTM layer in one direction: returns the outputs of all steps, the last hidden and cell states, and a workspace.

    The workspace is zeros, since its format is private to oneDNN. `rnn_layer_backward` computes the layer again instead of reading it.

    Shape:  x (time, batch, in), regardless of batch_first, gives (time, batch, hidden); the states have the shapes of hx and cx.
    Raises: UnsupportedOp for layers other than LSTM's, and for packed sequences.
    """
    _check_layer(batch_sizes, mode)
    hx, cx = (to_accumulator(lax.reshape(state, (x.shape[1], hidden_size))) for state in (hx, cx))
    results = _layer(to_accumulator(x), (weight0, weight1, weight2, weight3), hx, cx, has_biases, reverse, ctx.settings.matmul_precision)
    out = [convert(lax.reshape(result, spec.shape), spec.jax_dtype) for result, spec in zip(results, ctx.output, strict=False)]
    return *out, lax.full(ctx.output[3].shape, 0, ctx.output[3].jax_dtype)


@lowers(aten.mkldnn_rnn_layer_backward.default)
def rnn_layer_backward(
    x: Array,
    weight0: Array,
    weight1: Array,
    weight2: Array,
    weight3: Array,
    hx: Array,
    cx: Array,
    output: Array,
    hy: Array,
    cy: Array,
    grad_output: Array | None,
    grad_hy: Array | None,
    grad_cy: Array | None,
    reverse: bool,
    mode: int,
    hidden_size: int,
    layers: int,
    has_biases: bool,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    batch_first: bool,
    workspace: Array,
    *,
    ctx: Context,
) -> tuple[Array, ...]:
    """Gradients of x, both weights, both biases (which have the same gradient) and both states, each with the shape of its operand."""
    _check_layer(batch_sizes, mode)
    shape = (x.shape[1], hidden_size)
    hx, cx = (to_accumulator(lax.reshape(state, shape)) for state in (hx, cx))
    bias = lax.full((4 * hidden_size,), 0, hx.dtype)  # the sum of both biases; ATen returns a bias gradient also without biases
    if has_biases:
        bias = lax.add(to_accumulator(weight2), to_accumulator(weight3))
    zeros = lax.full_like(bias, 0)

    def layer(x: Array, weight0: Array, weight1: Array, bias: Array, hx: Array, cx: Array) -> tuple[Array, Array, Array]:
        return _layer(x, (weight0, weight1, bias, zeros), hx, cx, True, reverse, ctx.settings.matmul_precision)

    results, vjp = jax.vjp(layer, to_accumulator(x), to_accumulator(weight0), to_accumulator(weight1), bias, hx, cx)
    cotangents = [
        lax.full_like(result, 0) if grad is None else to_accumulator(lax.reshape(grad, result.shape))
        for result, grad in zip(results, (grad_output, grad_hy, grad_cy), strict=True)
    ]
    grad_x, grad_weight0, grad_weight1, grad_bias, grad_hx, grad_cx = vjp(tuple(cotangents))
    if not has_biases and ctx.output[3].shape != grad_bias.shape:  # torch 2.11 returns zeros of a weight's shape for a missing bias
        grad_bias = lax.full(ctx.output[3].shape, 0, grad_bias.dtype)
    gradients = (grad_x, grad_weight0, grad_weight1, grad_bias, grad_bias, grad_hx, grad_cx)
    return tuple(convert(lax.reshape(grad, spec.shape), spec.jax_dtype) for grad, spec in zip(gradients, ctx.output, strict=True))
