"""torch's own kernels of attention for the CPU, which compute the scores block by block and keep none of them in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..forms import Operand
from . import torch_kernels

# In these orders the kernels return (batch, heads, rows, size) and (batch, heads, rows).
_OUT, _LOGSUMEXP = (0, 2, 1, 3), (0, 2, 1)


def forward(
    query: Array, key: Array, value: Array, mask: Array | None, held: Sequence[Operand], is_causal: bool, scale: float
) -> tuple[Array, Array]:
    """The attended values, and the logarithm of each row's sum of exponentials.

    Shape:  query (batch, heads, rows, size), key and value (batch, heads, columns, size); mask, which is added to the scaled scores, (rows
            or 1, columns or 1), or with (batch or 1, heads or 1) before them. The results: as query; (batch, heads, rows).
    Dtype:  query, key, value and the first result have one; the mask has that or the accumulator's; the accumulator's.

    held: how query, key and value lie in memory; taken so, they are not copied.
    """
    orders = [_taken(x) for x in held]

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        tensors, masks = _turned_back(operands, orders), operands[len(orders) :]
        settings = {"attn_mask": next(iter(masks), None), "scale": scale}
        found = aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, is_causal, **settings)
        for result, values, order in zip(results, found, (_OUT, _LOGSUMEXP), strict=True):
            result.copy_(values.permute(order))

    dtype = query.dtype
    operands = [*_turned((query, key, value), orders), *([] if mask is None else [mask])]
    shapes = [(_permuted(query.shape, _OUT), dtype), (_permuted(query.shape[:3], _LOGSUMEXP), dtypes.accumulator(dtype))]
    out, logsumexp = torch_kernels.call(write, operands, shapes)
    return lax.transpose(out, _OUT), lax.transpose(logsumexp, _LOGSUMEXP)


def backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    out: Array,
    logsumexp: Array,
    held: Sequence[Operand],
    is_causal: bool,
    scale: float,
) -> tuple[Array, Array, Array]:
    """The gradients of query, key and value, each of its operand's shape and dtype. out, logsumexp: the forward's. Others: as for it."""
    orders = [_OUT, *(_taken(x) for x in held), _OUT, _LOGSUMEXP]

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        tensors, masks = _turned_back(operands, orders), operands[len(orders) :]
        settings = {"attn_mask": next(iter(masks), None), "scale": scale}
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal, **settings)
        for result, gradient in zip(results, found, strict=True):
            result.copy_(gradient.permute(_OUT))

    operands = [*_turned((grad, query, key, value, out, logsumexp), orders), *([] if mask is None else [mask])]
    found = torch_kernels.call(write, operands, [(_permuted(x.shape, _OUT), x.dtype) for x in (query, key, value)])
    grad_query, grad_key, grad_value = (lax.transpose(x, _OUT) for x in found)
    return grad_query, grad_key, grad_value


def _taken(operand: Operand) -> tuple[int, ...]:
    """The order in which a tensor is handed to the kernels: its own, if a row's numbers are neighbours there."""
    order = operand.order or (0, 1, 2, 3)
    return order if order[-1] == 3 else (0, 1, 2, 3)


def _turned(arrays: Sequence[Array], orders: Sequence[Sequence[int]]) -> list[Array]:
    """With the dimensions in these orders."""
    return [lax.transpose(x, order) for x, order in zip(arrays, orders, strict=True)]


def _turned_back(tensors: Sequence[torch.Tensor], orders: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The first of the tensors, one for each order."""
    return [x.permute(*np.argsort(order).tolist()) for x, order in zip(tensors, orders, strict=False)]


def _permuted(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[dim] for dim in order)
