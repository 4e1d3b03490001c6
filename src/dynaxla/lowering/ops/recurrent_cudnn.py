"""Lowerings of cuDNN's recurrent networks: on NVIDIA GPUs, `nn.RNN`, `nn.LSTM` and `nn.GRU` are one op each.

The backward pass computes the network again: `reserve`, the data that cuDNN saves for the backward pass, has a private format (torch's fake
implementation returns an empty tensor). PyTorch has no fake implementation of the backward op, so graphs cannot contain that op:
capture/decompositions.py replaces it by `rnn_gradients`.
Source: ATen native/cudnn/RNN.cpp, _cudnn_rnn and _cudnn_rnn_backward
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..promotion import convert, to_accumulator
from ..registry import lowers
from .recurrent import split_gates

_library = torch.library.Library("dynaxla", "FRAGMENT")
_library.define(
    "rnn_gradients(Tensor input, Tensor[] weight, int weight_stride0, Tensor hx, Tensor? cx, Tensor? grad_output, Tensor? grad_hy,"
    " Tensor? grad_cy, int mode, SymInt hidden_size, SymInt proj_size, int num_layers, bool batch_first, bool bidirectional,"
    " SymInt[] batch_sizes, float dropout, Tensor? dropout_mask) -> Tensor[]"
)

# Gradients of input, hx, cx (if not None) and each weight, from the gradients of the three results. `dropout_mask` is that of
# `_Network.__call__`.
rnn_gradients = torch.ops.dynaxla.rnn_gradients.default


@torch.library.register_fake("dynaxla::rnn_gradients", lib=_library)
def _fake_gradients(input: Any, weight: Any, weight_stride0: int, hx: Any, cx: Any, *_: Any) -> list[torch.Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (input, hx, *([] if cx is None else [cx]), *weight)]


# A cell returns the new states, from the gates of the input, the gates of the hidden state, and the old states. The states are the hidden
# state and, for an LSTM, the cell state.
Cell = Callable[[Array, Array, tuple[Array, ...]], tuple[Array, ...]]


def _elman_cell(activation: Callable[[Array], Array]) -> Cell:
    return lambda x, h, _: (activation(lax.add(x, h)),)


def _lstm_cell(x: Array, h: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
    input_gate, forget_gate, cell_gate, output_gate = split_gates(lax.add(x, h), None, 4)
    cell = lax.add(lax.mul(lax.logistic(forget_gate), states[1]), lax.mul(lax.logistic(input_gate), lax.tanh(cell_gate)))
    return lax.mul(lax.logistic(output_gate), lax.tanh(cell)), cell


def _gru_cell(x: Array, h: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
    (x_reset, x_update, x_new), (h_reset, h_update, h_new) = split_gates(x, None, 3), split_gates(h, None, 3)
    update = lax.logistic(lax.add(x_update, h_update))
    new = lax.tanh(lax.add(x_new, lax.mul(lax.logistic(lax.add(x_reset, h_reset)), h_new)))
    return (lax.add(lax.mul(1 - update, new), lax.mul(update, states[0])),)


# Indexed by cudnnRNNMode_t.
_CELLS: tuple[Cell, ...] = (_elman_cell(lambda x: lax.max(x, lax.full_like(x, 0))), _elman_cell(lax.tanh), _lstm_cell, _gru_cell)


@dataclass(frozen=True)
class _Network:
    """A recurrent network of several layers and one or two directions.

    Attributes:
        cell: The function that computes the new states.
        layers: The number of layers.
        directions: 2 for a bidirectional network, else 1.
        per_layer: The number of weights of each layer in each direction.
        projects: True if the last of these weights projects an LSTM's hidden state to a smaller size.
        batch_first: True if the first dimension of the input and the output is the batch.
        batch_sizes: For packed sequences, the number of active sequences at each step. Else empty.
        precision: The precision of the matrix products.
        dropout: The probability of dropping an output between layers. Used only in calls with a dropout mask.
    """

    cell: Cell
    layers: int
    directions: int
    per_layer: int
    projects: bool
    batch_first: bool
    batch_sizes: tuple[int, ...]
    precision: lax.Precision
    dropout: float

    def __call__(self, dropout_mask: Array | None, x: Array, weights: Sequence[Array], hx: Array, cx: Array | None) -> tuple[Array, ...]:
        """Returns the hidden states of all steps, and the last hidden states and, for an LSTM, cell states. All arrays have one dtype.

        `dropout_mask` is True for the kept outputs of all layers but the last: bool (layers - 1, time, batch, directions * out). None means
        no dropout.
        """
        x, active = self._padded(x)
        last_states: list[tuple[Array, ...]] = []
        for layer in range(self.layers):
            outputs = []
            for direction in range(self.directions):
                index = layer * self.directions + direction
                layer_weights = weights[index * self.per_layer : (index + 1) * self.per_layer]
                states = tuple(lax.index_in_dim(state, index, keepdims=False) for state in (hx, cx) if state is not None)
                last, output = self._layer(x, layer_weights, states, active, reverse=direction == 1)
                last_states.append(last)
                outputs.append(output)
            x = lax.concatenate(outputs, 2)
            if dropout_mask is not None and layer < self.layers - 1:
                scaled = lax.mul(x, lax.full_like(x, 1 / (1 - self.dropout) if self.dropout < 1 else 0))
                x = lax.select(lax.index_in_dim(dropout_mask, layer, keepdims=False), scaled, lax.full_like(x, 0))
        return self._packed(x), *(_stack_states(states) for states in zip(*last_states, strict=True))

    def _layer(
        self, x: Array, weights: Sequence[Array], states: tuple[Array, ...], active: Array | None, reverse: bool
    ) -> tuple[tuple[Array, ...], Array]:
        """Returns the last states, and the hidden states of all steps, of one layer in one direction.

        Shape:  x (time, batch, in).
        """
        input_weight, hidden_weight, *other_weights = weights
        projection = other_weights.pop() if self.projects else None
        gates = self._product(x, input_weight, other_weights[0] if other_weights else None)

        def step(states: tuple[Array, ...], inputs: tuple[Array, Array | None]) -> tuple[tuple[Array, ...], Array]:
            gates, is_active = inputs
            new = self.cell(gates, self._product(states[0], hidden_weight, other_weights[1] if other_weights else None), states)
            if projection is not None:
                new = (self._product(new[0], projection, None), *new[1:])
            if is_active is not None:  # a sequence that has ended, or has not begun, keeps its states
                new = tuple(_select_rows(is_active, after, before) for after, before in zip(new, states, strict=True))
            return new, new[0]

        return lax.scan(step, states, (gates, active), reverse=reverse)

    def _product(self, x: Array, weight: Array, bias: Array | None) -> Array:
        out = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=self.precision)
        return out if bias is None else lax.add(out, lax.broadcast_in_dim(bias, out.shape, (out.ndim - 1,)))

    def _padded(self, x: Array) -> tuple[Array, Array | None]:
        """Returns the input as (time, batch, in), and the mask (time, batch) of active sequences; None if all are active."""
        if not self.batch_sizes:
            return (lax.transpose(x, (1, 0, 2)) if self.batch_first else x), None
        rows, active = self._packed_rows()
        return x[np.where(active, rows, 0)], jax.numpy.asarray(active)

    def _packed(self, x: Array) -> Array:
        """Returns outputs (time, batch, out) in the format of the input: packed, or with the batch first; the inverse of `_padded`."""
        if not self.batch_sizes:
            return lax.transpose(x, (1, 0, 2)) if self.batch_first else x
        return x[np.nonzero(self._packed_rows()[1])]

    def _packed_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row of the packed input for each step of each sequence, and the mask of steps that exist; both (time, batch)."""
        sizes = np.asarray(self.batch_sizes)[:, None]
        sequences = np.arange(self.batch_sizes[0])[None]
        return np.cumsum(sizes, axis=0) - sizes + sequences, sequences < sizes


def _select_rows(condition: Array, on_true: Array, on_false: Array) -> Array:
    """Selects rows of (batch, hidden) arrays by a condition of shape (batch,)."""
    return lax.select(lax.broadcast_in_dim(condition, on_true.shape, (0,)), on_true, on_false)


def _stack_states(states: Sequence[Array]) -> Array:
    return lax.concatenate([lax.expand_dims(state, (0,)) for state in states], 0)


def _network(
    per_layer: int,
    mode: int,
    projection: int,
    layers: int,
    batch_first: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout: float,
    ctx: Context,
) -> _Network:
    """Returns the network, with the precision that torch's settings give for cuDNN's recurrent networks."""
    precision, directions = ctx.settings.recurrent_precision, 2 if bidirectional else 1
    return _Network(_CELLS[mode], layers, directions, per_layer, projection > 0, batch_first, tuple(batch_sizes), precision, dropout)


@lowers(aten._cudnn_rnn.default)
def cudnn_rnn(
    x: Array,
    weight: Sequence[Array],
    weight_stride0: int,
    weight_buf: Array | None,
    hx: Array,
    cx: Array | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Array | None,
    *,
    ctx: Context,
) -> tuple[Array | None, ...]:
    """Returns the outputs of all steps, the last hidden and cell states, an empty reserve, and weight_buf unchanged.

    Args:
        weight: For each layer, forwards and then backwards, `weight_stride0` arrays: input weight, hidden weight, both biases, projection.
        weight_buf: An array with the same values as `weight`, which is not read.
        mode: 0 relu, 1 tanh, 2 LSTM, 3 GRU.
        batch_sizes: For packed sequences, the number of active sequences at each step. Else empty.
        dropout_state: With dropout, the bool mask of kept elements (see `_Network.__call__`), which capture/decompositions.py draws.
            cuDNN's own state is not read.

    Shape:  x (time, batch, in), with batch_first (batch, time, in), packed (sum of batch_sizes, in); hx (layers * directions, batch, out).
    Dtype:  that of x; computed in float32 for half types.
    Raises: UnsupportedOp for dropout between layers without a drawn mask.
    """
    dropout_mask = dropout_state if train and dropout > 0 and num_layers > 1 else None
    if dropout_mask is not None and not dtypes.is_bool(dropout_mask.dtype):
        raise UnsupportedOp("dropout between the layers of a cuDNN recurrent network, which draws cuDNN's own random numbers")
    network = _network(weight_stride0, mode, proj_size, num_layers, batch_first, bidirectional, batch_sizes, dropout, ctx)
    results = network(
        dropout_mask,
        to_accumulator(x),
        [to_accumulator(item) for item in weight],
        to_accumulator(hx),
        None if cx is None else to_accumulator(cx),
    )
    out = [convert(result, x.dtype) for result in results]
    if cx is None:
        out.append(lax.full(ctx.output[2].shape, 0, ctx.output[2].jax_dtype))
    return *out, lax.full(ctx.output[3].shape, 0, ctx.output[3].jax_dtype), weight_buf


@lowers(rnn_gradients)
def _gradients(
    x: Array,
    weight: Sequence[Array],
    weight_stride0: int,
    hx: Array,
    cx: Array | None,
    grad_output: Array | None,
    grad_hy: Array | None,
    grad_cy: Array | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout: float,
    dropout_mask: Array | None,
    *,
    ctx: Context,
) -> list[Array]:
    """Returns the gradients of x, hx, cx (if not None) and each weight, each with the shape and dtype of its operand."""
    network = _network(weight_stride0, mode, proj_size, num_layers, batch_first, bidirectional, batch_sizes, dropout, ctx)
    operands = [
        to_accumulator(x),
        [to_accumulator(item) for item in weight],
        to_accumulator(hx),
        None if cx is None else to_accumulator(cx),
    ]
    results, vjp = jax.vjp(functools.partial(network, dropout_mask), *operands)
    cotangents = [
        lax.full_like(result, 0) if grad is None else to_accumulator(grad)
        for result, grad in zip(results, (grad_output, grad_hy, grad_cy), strict=False)
    ]
    grad_x, grad_weight, grad_hx, grad_cx = vjp(tuple(cotangents))
    gradients = [grad_x, grad_hx, *([] if cx is None else [grad_cx]), *grad_weight]
    return [convert(grad, spec.jax_dtype) for grad, spec in zip(gradients, ctx.output, strict=True)]
