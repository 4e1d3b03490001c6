"""Graphs with tensors on several devices: each program runs on one device, and data moves between devices between the programs.

Such a graph is rewritten:
- Where ATen moves an operand to another device implicitly (an index, the source of a copy), an explicit copy node does it.
- A value that depends on no input (a constant, a new tensor filled by a rule, a function of such values) is computed on the device that
  needs it, instead of being copied there.
- Nodes of one device are grouped, as far as their operands from other devices allow, so that there are few programs.

The rest are copies of values that are known only at run time, and the few other ops that take or return tensors of several devices. torch
runs both between the programs, and raises the errors that eager mode raises.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from ...capture.graph import COPIES, computed_on, tensors_of
from ...lowering.interpreter import find_rule
from ...runtime import devices
from ...torch_ops import aten

COPY = "it copies to another device"
MIXED = "it takes or returns tensors of several devices"

# The position of the argument that ATen moves to the device of the first one: indices from the CPU, the source of a copy from any device.
_INDEXING = {op: 1 for op in (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default)}
_BROUGHT = {**_INDEXING, aten.copy.default: 1}


def has_several_devices(module: GraphModule) -> bool:
    """True if a graph computes on more than one device."""
    nodes = module.graph.nodes
    if len({tensor.device for node in nodes for tensor in tensors_of(node)}) < 2:
        return False
    return len(set().union(*map(computed_on, nodes))) > 1


def remove_detours(graph: Graph) -> None:
    """Changes a graph so that each op except copies has its operands on its own device, where possible.

    A value that depends on no input is computed on the device that needs it.
    """
    known = _Known(graph)
    for node in list(graph.nodes):
        device = _device_of(node)
        if node.target in COPIES and device is not None and computed_on(node) - {device}:
            source = known.on(device, node.args[0], node)
            # Consumers of a copy on the CPU, such as AOTAutograd's wrapper, do not wait for it, so the copy itself blocks.
            waits = {"non_blocking": False} if device.type == "cpu" else {}
            node.args, node.kwargs = _with(node.target, (source, *node.args[1:]), node.kwargs, device=device, **waits)
        elif node.target in _BROUGHT and device is not None:
            _bring(node, _BROUGHT[node.target], device, known)
    known.remove_unused()
    graph.lint()


def _bring(node: Node, position: int, device: torch.device, known: _Known) -> None:
    """Gives an op explicit copies of the operands that ATen would move to its device implicitly."""

    def there(source: Node) -> Node:
        here = _device_of(source)
        if here == device or (node.target in _INDEXING and here != torch.device("cpu")):
            return source
        moved = known.on(device, source, node)
        return copy_to(device, source, node) if moved is source else moved

    node.args = (*node.args[:position], torch.fx.node.map_arg(node.args[position], there), *node.args[position + 1 :])


def copy_to(device: torch.device, source: Node, before: Node) -> Node:
    """Adds a node in front of `before` that copies `source` to a device."""
    with before.graph.inserting_before(before):
        made = before.graph.call_function(aten._to_copy.default, (source,), {"device": device})
    made.meta = {**_origin(before), "val": _like(source.meta["val"], device)}
    return made


class _Known:
    """The nodes of a graph whose values depend only on constants and sizes."""

    def __init__(self, graph: Graph) -> None:
        self._nodes: dict[Node, None] = {}
        self._made: dict[tuple[Node, torch.device], Node] = {}
        for node in graph.nodes:
            if self._is_known(node):
                self._nodes[node] = None

    def _is_known(self, node: Node) -> bool:
        tensors = tensors_of(node)
        if not tensors or any(not isinstance(tensor, torch.Tensor) for tensor in _leaves(node)):
            return False
        if node.op == "get_attr":
            return True
        if node.op != "call_function" or any(tensors_of(source) and source not in self._nodes for source in node.all_input_nodes):
            return False
        if node.target is operator.getitem:
            return True
        op: Any = node.target
        return (
            isinstance(op, torch._ops.OpOverload)
            and op.namespace in ("aten", "prims")
            and not op._schema.is_mutable
            and not {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags)
        )

    def on(self, device: torch.device, node: Any, before: Node) -> Any:
        """Returns a node with a known node's value on a device; returns any other node as it is. Adds nodes in front of `before`."""
        if node not in self._nodes or all(tensor.device == device for tensor in tensors_of(node)) or not self._can_be_on(device, node):
            return node
        made = self._made.get((node, device))
        if made is None:
            made = self._made[node, device] = self._make(device, node, before)
        return made

    def _can_be_on(self, device: torch.device, node: Node) -> bool:
        """True if there are lowerings, for a device's platform, of a known node and of all known nodes that it is computed from."""
        if node.op == "get_attr":
            return True
        is_lowered = node.target is operator.getitem or find_rule(node, devices.platform_of(device)) is not None
        return is_lowered and all(self._can_be_on(device, source) for source in node.all_input_nodes if source in self._nodes)

    def _make(self, device: torch.device, node: Node, before: Node) -> Node:
        if node.op == "get_attr":
            return copy_to(device, node, before)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: self.on(device, source, before))
        if isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = _with(node.target, args, kwargs, device=device, pin_memory=False)
        with before.graph.inserting_before(before):
            made = before.graph.call_function(node.target, args, kwargs)
        made.meta = {**_origin(before), "val": pytree.tree_map_only(torch.Tensor, lambda value: _like(value, device), node.meta["val"])}
        return made

    def remove_unused(self) -> None:
        """Erases the known nodes that have no users any more."""
        for node in reversed(self._nodes):
            if not node.users:
                node.graph.erase_node(node)


def _with(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], **settings: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns an op's arguments with new values for the arguments named in `settings`. Names that the op lacks are ignored."""
    args, kwargs = tuple(args), dict(kwargs)
    for index, argument in enumerate(op._schema.arguments):
        if argument.name in settings:
            if index < len(args):
                args = (*args[:index], settings[argument.name], *args[index + 1 :])
            else:
                kwargs[argument.name] = settings[argument.name]
    return args, kwargs


def _origin(node: Node) -> dict[str, Any]:
    """Returns the part of a node's metadata that says where it comes from: the user's line, the pass."""
    return {name: value for name, value in node.meta.items() if name not in ("val", "tensor_meta", "recompute", "desc")}


def _leaves(node: Node) -> list[Any]:
    return pytree.tree_leaves(node.meta.get("val"))


def _device_of(node: Node) -> torch.device | None:
    """Returns the device of a node's result; None unless the result is a single tensor."""
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else None


def _like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a fake tensor on a device, with the size, strides and dtype of `value`."""
    with detect_fake_mode(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


@dataclass(frozen=True)
class Arrangement:
    """The device of each node of a graph.

    Attributes:
        crossings: the nodes that no program for one device can hold, each with the reason.
        devices: the device of each other node.
    """

    crossings: dict[Node, str]
    devices: dict[Node, torch.device]


def arrange(module: GraphModule, between: Collection[Node]) -> Arrangement:
    """Assigns a device to each node of a graph, and reorders the graph so that nodes of one device stand together.

    between: the nodes that run between programs for other reasons. No node is moved across them, since they may have side effects.
    """
    everything = set[torch.device]().union(*map(computed_on, module.graph.nodes))
    main = devices.main_device(everything)
    found = Arrangement({}, {})
    for node in module.graph.nodes:
        if node.op != "call_function" or node in between:
            continue
        owners = computed_on(node)
        if node.target is operator.getitem:
            if node.args[0] in found.devices:
                found.devices[node] = found.devices[node.args[0]]
        elif len(owners) > 1:
            found.crossings[node] = COPY if node.target in COPIES else MIXED
        elif owners:
            found.devices[node] = owners.pop()
        elif tensors_of(node):
            found.devices[node] = _device_of_sources(node, found, main)
    _group(module.graph, found, between, sorted(everything, key=lambda device: (device.type != "cpu", device.index or 0)))
    return found


def _device_of_sources(node: Node, found: Arrangement, main: torch.device) -> torch.device:
    """Returns the device for a node that any device can compute: the device of its sources, or `main` if they have none or several."""
    sources = {found.devices[source] for source in node.all_input_nodes if source in found.devices}
    return sources.pop() if len(sources) == 1 else main


def _group(graph: Graph, found: Arrangement, between: Collection[Node], order: Sequence[torch.device]) -> None:
    """Reorders a graph so that nodes of one device stand together, with copies between devices as early as possible."""
    waiting: dict[Node, None] = {}

    def place(before: Node, turn: torch.device | None) -> None:
        """Places the ready nodes of a device, or the ready crossings if `turn` is None.

        A node that is neither, such as arithmetic on sizes, is placed with any device.
        """
        for node in list(waiting):
            owner = None if node in found.crossings else found.devices.get(node, turn or order[0])
            if owner == turn and waiting.keys().isdisjoint(node.all_input_nodes):
                before.prepend(node)
                del waiting[node]

    for node in list(graph.nodes):
        if node.op == "output" or node in between:
            while waiting:
                for device in order:
                    place(node, None)
                    place(node, device)
        elif node.op == "call_function":
            waiting[node] = None
