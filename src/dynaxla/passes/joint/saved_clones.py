"""Makes torch's partitioner save a clone of each input that the user's code mutates, and save copies between devices."""

from __future__ import annotations

from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from ...capture.graph import DEVICE_COPY_OPS, compute_devices, written_inputs
from ...torch_ops import aten


def save_clones(joint: GraphModule) -> None:
    """Adds clones of mutated inputs to AOTAutograd's joint graph, and tags the clones and the copies between devices as values to save.

    A mutated input must not be saved itself, since autograd refuses a saved tensor that has changed. So a clone of the input is saved.
    AOTAutograd adds such a clone only for an input that requires grad. Without the tag, the minimal cut would save the input and recompute
    the clone, since clones are cheap.
    """
    placeholders = joint.graph.find_nodes(op="placeholder")
    for node in [placeholders[position] for position in sorted(written_inputs(joint.graph).values())]:
        if not all(user.target is aten.clone.default for user in node.users):
            with joint.graph.inserting_after(placeholders[-1]):
                clone = joint.graph.call_function(aten.clone.default, (node,))
            value = node.meta["val"]
            with value.fake_mode:
                clone.meta = {"val": value.clone(), "tensor_meta": node.meta.get("tensor_meta")}
            node.replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
    for node in joint.graph.nodes:
        if node.target is aten.clone.default and node.args[0].op == "placeholder":
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node.target in DEVICE_COPY_OPS and len(compute_devices(node)) > 1:  # a copy between devices is not cheap
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
