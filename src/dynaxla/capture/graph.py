"""The ATen graph that all later stages work on, with helpers that read its mutated inputs and its devices."""

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

# A forward graph passes values to its backward graph that no other code sees.
Phase = Literal["forward", "backward", "inference"]


class OpenLayouts:
    """Inputs of a graph whose memory order is open: the caller can pass any order, and the graph's first program chooses it.

    Attributes:
        positions: the positions of these inputs.
        orders: the memory order of each input, by position, as in `runtime.layout.Layout.ordered`; None until they are chosen.
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
        phase: results that a forward program passes only to a backward program may have other strides than in the graph.
        waits: True if a call waits for the program's checks on a GPU, too, because later writes also depend on other programs.
        loose: the inputs whose memory order is open.
        remade: the indices of outputs that the caller derives again from an input. The caller reads only the sizes and strides of the
            graph's own results for them.
        is_lowered: True if every op is known to have a lowering.
    """

    name: str
    module: GraphModule
    static: tuple[int, ...] = ()
    phase: Phase = "inference"
    waits: bool = False
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
    """True if an op may take a tensor together with tensors of any other device.

    As in eager mode, this holds for CPU tensors of rank 0. It also holds for CPU tensors without elements, such as the tokens with which
    AOTAutograd orders effects.
    """
    return tensor.device.type == "cpu" and (not tensor.dim() or any(isinstance(size, int) and not size for size in tensor.shape))


def computed_on(node: Node) -> set[torch.device]:
    """Returns the devices of a node's operands and results.

    Tensors that may be combined with any device (`goes_along`) and constants that a copy op reads are left out.
    """
    if node.op in ("get_attr", "output"):
        return set()
    sources = [source for source in node.all_input_nodes if not (source.op == "get_attr" and node.target in COPIES)]
    return {tensor.device for item in (node, *sources) for tensor in tensors_of(item) if not goes_along(tensor)}


def graph_devices(module: GraphModule, between: Collection[Node] = ()) -> set[torch.device]:
    """Returns the devices that a graph computes on. If its tensors may all be combined with any device, returns their devices.

    Args:
        module: the graph.
        between: the nodes that run between programs. A tensor that only these read or return need not be an array.

    Raises: UnsupportedTensor.
    """
    found: set[torch.device] = set()
    others: set[torch.device] = set()
    for node in module.graph.nodes:
        anything = node in between or (between and node.users and all(user in between or user.op == "output" for user in node.users))
        for tensor in tensors_of(node):
            if not anything or is_array(tensor):
                check_tensor(tensor, "a tensor of the graph")
            others.add(tensor.device)
        found |= computed_on(node)
    return found or others


def graph_device(module: GraphModule) -> torch.device:
    """Returns the one device of a graph that a single program computes.

    Raises: DeviceMismatch, UnsupportedTensor.
    """
    return devices.common_device(graph_devices(module))
