"""Which values the backward graph gets from the forward graph, and which it computes again."""

from __future__ import annotations

from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten


def partition(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    """Split AOTAutograd's joint graph so that little is saved and only what is cheap is computed twice.

    An input that the user changes must not be saved itself, since autograd refuses what has changed in the meantime. A clone of it takes
    its place (AOTAutograd makes one where the input requires grad). It is cheap, so the minimal cut is told not to compute it again.
    """
    for node in _mutated(joint):
        if not all(user.target is aten.clone.default for user in node.users):
            with joint.graph.inserting_after(_last_placeholder(joint)):
                clone = joint.graph.call_function(aten.clone.default, (node,))
            clone.meta = {"val": node.meta["val"], "tensor_meta": node.meta.get("tensor_meta")}
            node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
    for node in joint.graph.nodes:
        if node.target is aten.clone.default and node.args[0].op == "placeholder":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(joint, inputs, **options)


def _mutated(joint: GraphModule) -> list[Node]:
    """The inputs whose new values are among the outputs, as AOTAutograd describes these."""
    output = next(node for node in reversed(joint.graph.nodes) if node.op == "output")
    changed = [getattr(description, "mutated_input", None) for description in output.meta.get("desc") or ()]
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    return [node for node in placeholders if node.meta.get("desc") is not None and node.meta["desc"] in changed]


def _last_placeholder(joint: GraphModule) -> Node:
    return [node for node in joint.graph.nodes if node.op == "placeholder"][-1]
