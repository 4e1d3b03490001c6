"""Splits AOTAutograd's joint graph: chooses the values that the forward graph saves, and the values that the backward graph recomputes."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from ...torch_ops import aten
from .. import pipeline
from ..aten.device_transfers import has_several_devices
from .checkpointing import save_states_as_tensors


class LateOutput(Exception):
    """Raised if only the backward pass computes an output of the forward pass: a view of an input to which the backward pass writes."""


def partition(
    joint: GraphModule, inputs: Any, *, platform: str, exact_rng: bool = False, **options: Any
) -> tuple[GraphModule, GraphModule]:
    """Splits AOTAutograd's joint graph into a forward and a backward graph.

    A minimal cut chooses the saved values. The backward graph recomputes only cheap ops and checkpointed regions, and gathers sharded
    parameters again.

    Args:
        joint: the joint graph, which is changed.
        inputs: the joint graph's inputs.
        platform: the platform of the programs.
        exact_rng: the option exact_rng.
        options: AOTAutograd's arguments for the partitioner.

    Raises: LateOutput.
    """
    if _has_late_outputs(joint, options.get("num_fwd_outputs", 0)):
        raise LateOutput
    if has_several_devices(joint):
        pipeline.DETOURS(joint.graph)
    pipeline.SAVED_CLONES(joint)
    pipeline.REGATHER(joint, options.get("static_lifetime_input_indices") or ())
    pipeline.KEYED_DRAWS(joint, platform, exact_rng)
    with save_states_as_tensors(platform):
        graphs = pipeline.MIN_CUT(joint, inputs, **options)
    pipeline.SAVED_VIEWS(graphs, options["num_fwd_outputs"])
    for graph in graphs:
        pipeline.RESTORED_DRAWS(graph)
    return graphs


def _has_late_outputs(joint: GraphModule, forward_outputs: int) -> bool:
    """True if an output of the forward pass depends on a tangent, or on a value that the backward pass writes to an input."""
    writes = [node.args for node in joint.graph.nodes if node.target is aten.copy_.default]
    late = {new for old, new, *_ in writes if old.op == "placeholder" and new.op != "placeholder"}
    for node in joint.graph.nodes:
        if node.op == "placeholder" and "tangent" in node.name:
            late.add(node)
        elif node.op == "output":
            return not late.isdisjoint(node.args[0][:forward_outputs])
        elif not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return False
