"""Calls of torch's flash attention kernels for the CPU, which compute the scores block by block and never store all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jax import Array, lax

from ...torch_ops import aten
from .. import dtypes
from ..implementations import Operand
from . import torch_kernels

# The memory orders in which the kernels return (batch, heads, rows, size) and (batch, heads, rows).
_OUT_ORDER, _LOGSUMEXP_ORDER = (0, 2, 1, 3), (0, 2, 1)


def forward(
    query: Array, key: Array, value: Array, mask: Array | None, operand_specs: Sequence[Operand], is_causal: bool, scale: float
) -> tuple[Array, Array]:
    """Returns the attention output, and the log-sum-exp of each row of scores.

    Args:
        mask: The mask, which is added to the scaled scores; or None.
        operand_specs: The metadata of query, key and value. Their memory orders let the kernels read the operands without copies.
        is_causal: True if row i attends to columns 0 to i only.
        scale: The factor of the scores.

    Shape:  query (batch, heads, rows, size), key and value (batch, heads, columns, size); mask (rows or 1, columns or 1), or with (batch or
            1, heads or 1) before them. Results: that of query; (batch, heads, rows).
    Dtype:  query, key, value and the output have the same; the mask has that or the accumulator's; log-sum-exp has the accumulator's.
    """
    orders = [_kernel_order(x) for x in operand_specs]

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        tensors, masks = _from_orders(operands, orders), operands[len(orders) :]
        settings = {"attn_mask": next(iter(masks), None), "scale": scale}
        kernel_results = aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, is_causal, **settings)
        for result, values, order in zip(results, kernel_results, (_OUT_ORDER, _LOGSUMEXP_ORDER), strict=True):
            result.copy_(values.permute(order))

    dtype = query.dtype
    operands = [*_to_orders((query, key, value), orders), *([] if mask is None else [mask])]
    shapes = [(_permuted(query.shape, _OUT_ORDER), dtype), (_permuted(query.shape[:3], _LOGSUMEXP_ORDER), dtypes.accumulator(dtype))]
    out, logsumexp = torch_kernels.call(write, operands, shapes)
    return lax.transpose(out, _OUT_ORDER), lax.transpose(logsumexp, _LOGSUMEXP_ORDER)


def backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    out: Array,
    logsumexp: Array,
    operand_specs: Sequence[Operand],
    is_causal: bool,
    scale: float,
) -> tuple[Array, Array, Array]:
    """Returns the gradients of query, key and value, each of its operand's shape and dtype.

    `out` and `logsumexp` are the results of `forward`; the other arguments are as for `forward`.
    """
    orders = [_OUT_ORDER, *(_kernel_order(x) for x in operand_specs), _OUT_ORDER, _LOGSUMEXP_ORDER]

    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        tensors, masks = _from_orders(operands, orders), operands[len(orders) :]
        settings = {"attn_mask": next(iter(masks), None), "scale": scale}
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal, **settings)
        for result, gradient in zip(results, gradients, strict=True):
            result.copy_(gradient.permute(_OUT_ORDER))

    operands = [*_to_orders((grad, query, key, value, out, logsumexp), orders), *([] if mask is None else [mask])]
    gradients = torch_kernels.call(write, operands, [(_permuted(x.shape, _OUT_ORDER), x.dtype) for x in (query, key, value)])
    grad_query, grad_key, grad_value = (lax.transpose(x, _OUT_ORDER) for x in gradients)
    return grad_query, grad_key, grad_value


def _kernel_order(operand: Operand) -> tuple[int, ...]:
    """Returns the memory order in which the kernels get an operand: its own if the last dimension is contiguous, else row-major."""
    order = operand.order or (0, 1, 2, 3)
    return order if order[-1] == 3 else (0, 1, 2, 3)


def _to_orders(arrays: Sequence[Array], orders: Sequence[Sequence[int]]) -> list[Array]:
    """Transposes each array to its order."""
    return [lax.transpose(x, order) for x, order in zip(arrays, orders, strict=True)]


def _from_orders(tensors: Sequence[torch.Tensor], orders: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Undoes `_to_orders` for the first len(orders) tensors. Returns these tensors."""
    return [x.permute(*np.argsort(order).tolist()) for x, order in zip(tensors, orders, strict=False)]


def _permuted(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[dim] for dim in order)
