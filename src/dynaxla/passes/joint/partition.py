"""Splits AOTAutograd's joint graph: chooses the values that the forward graph saves, and those that the backward graph recomputes."""

from __future__ import annotations

from typing import Any

from functorch.compile import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ...capture.graph import COPIES, computed_on
from ...torch_ops import aten
from ..aten.device_transfers import has_several, remove_detours
from .checkpointing import complete, give_keys, states_as_tensors
from .regather import gather_again


class LateOutput(Exception):
    """Raised if an output of the forward pass is known only in the backward pass, which writes to an input that the output is a view of."""


def partition(
    joint: GraphModule, inputs: Any, *, platform: str, exact_rng: bool = False, **options: Any
) -> tuple[GraphModule, GraphModule]:
    """Splits AOTAutograd's joint graph into a forward and a backward graph.

    Little is saved. Only cheap ops and checkpointed regions are recomputed, and sharded parameters are gathered again.

    An input that the user's code mutates must not be saved itself, since autograd refuses a saved tensor that has changed. A clone of it is
    saved instead (AOTAutograd makes one if the input requires grad). The clone is cheap, so it is tagged to keep the minimal cut from
    recomputing it.

    Args:
        joint: the joint graph, which is changed.
        inputs: the joint graph's inputs.
        platform: the platform of the programs.
        exact_rng: the option of that name.
        options: AOTAutograd's arguments for the partitioner.

    Raises: LateOutput.
    """
    if _has_late_outputs(joint, options.get("num_fwd_outputs", 0)):
        raise LateOutput
    if has_several(joint):
        remove_detours(joint.graph)
    for node in _mutated(joint):
        if not all(user.target is aten.clone.default for user in node.users):
            with joint.graph.inserting_after(_last_placeholder(joint)):
                clone = joint.graph.call_function(aten.clone.default, (node,))
            value = node.meta["val"]
            with value.fake_mode:
                clone.meta = {"val": value.clone(), "tensor_meta": node.meta.get("tensor_meta")}
            node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
    for node in joint.graph.nodes:
        if node.target is aten.clone.default and node.args[0].op == "placeholder":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node.target in COPIES and len(computed_on(node)) > 1:  # a copy between devices is not cheap
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    gather_again(joint, options.get("static_lifetime_input_indices") or ())
    give_keys(joint, platform, exact_rng)
    with states_as_tensors(platform):
        graphs = min_cut_rematerialization_partition(joint, inputs, **options)
    for graph in graphs:
        complete(graph)
    return graphs


def _has_late_outputs(joint: GraphModule, forward_outputs: int) -> bool:
    """True if an output of the forward graph depends on a tangent, or on a value that the backward pass writes to an input."""
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


def _mutated(joint: GraphModule) -> list[Node]:
    """Returns the inputs whose new values are among the outputs, according to AOTAutograd's descriptors."""
    output = joint.graph.output_node()
    changed = [getattr(description, "mutated_input", None) for description in output.meta.get("desc") or ()]
    placeholders = joint.graph.find_nodes(op="placeholder")
    return [node for node in placeholders if node.meta.get("desc") is not None and node.meta["desc"] in changed]


def _last_placeholder(joint: GraphModule) -> Node:
    return joint.graph.find_nodes(op="placeholder")[-1]
