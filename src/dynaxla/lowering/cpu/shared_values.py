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

# Costly functions that XLA's loops evaluate per element. Some of them (such as aten.polar) call others.
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
# A value of at least _MIN_ELEMENTS elements is worth its own loop if another loop reads each element at least _MIN_READS times.
_MIN_ELEMENTS, _MIN_READS = 1024, 4


def shared_values(graph: Graph, platform: str) -> set[Node]:
    """Returns the nodes whose values should be written to memory (see materialize.py); none on platforms other than the CPU."""
    return {node for node in graph.nodes if _is_shared(node)} if platform == "cpu" else set()


def _is_shared(node: Node) -> bool:
    """True if a computed tensor should be in memory.

    The main case is a tensor with several consumers, which must be in memory for one of them. XLA would recompute the tensor for each other
    consumer, together with all earlier sums of a network's residual path.
    """
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor) or is_view(node):
        return False
    if _is_split(node):
        return True
    readers = _readers(node)
    if any(reader.target in _REREADERS and reader.args[0] is gradient for reader, gradient in readers):
        return True
    if any(reader.target in _READERS for reader, _ in readers) and any(_rereads(*reader) for reader in readers):
        return True
    return any(_repeats(reader, operand, node) for reader, operand in readers) and _has_function(node)


def _repeats(reader: Node, operand: Node, node: Node) -> bool:
    """True if the loop of a larger, elementwise consumer would recompute each of the node's elements several times.

    Args:
        reader: The consumer.
        operand: The node, or the view of the node that the consumer reads. If the view is broadcast along its last dimension, the loop
            computes an element only once along that dimension.
        node: The node whose value may be written to memory.
    """
    if not _is_pointwise(reader):
        return False
    elements, reads, value = node.meta["val"].numel(), reader.meta["val"].numel(), operand.meta["val"]
    if not all(isinstance(number, int) for number in (elements, reads)) or elements < _MIN_ELEMENTS or reads < _MIN_READS * elements:
        return False
    return value.dim() > 0 and value.shape[-1] != 1 and value.stride(-1) != 0


def _has_function(node: Node) -> bool:
    """True if the fused loop of a node evaluates one of _FUNCTIONS."""
    seen, pending = set(), [node]
    while pending:
        if (current := pending.pop()) in seen or not (_is_pointwise(current) or is_view(current)):
            continue
        if current.target in _FUNCTIONS:
            return True
        seen.add(current)
        pending += current.all_input_nodes
    return False


def _is_pointwise(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target in (aten._to_copy.default, aten.polar.default)


def _is_split(node: Node) -> bool:
    """True if several slices cover all of a tensor, as for the gradient of a concatenation.

    XLA would compute several such tensors in one loop, if another op adds their slices. The loop would have too many operands to be
    vectorized.
    """
    sizes = [user.meta["val"].numel() for user in node.users if user.target is aten.slice.Tensor]
    size = node.meta["val"].numel()
    return len(sizes) > 1 and all(isinstance(count, int) for count in (size, *sizes)) and sum(sizes) >= size


def _rereads(reader: Node, value: Node) -> bool:
    """True if one of XLA's loops reads the value, or a convolution's gradient reads it for several results, each in another layout."""
    if reader.target is aten.convolution_backward.default and reader.args[0] is value:
        return sum(reader.args[10]) > 1
    return reader.target not in _READERS


def _readers(node: Node) -> list[tuple[Node, Node]]:
    """Returns the consumers of a node's values, directly or through views, each with the node or view that it reads."""
    return [reader for user in node.users for reader in (_readers(user) if is_view(user) else [(user, node)])]
