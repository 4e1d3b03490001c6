"""Packs a frozen graph's weights in the memory order of the oneDNN kernels that read the weights. Part of `freeze`.

A weight is packed only if it is multiplied with few rows. With many rows, oneDNN's own reordering is a small part of the kernel's time.
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
from ...lowering.epilogue import following_activation
from ...lowering.ops.convolution import CONVOLUTION, ConvolutionProblem
from ...torch_ops import aten

# The maximum number of rows of a matrix, or of positions of a convolution's result. With 1024 rows, oneDNN's own reordering of the weight
# takes a thirtieth of the kernel's time.
_MAX_ROWS = 1024
# The minimum number of elements of a weight. For a smaller weight, the call of a kernel costs more than packing saves. For a single row,
# the minimum is larger: with a smaller weight, XLA's own dot is as fast.
_MIN_ELEMENTS, _MIN_ELEMENTS_ONE_ROW = 1 << 14, 1 << 22


def pack_weights(graph: Graph, fixed: Collection[Node], device: jax.Device, implementations: Mapping[str, str]) -> bool:
    """Makes matrix products and convolutions on the CPU read packed weights.

    Args:
        graph: the graph, which is changed.
        fixed: the parameters, the buffers, and the nodes that depend only on these.
        device: the device of the graph's program.
        implementations: the requested implementation of each op.

    Returns: True if any weight is packed.
    """
    packed_weights: dict[tuple[Node, Packing], Node] = {}
    for node in list(graph.nodes):
        if node.target in (aten.addmm.default, aten.mm.default):
            _pack_product(graph, node, fixed, device, implementations, packed_weights)
        elif node.target is aten.convolution.default:
            _pack_convolution(graph, node, fixed, device, implementations, packed_weights)
    return bool(packed_weights)


def _pack_product(
    graph: Graph,
    node: Node,
    fixed: Collection[Node],
    device: jax.Device,
    implementations: Mapping[str, str],
    packed_weights: dict[tuple[Node, Packing], Node],
) -> None:
    bias, x, weight = node.args if node.target is aten.addmm.default else (None, *node.args)
    if weight not in fixed or x in fixed or node.kwargs or implementations.get("contraction", "onednn") != "onednn":
        return
    (rows, inputs), (_, columns), dtype = _shape(x), _shape(weight), weight.meta["val"].dtype
    if not _is_worthwhile(rows, weight, [x, bias, node]) or (bias is not None and _shape(bias) != (columns,)):
        return
    following = following_activation(node)
    activation = following.name if following is not None and following.name in onednn.ACTIVATIONS else ""
    packing = weight_orders.of_linear(rows, inputs, columns, dtypes.to_jax(dtype), bias is not None, activation, device)
    if packing is not None:
        _replace(graph, node, weight_orders.packed_linear, (x, _packed(graph, node, weight, packing, packed_weights), bias, columns))


def _pack_convolution(
    graph: Graph,
    node: Node,
    fixed: Collection[Node],
    device: jax.Device,
    implementations: Mapping[str, str],
    packed_weights: dict[tuple[Node, Packing], Node],
) -> None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if weight not in fixed or x in fixed or transposed or groups != 1 or len(_shape(weight)) != 4:
        return
    (batch, _, *spatial_sizes), (out_channels, *_) = _shape(node), _shape(weight)
    if not _is_worthwhile(batch * math.prod(spatial_sizes), weight, [x, bias, node]):
        return
    stride, padding, dilation = (tuple(values) * (2 // len(values)) for values in (stride, padding, dilation))
    padding_pairs = tuple((size, size) for size in padding)
    dtype = dtypes.to_jax(weight.meta["val"].dtype)
    precision = lax.Precision.HIGHEST
    problem = ConvolutionProblem(
        _shape(x), _shape(weight), _shape(node), stride, padding_pairs, (1, 1), dilation, 1, False, dtype, precision, "cpu"
    )
    implementation = CONVOLUTION.choose(problem, implementations).name
    if implementation != "onednn" and not (implementation == "patches" and math.prod(_shape(weight)[2:]) == 1):
        return
    batch, channels, *x_spatial_sizes = _shape(x)
    shapes = (batch, *x_spatial_sizes, channels), _shape(weight), (batch, *spatial_sizes, out_channels)
    packing = weight_orders.of_convolution(*shapes, stride, padding_pairs, dilation, dtype, bias is not None, device)
    if packing is not None:
        arguments = [list(_shape(weight)), list(stride), list(padding), list(dilation)]
        _replace(
            graph, node, weight_orders.packed_convolution, (x, _packed(graph, node, weight, packing, packed_weights), bias, *arguments)
        )


def _shape(node: Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def _is_worthwhile(rows: Any, weight: Node, operands: Sequence[Node | None]) -> bool:
    """True if all sizes are fixed, all dtypes are equal and supported by oneDNN, there are few rows, and the weight is large."""
    values = [node.meta["val"] for node in (weight, *operands) if node is not None]
    dtype = weight.meta["val"].dtype
    if not all(type(size) is int for value in values for size in value.shape) or any(value.dtype != dtype for value in values):
        return False
    min_elements = _MIN_ELEMENTS if rows > 1 else _MIN_ELEMENTS_ONE_ROW
    return onednn_support.supports(dtypes.to_jax(dtype)) and 0 < rows <= _MAX_ROWS and weight.meta["val"].numel() >= min_elements


def _packed(graph: Graph, before: Node, weight: Node, order: Packing, packed_weights: dict[tuple[Node, Packing], Node]) -> Node:
    """Returns the node of a packed weight. Adds the node in front of the node `before` if the weight is not packed in this order yet."""
    if (weight, order) not in packed_weights:
        arguments = (weight, list(order.dims), list(order.blocked), list(order.sizes))
        with graph.inserting_before(before):
            node = packed_weights[weight, order] = graph.call_function(weight_orders.pack, arguments)
        value = weight.meta["val"]
        node.meta["val"] = value.new_empty(order.length(_shape(weight)))
    return packed_weights[weight, order]


def _replace(graph: Graph, node: Node, op: Any, args: tuple[Any, ...]) -> None:
    """Replaces a node by the call of another op."""
    with graph.inserting_before(node):
        new = graph.call_function(op, args)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
