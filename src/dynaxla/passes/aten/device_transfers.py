"""Graphs with tensors on several devices: each program runs on one device, and torch copies tensors between the programs.

Such a graph is rewritten:
- Where ATen moves an operand to another device implicitly (an index, the source of a copy), an explicit copy node moves the operand.
- A value that depends on no input (a constant, `arange`, a function of such values) is computed on the device of its consumer, not copied
  to this device.
- Nodes of one device are grouped, as far as their operands from other devices allow, so that there are few programs.

The remaining nodes on several devices are copies of values that depend on inputs, and the few other ops that take or return tensors of
several devices. torch runs these nodes between the programs, and raises eager mode's errors.
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

from ...capture.graph import DEVICE_COPY_OPS, compute_devices, tensors_of
from ...lowering.interpreter import find_rule
from ...runtime import devices
from ...torch_ops import aten

COPY = "it copies to another device"
MIXED = "it takes or returns tensors of several devices"

# The position of the argument that ATen moves to the first argument's device: indices from the CPU, the source of a copy from any device.
_INDEXING = {op: 1 for op in (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten._unsafe_index_put.default)}
_IMPLICITLY_MOVED = {**_INDEXING, aten.copy.default: 1}


def has_several_devices(module: GraphModule) -> bool:
    """True if a graph computes on more than one device."""
    nodes = module.graph.nodes
    if len({tensor.device for node in nodes for tensor in tensors_of(node)}) < 2:
        return False
    return len(set().union(*map(compute_devices, nodes))) > 1


def remove_detours(graph: Graph) -> None:
    """Changes a graph so that each op, except copies between devices, has all its operands on one device, where possible.

    A value that depends on no input is computed on the device of its consumer.
    """
    input_free = _InputFreeNodes(graph)
    for node in list(graph.nodes):
        device = _device_of(node)
        if node.target in DEVICE_COPY_OPS and device is not None and compute_devices(node) - {device}:
            source = input_free.value_on(device, node.args[0], node)
            # Consumers of a copy to the CPU, such as AOTAutograd's wrapper, do not wait for the copy, so the copy itself blocks.
            blocking = {"non_blocking": False} if device.type == "cpu" else {}
            node.args, node.kwargs = _with_arguments(node.target, (source, *node.args[1:]), node.kwargs, device=device, **blocking)
        elif node.target in _IMPLICITLY_MOVED and device is not None:
            _add_explicit_copies(node, _IMPLICITLY_MOVED[node.target], device, input_free)
    input_free.remove_unused()
    graph.lint()


def _add_explicit_copies(node: Node, position: int, device: torch.device, input_free: _InputFreeNodes) -> None:
    """Replaces the operands that ATen would move to an op's device implicitly by explicit copies."""

    def on_device(source: Node) -> Node:
        source_device = _device_of(source)
        if source_device == device or (node.target in _INDEXING and source_device != torch.device("cpu")):
            return source
        moved = input_free.value_on(device, source, node)
        return copy_to(device, source, node) if moved is source else moved

    node.args = (*node.args[:position], torch.fx.node.map_arg(node.args[position], on_device), *node.args[position + 1 :])


def copy_to(device: torch.device, source: Node, before: Node) -> Node:
    """Adds a copy of `source` to a device, in front of the node `before`. Returns the copy."""
    with before.graph.inserting_before(before):
        copy = before.graph.call_function(aten._to_copy.default, (source,), {"device": device})
    copy.meta = {**_origin(before), "val": _fake_on(source.meta["val"], device)}
    return copy


class _InputFreeNodes:
    """The nodes of a graph whose values depend on no input except sizes, and their copies on other devices."""

    def __init__(self, graph: Graph) -> None:
        self._nodes: dict[Node, None] = {}
        self._copies: dict[tuple[Node, torch.device], Node] = {}
        for node in graph.nodes:
            if self._is_input_free(node):
                self._nodes[node] = None

    def _is_input_free(self, node: Node) -> bool:
        tensors = tensors_of(node)
        if not tensors or any(not isinstance(tensor, torch.Tensor) for tensor in _result_leaves(node)):
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

    def value_on(self, device: torch.device, node: Any, before: Node) -> Any:
        """Returns a node with the value of `node` on a device, if this value depends on no input, else `node` itself.

        Adds nodes in front of the node `before`.
        """
        if node not in self._nodes or all(tensor.device == device for tensor in tensors_of(node)) or not self._can_compute_on(device, node):
            return node
        copy = self._copies.get((node, device))
        if copy is None:
            copy = self._copies[node, device] = self._recompute(device, node, before)
        return copy

    def _can_compute_on(self, device: torch.device, node: Node) -> bool:
        """True if a device's platform has lowerings of a node and of all nodes from which it is computed."""
        if node.op == "get_attr":
            return True
        is_lowered = node.target is operator.getitem or find_rule(node, devices.platform_of(device)) is not None
        return is_lowered and all(self._can_compute_on(device, source) for source in node.all_input_nodes if source in self._nodes)

    def _recompute(self, device: torch.device, node: Node, before: Node) -> Node:
        """Adds nodes that compute the value of `node` on a device, in front of the node `before`. Returns the last of these nodes."""
        if node.op == "get_attr":
            return copy_to(device, node, before)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: self.value_on(device, source, before))
        if isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = _with_arguments(node.target, args, kwargs, device=device, pin_memory=False)
        with before.graph.inserting_before(before):
            copy = before.graph.call_function(node.target, args, kwargs)
        copy.meta = {**_origin(before), "val": pytree.tree_map_only(torch.Tensor, lambda value: _fake_on(value, device), node.meta["val"])}
        return copy

    def remove_unused(self) -> None:
        """Erases the nodes that have no users any more."""
        for node in reversed(self._nodes):
            if not node.users:
                node.graph.erase_node(node)


def _with_arguments(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], **new_values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns an op's arguments with `new_values` for the arguments of these names. Names that the op lacks are ignored."""
    args, kwargs = tuple(args), dict(kwargs)
    for index, argument in enumerate(op._schema.arguments):
        if argument.name in new_values:
            if index < len(args):
                args = (*args[:index], new_values[argument.name], *args[index + 1 :])
            else:
                kwargs[argument.name] = new_values[argument.name]
    return args, kwargs


def _origin(node: Node) -> dict[str, Any]:
    """Returns the metadata that a node shares with nodes that replace it: the user's line and the phase, but not the value."""
    return {name: value for name, value in node.meta.items() if name not in ("val", "tensor_meta", "recompute", "desc")}


def _result_leaves(node: Node) -> list[Any]:
    """Returns the values that a node returns, without their tuples and lists."""
    return pytree.tree_leaves(node.meta.get("val"))


def _device_of(node: Node) -> torch.device | None:
    """Returns the device of a node's result; None unless the result is a single tensor."""
    value = node.meta.get("val")
    return value.device if isinstance(value, torch.Tensor) else None


def _fake_on(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a fake tensor on a device, with the size, strides and dtype of `value`."""
    with detect_fake_mode(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


@dataclass(frozen=True)
class DeviceAssignment:
    """The device of each node of a graph.

    Attributes:
        multi_device_nodes: the nodes on several devices, which no program can compute, each with the reason, COPY or MIXED.
        devices: the device of each other node.
    """

    multi_device_nodes: dict[Node, str]
    devices: dict[Node, torch.device]


def assign_devices(module: GraphModule, run_by_torch: Collection[Node]) -> DeviceAssignment:
    """Assigns a device to each node of a graph, and reorders the graph so that nodes of one device are adjacent.

    run_by_torch: nodes that torch must run between programs for other reasons. These nodes may have side effects, so no node moves across
        them.
    """
    all_devices = set[torch.device]().union(*map(compute_devices, module.graph.nodes))
    main = devices.main_device(all_devices)
    assignment = DeviceAssignment({}, {})
    for node in module.graph.nodes:
        if node.op != "call_function" or node in run_by_torch:
            continue
        node_devices = compute_devices(node)
        if node.target is operator.getitem:
            if node.args[0] in assignment.devices:
                assignment.devices[node] = assignment.devices[node.args[0]]
        elif len(node_devices) > 1:
            assignment.multi_device_nodes[node] = COPY if node.target in DEVICE_COPY_OPS else MIXED
        elif node_devices:
            assignment.devices[node] = node_devices.pop()
        elif tensors_of(node):
            assignment.devices[node] = _device_of_sources(node, assignment, main)
    _group_by_device(
        module.graph, assignment, run_by_torch, sorted(all_devices, key=lambda device: (device.type != "cpu", device.index or 0))
    )
    return assignment


def _device_of_sources(node: Node, assignment: DeviceAssignment, main: torch.device) -> torch.device:
    """Returns the device for a node that any device can compute: the only device of its sources, or else `main`."""
    sources = {assignment.devices[source] for source in node.all_input_nodes if source in assignment.devices}
    return sources.pop() if len(sources) == 1 else main


def _group_by_device(graph: Graph, assignment: DeviceAssignment, run_by_torch: Collection[Node], order: Sequence[torch.device]) -> None:
    """Reorders a graph so that nodes of one device are adjacent, with copies between devices as early as possible."""
    waiting: dict[Node, None] = {}

    def move_ready(before: Node, device: torch.device | None) -> None:
        """Moves waiting nodes without waiting operands in front of the node `before`: nodes of a device, or for None multi-device nodes.

        A node without a device, such as arithmetic on sizes, moves with the nodes of any device.
        """
        for node in list(waiting):
            owner = None if node in assignment.multi_device_nodes else assignment.devices.get(node, device or order[0])
            if owner == device and waiting.keys().isdisjoint(node.all_input_nodes):
                before.prepend(node)
                del waiting[node]

    for node in list(graph.nodes):
        if node.op == "output" or node in run_by_torch:
            while waiting:
                for device in order:
                    move_ready(node, None)
                    move_ready(node, device)
        elif node.op == "call_function":
            waiting[node] = None
