"""Graphs with tensors on several devices: each program has one device, and what goes from one to another goes between programs.

In such a graph
- what ATen brings to another device by itself (an index, what is copied into a tensor) is brought there by a node of its own;
- what a node copies to another device, though it is known before any input is, is made there: constants, new tensors filled by a rule, and
  what is computed from these alone;
- nodes of one device stand together, as far as what they need from other devices allows, so that there are few programs.

What remains are copies of what is known at run time only, and the few other ops that take or give tensors of several devices. torch runs
both between the programs, and refuses what eager mode refuses.
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

from ..lowering.interpreter import find_rule
from ..runtime import devices
from ..torch_ops import aten
from .aten_graph import COPIES, computed_on, tensors_of

COPY = "it copies to another device"
MIXED = "it takes or gives tensors of several devices"

# The arguments, by position, that ATen brings to the device of the first one: indices from the CPU, what is copied from anywhere.
_INDEXING = {op: 1 for op in (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default)}
_BROUGHT = {**_INDEXING, aten.copy.default: 1}


def has_several(module: GraphModule) -> bool:
    """Whether a graph computes on more than one device."""
    nodes = module.graph.nodes
    if len({tensor.device for node in nodes for tensor in tensors_of(node)}) < 2:
        return False
    return len(set().union(*map(computed_on, nodes))) > 1


def copied(module: GraphModule) -> GraphModule:
    """Another graph of the same nodes, which may be changed."""
    graph, copies = Graph(), dict[Node, Node]()
    output = graph.output(graph.graph_copy(module.graph, copies))
    output.meta = dict(module.graph.output_node().meta)
    return GraphModule(module, graph)


def remove_detours(graph: Graph) -> None:
    """Change a graph so that each op but a copy has its operands on its own device, where they can be, and that what is known before any
    input is made where it is wanted."""
    known = _Known(graph)
    for node in list(graph.nodes):
        device = _device_of(node)
        if node.target in COPIES and device is not None and computed_on(node) - {device}:
            source = known.on(device, node.args[0], node)
            # What reads a copy on the CPU, AOTAutograd's wrapper among it, does not wait for it, so the copy itself does.
            waits = {"non_blocking": False} if device.type == "cpu" else {}
            node.args, node.kwargs = _with(node.target, (source, *node.args[1:]), node.kwargs, device=device, **waits)
        elif node.target in _BROUGHT and device is not None:
            _bring(node, _BROUGHT[node.target], device, known)
    known.remove_unused()
    graph.lint()


def _bring(node: Node, position: int, device: torch.device, known: _Known) -> None:
    """Let an op read what it would bring to its device by itself from copies there."""

    def there(source: Node) -> Node:
        here = _device_of(source)
        if here == device or (node.target in _INDEXING and here != torch.device("cpu")):
            return source
        moved = known.on(device, source, node)
        return copy_to(device, source, node) if moved is source else moved

    node.args = (*node.args[:position], torch.fx.node.map_arg(node.args[position], there), *node.args[position + 1 :])


def copy_to(device: torch.device, source: Node, before: Node) -> Node:
    """A node that copies to a device."""
    with before.graph.inserting_before(before):
        made = before.graph.call_function(aten._to_copy.default, (source,), {"device": device})
    made.meta = {**_origin(before), "val": _like(source.meta["val"], device)}
    return made


class _Known:
    """The nodes of a graph whose values follow from constants and sizes alone."""

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
        """The node that has a known node's value on a device, made before another one; any other node as it is."""
        if node not in self._nodes or all(tensor.device == device for tensor in tensors_of(node)) or not self._can_be_on(device, node):
            return node
        made = self._made.get((node, device))
        if made is None:
            made = self._made[node, device] = self._make(device, node, before)
        return made

    def _can_be_on(self, device: torch.device, node: Node) -> bool:
        """Whether a program for a device can compute a node, and all that it is computed from, as there are lowerings."""
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
        """Erase those that nothing reads any more."""
        for node in reversed(self._nodes):
            if not node.users:
                node.graph.erase_node(node)


def _with(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], **settings: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An op's arguments, with others for those of these names that it has."""
    args, kwargs = tuple(args), dict(kwargs)
    for index, argument in enumerate(op._schema.arguments):
        if argument.name in settings:
            if index < len(args):
                args = (*args[:index], settings[argument.name], *args[index + 1 :])
            else:
                kwargs[argument.name] = settings[argument.name]
    return args, kwargs


def _origin(node: Node) -> dict[str, Any]:
    """What a node's metadata says of where it comes from: the line of the user's, the pass."""
    return {name: value for name, value in node.meta.items() if name not in ("val", "tensor_meta", "recompute", "desc")}


def _leaves(node: Node) -> list[Any]:
    return pytree.tree_leaves(node.meta.get("val"))


def _device_of(node: Node) -> torch.device | None:
    """Where a node's one result is; None if it has none, or several."""
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else None


def _like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor of the same size, strides and dtype."""
    with detect_fake_mode(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


@dataclass(frozen=True)
class Arrangement:
    """Attributes: crossings (the nodes that no program of one device can hold, with the reason); devices (of all others)."""

    crossings: dict[Node, str]
    devices: dict[Node, torch.device]


def arrange(module: GraphModule, between: Collection[Node]) -> Arrangement:
    """Say which device computes each node of a graph, and bring nodes of one device together: the graph's order is changed.

    between: the nodes that run between programs for other reasons. They stay where they are among all others, as they may act.
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
    """Where to compute what may be anywhere: where that is from which it is computed."""
    sources = {found.devices[source] for source in node.all_input_nodes if source in found.devices}
    return sources.pop() if len(sources) == 1 else main


def _group(graph: Graph, found: Arrangement, between: Collection[Node], order: Sequence[torch.device]) -> None:
    """Bring nodes of one device together. Copies come as early as they can."""
    waiting: dict[Node, None] = {}

    def place(before: Node, turn: torch.device | None) -> None:
        """turn: a device; None: the crossings'. Nodes that are neither, as arithmetic on sizes is, go along with a device's."""
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
