"""The ATen graph that all later stages work on, and functions that return its mutated inputs and its devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ..runtime import devices
from ..torch_ops import aten
from .inputs import check_tensor

# The results that a forward graph saves for its backward graph are read by no other code.
Phase = Literal["forward", "backward", "inference"]


class OpenLayouts:
    """The inputs of a graph whose memory order is open: the graph's first program chooses the order, and the caller passes the inputs so.

    Attributes:
        positions: the positions of the open inputs.
        orders: the memory order of each open input, by position, as in `runtime.layout.Layout.ordered`; None until a program has chosen.
    """

    def __init__(self, positions: Collection[int] = ()) -> None:
        self.positions = frozenset(positions)
        self.orders: Mapping[int, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class AtenGraph:
    """A graph as AOTAutograd returns it.

    Attributes:
        name: the graph's name.
        module: the graph of functional ATen ops.
        static: the positions of parameters and buffers among the inputs.
        phase: the pass that the graph computes. Results that a forward program passes only to its backward program may have other strides
            than in the graph.
        waits_for_checks: True if a call waits for the program's checks also on a GPU, because later writes depend on several programs.
        open_inputs: the inputs whose memory order is open.
        rederived_outputs: the indices of outputs that the caller derives again from an input. Of the graph's own results for these outputs,
            the caller reads only the sizes and strides.
        is_lowered: True if every op is known to have a lowering.
    """

    name: str
    module: GraphModule
    static: tuple[int, ...] = ()
    phase: Phase = "inference"
    waits_for_checks: bool = False
    open_inputs: OpenLayouts = field(default_factory=OpenLayouts)
    rederived_outputs: frozenset[int] = frozenset()
    is_lowered: bool = False


def written_inputs(graph: torch.fx.Graph) -> dict[int, int]:
    """Returns a dict from output index to input position, for the outputs that AOTAutograd copies to inputs after the call."""
    positions = {node.meta["desc"]: index for index, node in enumerate(graph.find_nodes(op="placeholder")) if node.meta.get("desc")}
    targets = [getattr(description, "mutated_input", None) for description in graph.output_node().meta.get("desc") or ()]
    return {index: positions[target] for index, target in enumerate(targets) if target is not None}


def copy_graph(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Returns a copy of a graph that the caller may change. Its output node has the metadata that `written_inputs` reads."""
    graph = torch.fx.Graph()
    output = graph.output(graph.graph_copy(module.graph, {}))
    output.meta = dict(module.graph.output_node().meta)
    return torch.fx.GraphModule(module, graph)


# Ops whose result may be on a different device than their operand.
COPIES = (aten._to_copy.default, torch.ops.prims.device_put.default)


def tensors_of(node: Node) -> list[torch.Tensor]:
    """Returns the fake tensors among a node's results."""
    value = node.meta.get("val")
    return [value] if isinstance(value, torch.Tensor) else [item for item in pytree.tree_leaves(value) if isinstance(item, torch.Tensor)]


def is_array(tensor: torch.Tensor) -> bool:
    """True for a strided tensor that is not quantized."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def goes_along(tensor: torch.Tensor) -> bool:
    """True if an op may take a tensor together with tensors on any other device.

    As in eager mode, this is true for CPU tensors of rank 0. It is also true for CPU tensors without elements, such as the tokens with
    which AOTAutograd orders effects.
    """
    return tensor.device.type == "cpu" and (not tensor.dim() or any(isinstance(size, int) and not size for size in tensor.shape))


def computed_on(node: Node) -> set[torch.device]:
    """Returns the devices of a node's operands and results.

    Tensors that go along with any device (`goes_along`) and constants that a copy op reads are left out.
    """
    if node.op in ("get_attr", "output"):
        return set()
    sources = [source for source in node.all_input_nodes if not (source.op == "get_attr" and node.target in COPIES)]
    return {tensor.device for item in (node, *sources) for tensor in tensors_of(item) if not goes_along(tensor)}


def graph_devices(module: GraphModule, between: Collection[Node] = ()) -> set[torch.device]:
    """Returns the devices that a graph computes on. If all tensors go along with any device, returns the devices of these tensors.

    Args:
        module: the graph.
        between: the nodes that run between programs. XLA need not hold a tensor that only these nodes read or return.

    Raises: UnsupportedTensor.
    """
    computing: set[torch.device] = set()
    all_devices: set[torch.device] = set()
    for node in module.graph.nodes:
        is_outside_xla = node in between or (between and node.users and all(user in between or user.op == "output" for user in node.users))
        for tensor in tensors_of(node):
            if not is_outside_xla or is_array(tensor):
                check_tensor(tensor, "a tensor of the graph")
            all_devices.add(tensor.device)
        computing |= computed_on(node)
    return computing or all_devices


def graph_device(module: GraphModule) -> torch.device:
    """Returns the device of a graph that is computed by a single program.

    Raises: DeviceMismatch, UnsupportedTensor.
    """
    return devices.common_device(graph_devices(module))
