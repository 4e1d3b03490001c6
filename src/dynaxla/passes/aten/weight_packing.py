"""Packs a frozen graph's weights in the memory order of the oneDNN kernels that read them. Part of `freeze`.

A weight is packed only if few rows are multiplied with it: otherwise reordering takes a small part of the kernel's time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from torch.fx import Graph, Node

from ...lowering import dtypes
from ...lowering.cpu import onednn, onednn_support, weight_orders
from ...lowering.cpu.weight_orders import Packing
from ...lowering.epilogue import follow
from ...lowering.ops.convolution import CONVOLUTION, Convolution
from ...torch_ops import aten

# The most rows of a matrix, or positions of a convolution's result. With so many, packing takes a thirtieth of the kernel's time.
_MANY_ROWS = 1024
# The least elements of a weight. Below _SMALL, the call of a kernel costs more than packing. With a single row, XLA's own dot is as fast
# below _SMALL_FOR_ONE_ROW.
_SMALL, _SMALL_FOR_ONE_ROW = 1 << 14, 1 << 22


def pack_weights(graph: Graph, fixed: Collection[Node], device: jax.Device, forms: Mapping[str, str]) -> bool:
    """Makes matrix products and convolutions on the CPU read packed weights.

    Args:
        graph: the graph, which is changed.
        fixed: parameters, buffers, and the nodes that depend only on them.
        device: the device that the graph will run on.
        forms: the requested implementation of each op.

    Returns: True if any weight is packed.
    """
    made: dict[tuple[Node, Packing], Node] = {}
    for node in list(graph.nodes):
        if node.target in (aten.addmm.default, aten.mm.default):
            _pack_product(graph, node, fixed, device, forms, made)
        elif node.target is aten.convolution.default:
            _pack_convolution(graph, node, fixed, device, forms, made)
    return bool(made)


def _pack_product(
    graph: Graph, node: Node, fixed: Collection[Node], device: jax.Device, forms: Mapping[str, str], made: dict[tuple[Node, Packing], Node]
) -> None:
    bias, x, weight = node.args if node.target is aten.addmm.default else (None, *node.args)
    if weight not in fixed or x in fixed or node.kwargs or forms.get("contraction", "onednn") != "onednn":
        return
    (rows, inputs), (_, columns), dtype = _shape(x), _shape(weight), weight.meta["val"].dtype
    if not _is_worthwhile(rows, weight, [x, bias, node]) or (bias is not None and _shape(bias) != (columns,)):
        return
    following = follow(node)
    activation = following.name if following is not None and following.name in onednn.ACTIVATIONS else ""
    found = weight_orders.of_linear(rows, inputs, columns, dtypes.to_jax(dtype), bias is not None, activation, device)
    if found is not None:
        _replace(graph, node, weight_orders.packed_linear, (x, _packed(graph, node, weight, found, made), bias, columns))


def _pack_convolution(
    graph: Graph, node: Node, fixed: Collection[Node], device: jax.Device, forms: Mapping[str, str], made: dict[tuple[Node, Packing], Node]
) -> None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if weight not in fixed or x in fixed or transposed or groups != 1 or len(_shape(weight)) != 4:
        return
    (batch, _, *space), (out, *_) = _shape(node), _shape(weight)
    if not _is_worthwhile(batch * math.prod(space), weight, [x, bias, node]):
        return
    stride, padding, dilation = (tuple(values) * (2 // len(values)) for values in (stride, padding, dilation))
    margins = tuple((margin, margin) for margin in padding)
    dtype = dtypes.to_jax(weight.meta["val"].dtype)
    exact = lax.Precision.HIGHEST
    problem = Convolution(_shape(x), _shape(weight), _shape(node), stride, margins, (1, 1), dilation, 1, False, dtype, exact, "cpu")
    form = CONVOLUTION.choose(problem, forms).name
    if form != "onednn" and not (form == "patches" and math.prod(_shape(weight)[2:]) == 1):
        return
    batch, channels, *places = _shape(x)
    shapes = (batch, *places, channels), _shape(weight), (batch, *space, out)
    found = weight_orders.of_convolution(*shapes, stride, margins, dilation, dtype, bias is not None, device)
    if found is not None:
        arguments = [list(_shape(weight)), list(stride), list(padding), list(dilation)]
        _replace(graph, node, weight_orders.packed_convolution, (x, _packed(graph, node, weight, found, made), bias, *arguments))


def _shape(node: Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def _is_worthwhile(rows: Any, weight: Node, others: Sequence[Node | None]) -> bool:
    """True if all sizes are fixed, all dtypes are the same and supported by oneDNN, the rows are few and the weight is large."""
    values = [node.meta["val"] for node in (weight, *others) if node is not None]
    dtype = weight.meta["val"].dtype
    if not all(type(size) is int for value in values for size in value.shape) or any(value.dtype != dtype for value in values):
        return False
    least = _SMALL if rows > 1 else _SMALL_FOR_ONE_ROW
    return onednn_support.takes(dtypes.to_jax(dtype)) and 0 < rows <= _MANY_ROWS and weight.meta["val"].numel() >= least


def _packed(graph: Graph, before: Node, weight: Node, order: Packing, made: dict[tuple[Node, Packing], Node]) -> Node:
    if (weight, order) not in made:
        arguments = (weight, list(order.dims), list(order.blocked), list(order.sizes))
        with graph.inserting_before(before):
            node = made[weight, order] = graph.call_function(weight_orders.pack, arguments)
        value = weight.meta["val"]
        node.meta["val"] = value.new_empty(order.length(_shape(weight)))
    return made[weight, order]


def _replace(graph: Graph, node: Node, op: Any, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(op, args)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
