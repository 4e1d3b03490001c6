"""Values of a graph that XLA:CPU should compute once, for all who read them."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ...torch_ops import aten
from ..graphs import is_view
from . import weight_orders

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

# Functions that XLA's loops compute for each number, and what it makes of complex ones.
_FUNCTIONS = frozenset(
    [
        aten.cos.default,
        aten.erf.default,
        aten.erfinv.default,
        aten.exp.default,
        aten.exp2.default,
        aten.expm1.default,
        aten.log.default,
        aten.log1p.default,
        aten.polar.default,
        aten.pow.Scalar,
        aten.pow.Tensor_Scalar,
        aten.pow.Tensor_Tensor,
        aten.sigmoid.default,
        aten.sin.default,
        aten.softplus.default,
        aten.tanh.default,
    ]
)
# As many numbers as are worth a loop of their own, if another one reads each so many times.
_NUMBERS, _TIMES = 1024, 4


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
    if any(reader.target in _READERS for reader, _ in readers) and any(_rereads(*reader) for reader in readers):
        return True
    return any(_repeats(reader, given, node) for reader, given in readers) and _has_function(node)


def _repeats(reader: Node, given: Node, node: Node) -> bool:
    """Whether a loop over more numbers would compute a node's anew for each of them. given: the node, or the view of it that is read.

    Along the last dimension that loop computes a number once.
    """
    if not _is_pointwise(reader):
        return False
    size, read, value = node.meta["val"].numel(), reader.meta["val"].numel(), given.meta["val"]
    if not all(isinstance(number, int) for number in (size, read)) or size < _NUMBERS or read < _TIMES * size:
        return False
    return value.dim() > 0 and value.shape[-1] != 1 and value.stride(-1) != 0


def _has_function(node: Node) -> bool:
    """Whether a node's loop computes a function."""
    seen, left = set(), [node]
    while left:
        if (each := left.pop()) in seen or not (_is_pointwise(each) or is_view(each)):
            continue
        if each.target in _FUNCTIONS:
            return True
        seen.add(each)
        left += each.all_input_nodes
    return False


def _is_pointwise(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target in (aten._to_copy.default, aten.polar.default)


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
