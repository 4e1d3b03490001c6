"""Lowerings of cuDNN's recurrent networks: on NVIDIA GPUs, `nn.RNN`, `nn.LSTM` and `nn.GRU` are one op each.

The backward pass computes the network again, since `reserve`, the data that cuDNN keeps for it, has a private format (torch's fake
implementation returns an empty tensor). PyTorch has no fake implementation of the backward op, so graphs cannot contain it:
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
from ..promotion import convert
from ..registry import lowers
from .recurrent import _gates, _less_one, _wide

_library = torch.library.Library("dynaxla", "FRAGMENT")
_library.define(
    "rnn_gradients(Tensor input, Tensor[] weight, int weight_stride0, Tensor hx, Tensor? cx, Tensor? grad_output, Tensor? grad_hy,"
    " Tensor? grad_cy, int mode, SymInt hidden_size, SymInt proj_size, int num_layers, bool batch_first, bool bidirectional,"
    " SymInt[] batch_sizes, float dropout, Tensor? kept) -> Tensor[]"
)

# Gradients of input, hx, cx (if not None) and each weight, from the gradients of the three results.
rnn_gradients = torch.ops.dynaxla.rnn_gradients.default


@torch.library.register_fake("dynaxla::rnn_gradients", lib=_library)
def _fake_gradients(input: Any, weight: Any, weight_stride0: int, hx: Any, cx: Any, *_: Any) -> list[torch.Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (input, hx, *([] if cx is None else [cx]), *weight)]


# A cell: (gates of the input, gates of the hidden state, old states) -> new states. States are hidden, and cell for an LSTM.
Cell = Callable[[Array, Array, tuple[Array, ...]], tuple[Array, ...]]


def _plain(activation: Callable[[Array], Array]) -> Cell:
    return lambda x, h, _: (activation(lax.add(x, h)),)


def _lstm(x: Array, h: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
    into, forget, new, out = _gates(lax.add(x, h), None, 4)
    cell = lax.add(lax.mul(lax.logistic(forget), states[1]), lax.mul(lax.logistic(into), lax.tanh(new)))
    return lax.mul(lax.logistic(out), lax.tanh(cell)), cell


def _gru(x: Array, h: Array, states: tuple[Array, ...]) -> tuple[Array, ...]:
    (x_reset, x_update, x_new), (h_reset, h_update, h_new) = _gates(x, None, 3), _gates(h, None, 3)
    update = lax.logistic(lax.add(x_update, h_update))
    new = lax.tanh(lax.add(x_new, lax.mul(lax.logistic(lax.add(x_reset, h_reset)), h_new)))
    return (lax.add(lax.mul(_less_one(update), new), lax.mul(update, states[0])),)


# Indexed by cudnnRNNMode_t.
_CELLS: tuple[Cell, ...] = (_plain(lambda x: lax.max(x, lax.full_like(x, 0))), _plain(lax.tanh), _lstm, _gru)


@dataclass(frozen=True)
class _Network:
    """A recurrent network of several layers and one or two directions.

    Attributes:
        per_layer: number of weights of each layer in each direction.
        projects: True if the last of these weights projects an LSTM's hidden state to a smaller size.
        batch_sizes: for packed sequences, the number of active sequences at each step; else empty.
        precision: of the matrix products.
        dropout: probability of dropping an output between layers; used only if a call gets a mask.
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

    def __call__(self, kept: Array | None, x: Array, weights: Sequence[Array], hx: Array, cx: Array | None) -> tuple[Array, ...]:
        """Returns the hidden states of all steps, and the last states; all of one dtype.

        `kept` is the dropout mask between layers, (layers - 1, time, batch, directions * out); None means no dropout.
        """
        x, going_on = self._padded(x)
        found: list[tuple[Array, ...]] = []
        for layer in range(self.layers):
            outputs = []
            for direction in range(self.directions):
                index = layer * self.directions + direction
                own = weights[index * self.per_layer : (index + 1) * self.per_layer]
                states = tuple(lax.index_in_dim(state, index, keepdims=False) for state in (hx, cx) if state is not None)
                last, output = self._layer(x, own, states, going_on, reverse=direction == 1)
                found.append(last)
                outputs.append(output)
            x = lax.concatenate(outputs, 2)
            if kept is not None and layer < self.layers - 1:
                larger = lax.mul(x, lax.full_like(x, 1 / (1 - self.dropout) if self.dropout < 1 else 0))
                x = lax.select(lax.index_in_dim(kept, layer, keepdims=False), larger, lax.full_like(x, 0))
        return self._packed(x), *(_stacked(states) for states in zip(*found, strict=True))

    def _layer(
        self, x: Array, weights: Sequence[Array], states: tuple[Array, ...], going_on: Array | None, reverse: bool
    ) -> tuple[tuple[Array, ...], Array]:
        """Returns the last states, and the hidden states of all steps, of one layer in one direction.

        Shape:  x (time, batch, in).
        """
        of_input, of_hidden, *rest = weights
        projection = rest.pop() if self.projects else None
        gates = self._product(x, of_input, rest[0] if rest else None)

        def step(states: tuple[Array, ...], now: tuple[Array, Array | None]) -> tuple[tuple[Array, ...], Array]:
            gates, goes_on = now
            new = self.cell(gates, self._product(states[0], of_hidden, rest[1] if rest else None), states)
            if projection is not None:
                new = (self._product(new[0], projection, None), *new[1:])
            if goes_on is not None:  # a sequence that has ended, or has not begun, keeps its states
                new = tuple(_where(goes_on, after, before) for after, before in zip(new, states, strict=True))
            return new, new[0]

        return lax.scan(step, states, (gates, going_on), reverse=reverse)

    def _product(self, x: Array, weight: Array, bias: Array | None) -> Array:
        out = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), precision=self.precision)
        return out if bias is None else lax.add(out, lax.broadcast_in_dim(bias, out.shape, (out.ndim - 1,)))

    def _padded(self, x: Array) -> tuple[Array, Array | None]:
        """Returns the input as (time, batch, in), and the mask (time, batch) of active sequences; None if all are active."""
        if not self.batch_sizes:
            return (lax.transpose(x, (1, 0, 2)) if self.batch_first else x), None
        rows, going_on = self._places()
        return x[np.where(going_on, rows, 0)], jax.numpy.asarray(going_on)

    def _packed(self, x: Array) -> Array:
        if not self.batch_sizes:
            return lax.transpose(x, (1, 0, 2)) if self.batch_first else x
        return x[np.nonzero(self._places()[1])]

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row of the packed input for each step of each sequence, and the mask of steps that exist; both (time, batch)."""
        sizes = np.asarray(self.batch_sizes)[:, None]
        sequences = np.arange(self.batch_sizes[0])[None]
        return np.cumsum(sizes, axis=0) - sizes + sequences, sequences < sizes


def _where(condition: Array, yes: Array, no: Array) -> Array:
    """Selects rows of (batch, hidden) arrays by a condition of shape (batch,)."""
    return lax.select(lax.broadcast_in_dim(condition, yes.shape, (0,)), yes, no)


def _stacked(states: Sequence[Array]) -> Array:
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
    """Returns the network, with the matrix precision that torch sets for cuDNN's recurrent networks."""
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
        weight: for each layer, forwards and then backwards, `weight_stride0` arrays: input weight, hidden weight, both biases, projection.
        weight_buf: holds the same values as `weight`; not read.
        mode: 0 relu, 1 tanh, 2 LSTM, 3 GRU.
        batch_sizes: for packed sequences; else empty.
        dropout_state: with dropout, the bool mask of kept elements (see `_Network.__call__`), which capture/decompositions.py draws;
            cuDNN's own state is not read.

    Shape:  x (time, batch, in), with batch_first (batch, time, in), packed (sum of batch_sizes, in); hx (layers * directions, batch, out).
    Dtype:  that of x; computed in float32 for half types.
    Raises: UnsupportedOp for dropout between layers without a drawn mask.
    """
    kept = dropout_state if train and dropout > 0 and num_layers > 1 else None
    if kept is not None and not dtypes.is_bool(kept.dtype):
        raise UnsupportedOp("dropout between the layers of a cuDNN recurrent network, which draws cuDNN's own random numbers")
    network = _network(weight_stride0, mode, proj_size, num_layers, batch_first, bidirectional, batch_sizes, dropout, ctx)
    found = network(kept, _wide(x), [_wide(item) for item in weight], _wide(hx), None if cx is None else _wide(cx))
    out = [convert(result, x.dtype) for result in found]
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
    kept: Array | None,
    *,
    ctx: Context,
) -> list[Array]:
    """Returns gradients of x, hx, cx (if not None) and each weight, with the shape and dtype of their operands."""
    network = _network(weight_stride0, mode, proj_size, num_layers, batch_first, bidirectional, batch_sizes, dropout, ctx)
    operands = [_wide(x), [_wide(item) for item in weight], _wide(hx), None if cx is None else _wide(cx)]
    results, pull = jax.vjp(functools.partial(network, kept), *operands)
    given = [
        lax.full_like(result, 0) if grad is None else _wide(grad)
        for result, grad in zip(results, (grad_output, grad_hy, grad_cy), strict=False)
    ]
    of_x, of_weight, of_hx, of_cx = pull(tuple(given))
    found = [of_x, of_hx, *([] if cx is None else [of_cx]), *of_weight]
    return [convert(grad, spec.jax_dtype) for grad, spec in zip(found, ctx.output, strict=True)]
