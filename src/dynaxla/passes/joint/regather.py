"""Makes the backward graph all-gather sharded parameters again, so that no process holds all gathered parameters at once."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ...torch_ops import aten

_GATHERS = ("_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_gather_into_tensor_coalesced")
_WAIT = "_c10d_functional::wait_tensor"
# Ops other than views that only move or convert elements.
_ELEMENT_MOVING_OPS = frozenset(
    [aten.cat.default, aten.clone.default, aten.constant_pad_nd.default, aten._to_copy.default, operator.getitem]
)


def regather_parameters(joint: GraphModule, parameters: Collection[int]) -> None:
    """Tags the nodes that gather parameters, so that torch's partitioner recomputes these nodes in the backward graph.

    Cheap ops before and after a gather are tagged, too. A node keeps a tag that the user's policy (`torch.utils.checkpoint`) has set.

    parameters: the positions of the parameters among AOTAutograd's inputs.
    """
    from_parameters = {node for node in joint.graph.find_nodes(op="placeholder") if _position(node) in parameters}
    gathered: set[Node] = set()
    for node in joint.graph.nodes:
        sources = node.all_input_nodes
        if (
            node.op != "call_function"
            or not sources
            or not from_parameters.issuperset(sources)
            or not (_is_gather(node) or _is_cheap(node))
        ):
            continue
        from_parameters.add(node)
        if _is_gather(node) or not gathered.isdisjoint(sources):
            gathered.add(node)
    to_tag = list(gathered)
    while to_tag:
        node = to_tag.pop()
        if node.op != "placeholder":
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
            to_tag += [source for source in node.all_input_nodes if source.meta.get("recompute") is None]


def _position(placeholder: Node) -> int | None:
    """Returns the position among AOTAutograd's inputs of a placeholder, or of the tensor subclass that contains it; None if unknown."""
    description = placeholder.meta.get("desc")
    while hasattr(description, "base"):  # the inner tensor of a tensor subclass
        description = description.base
    return getattr(description, "idx", None)


def _is_gather(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _GATHERS


def _is_cheap(node: Node) -> bool:
    op = node.target
    if op in _ELEMENT_MOVING_OPS:
        return True
    return isinstance(op, torch._ops.OpOverload) and (op._schema.name == _WAIT or op.is_view or torch.Tag.pointwise in op.tags)
