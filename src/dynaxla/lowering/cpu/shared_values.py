"""Values of a graph that XLA:CPU should compute once, for all who read them."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..graphs import is_view
from . import weight_orders

aten = torch.ops.aten

# What these read must be in memory, as what is returned.
_READERS = frozenset(
    [
        aten.addmm.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.mm.default,
        aten.native_layer_norm.default,
        weight_orders.packed_convolution,
        weight_orders.packed_linear,
        "output",
    ]
)

# What goes over its gradient several times, in loops of XLA's.
_REREADERS = frozenset(
    [
        aten._fused_rms_norm_backward.default,
        aten.batch_norm_backward.default,
        aten.native_batch_norm_backward.default,
        aten.native_group_norm_backward.default,
    ]
)


def shared_values(graph: Graph, platform: str) -> set[Node]:
    """The nodes of a graph whose values all readers should find in memory: see in_memory.py."""
    return {node for node in graph.nodes if _is_shared(node)} if platform == "cpu" else set()


def _is_shared(node: Node) -> bool:
    """Whether a computed tensor must be in memory for one of its readers, and is read again: that should be done there, too. XLA computes
    it for each reading anew, and so all sums of a network's residual path before it."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor) or is_view(node):
        return False
    if _is_cut(node):
        return True
    readers = _readers(node)
    if any(reader.target in _REREADERS and reader.args[0] is gradient for reader, gradient in readers):
        return True
    return any(reader.target in _READERS for reader, _ in readers) and any(_rereads(*reader) for reader in readers)


def _is_cut(node: Node) -> bool:
    """Whether all of it is read, in slices: the gradient of a concatenation. XLA's loop over the sum of many such, each computed there, has
    more operands than it can vectorize."""
    sizes = [user.meta["val"].numel() for user in node.users if user.target is aten.slice.Tensor]
    size = node.meta["val"].numel()
    return len(sizes) > 1 and all(isinstance(count, int) for count in (size, *sizes)) and sum(sizes) >= size


def _rereads(reader: Node, value: Node) -> bool:
    """Whether a loop of XLA's reads it, or a convolution's gradients, each of which may want it in another shape."""
    if reader.target is aten.convolution_backward.default and reader.args[0] is value:
        return sum(reader.args[10]) > 1
    return reader.target not in _READERS


def _readers(node: Node) -> list[tuple[Node, Node]]:
    """What reads a node's numbers, also by way of views: each with the node or view that it reads."""
    return [reader for user in node.users for reader in (_readers(user) if is_view(user) else [(user, node)])]
