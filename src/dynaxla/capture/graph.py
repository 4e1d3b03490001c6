"""The ATen graph that all later stages work on, and functions for its mutated inputs, its parts, new nodes and its devices."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ..lowering.interpreter import constant_value
from ..runtime import devices
from ..torch_ops import aten
from .inputs import check_tensor

# The pass that a graph computes. Only the backward graph reads the results that a forward graph saves.
Phase = Literal["forward", "backward", "inference"]


class OpenLayouts:
    """The inputs of a graph for which XLA chooses the memory order.

    XLA chooses the order when it compiles the graph's first program. From then on, the caller passes these inputs in this order.

    Attributes:
        positions: the positions of these inputs.
        orders: the chosen memory order of each of these inputs, by position, as in `runtime.layout.Layout.ordered`; None until XLA has
            chosen.
    """

    def __init__(self, positions: Collection[int] = ()) -> None:
        self.positions = frozenset(positions)
        self.orders: Mapping[int, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class AtenGraph:
    """A functional ATen graph, and the facts about it that later stages need.

    Attributes:
        name: the graph's name.
        module: the graph of functional ATen ops.
        static: the positions of parameters and buffers among the inputs.
        phase: the pass that the graph computes. Results that a forward program passes only to its backward program may have other strides
            than in the graph.
        waits_for_checks: True if a call waits for the outcome of the program's checks even on a GPU, because writes outside of the program
            follow.
        open_inputs: the inputs for which XLA chooses the memory order.
        rederived_outputs: the indices of outputs that the caller derives from an input (an input itself or a view of an input). The caller
            reads only the sizes and strides of the graph's own results for these outputs.
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


def subgraph(module: GraphModule, inputs: Sequence[Node], nodes: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    """Returns some nodes of a graph, with the constants that they read, as a graph of its own.

    Args:
        module: the graph.
        inputs: the nodes that become the inputs.
        nodes: the nodes to copy, in the graph's order.
        outputs: the nodes whose values the new graph returns.
    """
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for source in inputs:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    constants = [source for node in nodes for source in node.all_input_nodes if source.op == "get_attr"]
    for node in dict.fromkeys((*constants, *nodes)):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return GraphModule(module, graph)


def called_subgraphs(node: Node) -> list[GraphModule]:
    """Returns the subgraphs that a node's op calls, such as the branches of `torch.cond`."""
    owner = node.graph.owning_module
    constants = [source for source in node.all_input_nodes if source.op == "get_attr"] if owner is not None else []
    return [value for source in constants if isinstance(value := constant_value(owner, source), GraphModule)]


def add_call(graph: torch.fx.Graph, op: Any, *args: Any, **kwargs: Any) -> Node:
    """Adds the call of an op at the graph's insertion point, with its fake value."""
    node = graph.call_function(op, args, kwargs)
    values, options = torch.fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
    with detect_fake_mode((values, options)) or contextlib.nullcontext(), torch.no_grad():
        node.meta["val"] = op(*values, **options)
    return node


# Ops whose result may be on a different device than their operand.
DEVICE_COPY_OPS = (aten._to_copy.default, torch.ops.prims.device_put.default)


def tensors_of(node: Node) -> list[torch.Tensor]:
    """Returns the fake tensors among a node's results."""
    value = node.meta.get("val")
    return [value] if isinstance(value, torch.Tensor) else [item for item in pytree.tree_leaves(value) if isinstance(item, torch.Tensor)]


def is_array(tensor: torch.Tensor) -> bool:
    """True for a strided tensor that is not quantized."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def is_device_agnostic(tensor: torch.Tensor) -> bool:
    """True if an op may take this tensor together with tensors on any other device.

    As in eager mode, an op may take CPU tensors of rank 0. It may also take CPU tensors without elements, such as the tokens with which
    AOTAutograd orders effects.
    """
    return tensor.device.type == "cpu" and (not tensor.dim() or any(isinstance(size, int) and not size for size in tensor.shape))


def compute_devices(node: Node) -> set[torch.device]:
    """Returns the devices of a node's operands and results.

    Device-agnostic tensors (`is_device_agnostic`) and constants that a copy op reads are left out.
    """
    if node.op in ("get_attr", "output"):
        return set()
    sources = [source for source in node.all_input_nodes if not (source.op == "get_attr" and node.target in DEVICE_COPY_OPS)]
    return {tensor.device for item in (node, *sources) for tensor in tensors_of(item) if not is_device_agnostic(tensor)}


def graph_devices(module: GraphModule, run_by_torch: Collection[Node] = ()) -> set[torch.device]:
    """Returns the devices that a graph computes on. If all tensors are device-agnostic, returns the devices of these tensors.

    Args:
        module: the graph.
        run_by_torch: the nodes that torch runs between programs. A tensor that only these nodes read or return may be sparse or
            quantized.

    Raises: UnsupportedTensor for any other tensor that XLA cannot hold.
    """
    computing: set[torch.device] = set()
    all_devices: set[torch.device] = set()
    for node in module.graph.nodes:
        is_outside_xla = node in run_by_torch or (
            run_by_torch and node.users and all(user in run_by_torch or user.op == "output" for user in node.users)
        )
        for tensor in tensors_of(node):
            if not is_outside_xla or is_array(tensor):
                check_tensor(tensor, "a tensor of the graph")
            all_devices.add(tensor.device)
        computing |= compute_devices(node)
    return computing or all_devices


def graph_device(module: GraphModule) -> torch.device:
    """Returns the device of a graph that is computed by a single program.

    Raises: DeviceMismatch, UnsupportedTensor.
    """
    return devices.common_device(graph_devices(module))
