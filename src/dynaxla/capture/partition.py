"""Which values the backward graph gets from the forward graph, and which it computes again."""

from __future__ import annotations

from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy


def partition(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
    """Split AOTAutograd's joint graph so that little is saved and only what is cheap is computed twice.

    AOTAutograd clones an input that the user changes, since autograd must not save what changes afterwards. The clone is cheap, so the
    minimal cut would save the input itself; it is told not to.
    """
    for node in joint.graph.nodes:
        if node.target is torch.ops.aten.clone.default and node.args[0].op == "placeholder":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(joint, inputs, **options)
