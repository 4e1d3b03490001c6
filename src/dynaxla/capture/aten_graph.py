"""What every part of the way of a graph needs to know of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ..runtime import devices
from ..torch_ops import aten
from .between import is_array
from .inputs import check_tensor

# Forward and backward graphs hand each other values that nobody else sees.
Phase = Literal["forward", "backward", "inference"]


class Loose:
    """Inputs that whoever calls a graph can give in any order in memory: the first program of the graph chooses it.

    Attributes: positions (of these inputs); orders (by position, as in `runtime.layout.Layout.ordered`; None until they are chosen).
    """

    def __init__(self, positions: Collection[int] = ()) -> None:
        self.positions = frozenset(positions)
        self.orders: Mapping[int, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class AtenGraph:
    """A graph as AOTAutograd gives it.

    Attributes: name; module (functional ATen ops); static (the positions of parameters and buffers among its inputs); phase (what a forward
    program gives to a backward program alone may have other strides than in the graph); waits (whether a call waits for the program's
    checks on a GPU, too: what is written after it depends on other programs as well); loose; remade (outputs, by index, that whoever calls
    the graph makes anew from an input, and looks at for their sizes and strides alone); is_lowered (whether it is known that each op has a
    lowering).
    """

    name: str
    module: GraphModule
    static: tuple[int, ...] = ()
    phase: Phase = "inference"
    waits: bool = False
    loose: Loose = field(default_factory=Loose)
    remade: frozenset[int] = frozenset()
    is_lowered: bool = False


def written_inputs(graph: torch.fx.Graph) -> dict[int, int]:
    """The outputs, by index, whose values AOTAutograd will write to inputs when the call is over, and the positions of these inputs."""
    positions = {node.meta["desc"]: index for index, node in enumerate(graph.find_nodes(op="placeholder")) if node.meta.get("desc")}
    targets = [getattr(description, "mutated_input", None) for description in graph.output_node().meta.get("desc") or ()]
    return {index: positions[target] for index, target in enumerate(targets) if target is not None}


# Ops whose result may be on another device than their operand.
COPIES = (aten._to_copy.default, torch.ops.prims.device_put.default)


def tensors_of(node: Node) -> list[torch.Tensor]:
    """The tensors that a node gives."""
    value = node.meta.get("val")
    return [value] if isinstance(value, torch.Tensor) else [item for item in pytree.tree_leaves(value) if isinstance(item, torch.Tensor)]


def goes_along(tensor: torch.Tensor) -> bool:
    """Whether a tensor may stand beside those of any device. What is on the CPU and has no dimensions may, as in eager mode, and so may
    what has no elements, such as the tokens by which AOTAutograd keeps effects in order."""
    return tensor.device.type == "cpu" and (not tensor.dim() or any(isinstance(size, int) and not size for size in tensor.shape))


def computed_on(node: Node) -> set[torch.device]:
    """The devices of a node's operands and results, without what may stand beside any. A constant may be copied to any, too."""
    if node.op in ("get_attr", "output"):
        return set()
    sources = [source for source in node.all_input_nodes if not (source.op == "get_attr" and node.target in COPIES)]
    return {tensor.device for item in (node, *sources) for tensor in tensors_of(item) if not goes_along(tensor)}


def graph_devices(module: GraphModule, between: Collection[Node] = ()) -> set[torch.device]:
    """The devices of what a graph computes, or else of what it is given and may stand beside any.

    between: the nodes that run between programs; what only they read or give may be anything.
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
    """The device of a graph that one program computes.

    Raises: DeviceMismatch; UnsupportedTensor.
    """
    return devices.common_device(graph_devices(module))
