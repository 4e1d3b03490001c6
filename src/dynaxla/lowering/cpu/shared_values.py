"""Chooses the values of a graph that XLA:CPU should write to memory, instead of recomputing them for each consumer."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ...torch_ops import aten
from ..graphs import is_view

# Ops whose operands must be in memory, because they call libraries; and the graph's output.
_READERS = frozenset(
    [
        aten.addmm.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.mm.default,
        aten.native_layer_norm.default,
        "output",
    ]
)

# Ops that read their gradient several times, in XLA's loops.
_REREADERS = frozenset(
    [
        aten._fused_rms_norm_backward.default,
        aten.batch_norm_backward.default,
        aten.native_batch_norm_backward.default,
        aten.native_group_norm_backward.default,
    ]
)


def shared_values(graph: Graph, platform: str) -> set[Node]:
    """Returns the nodes whose values should be written to memory (see materialize.py).

    None on platforms other than the CPU, and in graphs without gradients. There, it makes no model faster (measured: measurements.md).
    """
    has_gradients = any(node.op == "call_function" and "_backward" in str(node.target) for node in graph.nodes)
    return {node for node in graph.nodes if _is_shared(node)} if platform == "cpu" and has_gradients else set()


def _is_shared(node: Node) -> bool:
    """True if a computed tensor should be in memory.

    The main case is a tensor with several consumers, which must be in memory for one of them. XLA would recompute the tensor for each other
    consumer, together with all earlier sums of a network's residual path.
    """
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor) or is_view(node):
        return False
    readers = _readers(node)
    if any(reader.target in _REREADERS and reader.args[0] is gradient for reader, gradient in readers):
        return True
    return any(reader.target in _READERS for reader, _ in readers) and any(_rereads(*reader) for reader in readers)


def _rereads(reader: Node, value: Node) -> bool:
    """True if one of XLA's loops reads the value, or a convolution's gradient reads it for several results, each in another layout."""
    if reader.target is aten.convolution_backward.default and reader.args[0] is value:
        return sum(reader.args[10]) > 1
    return reader.target not in _READERS


def _readers(node: Node) -> list[tuple[Node, Node]]:
    """Returns the consumers of a node's values, directly or through views, each with the node or view that it reads."""
    return [reader for user in node.users for reader in (_readers(user) if is_view(user) else [(user, node)])]
