"""Splits a graph at the nodes that run between programs (see unsupported_nodes.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...lowering.interpreter import is_plain_python


@dataclass(frozen=True)
class GraphPart:
    """A piece of a graph.

    Attributes:
        compiled: True if the part becomes an XLA program, False if torch runs its nodes one by one.
        module: the part as a graph of its own.
        inputs: the nodes of the whole graph that the part reads.
        outputs: the part's nodes that later parts or the graph's outputs read.
    """

    compiled: bool
    module: GraphModule
    inputs: list[Node]
    outputs: list[Node]


def split(module: GraphModule, uncompiled: Callable[[Node], bool], device: Callable[[Node], Any] = lambda node: None) -> list[GraphPart]:
    """Splits a graph into parts that run in order. Arithmetic on sizes joins the part before it.

    Args:
        module: the graph.
        uncompiled: returns True for a node that torch must run.
        device: returns the device of a compiled node; None for a node that can be on any device.
    """
    groups: list[_PartNodes] = []
    placed: set[Node] = set()

    def place(node: Node, compiled: bool, device: Any = None) -> None:
        last = groups[-1] if groups else None
        if last is None or not last.takes(compiled, device):
            last = _PartNodes(compiled)
            groups.append(last)
        last.device = last.device or device
        last.nodes.append(node)
        placed.add(node)

    for node in module.graph.nodes:
        is_constant = node.op == "get_attr" and all(user.op != "output" for user in node.users)
        if node.op in ("placeholder", "output") or is_constant or node in placed:
            continue
        if uncompiled(node):
            place(node, False)
            for user in node.users:
                if is_plain_python(user) and set(user.all_input_nodes) <= {node}:
                    place(user, False)
        elif _is_size(node) and device(node) is None:
            place(node, groups[-1].compiled if groups else True)
        else:
            place(node, True, device(node))
    definitions = _Definitions(module)
    return [_part(module, group.compiled, group.nodes, definitions, device=group.device) for group in groups]


@dataclass
class _PartNodes:
    """The nodes of one part. Its device is None as long as any device will do."""

    compiled: bool
    device: Any = None
    nodes: list[Node] = field(default_factory=list)

    def takes(self, compiled: bool, device: Any) -> bool:
        return self.compiled == compiled and (device is None or self.device is None or device == self.device)


def part_of(module: GraphModule, nodes: Sequence[Node], outputs: Sequence[Node] | None = None) -> GraphPart:
    """Returns these nodes of a graph as a part for an XLA program.

    Args:
        module: the graph.
        nodes: the part's nodes, in the graph's order.
        outputs: the part's outputs; None for all nodes that others read.
    """
    return _part(module, True, nodes, _Definitions(module), outputs)


def _is_size(node: Node) -> bool:
    return is_plain_python(node) or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def symbols(value: Any) -> set[Any]:
    """Returns the symbols in the sizes, strides and offset of a tensor, or in a number; for a tuple or list, those of all items."""
    found: set[Any] = set()
    for leaf in value if isinstance(value, (tuple, list)) else [value]:
        numbers = [leaf]
        if isinstance(leaf, torch.Tensor):
            numbers = [*leaf.shape, *leaf.stride(), leaf.storage_offset()] if leaf.layout == torch.strided else [*leaf.shape]
        for number in numbers:
            if isinstance(number, torch.SymInt):
                found |= number.node.expr.free_symbols
    return found


class _Definitions:
    """For each symbol of a graph, the nodes that hold its value: a number, or else tensors with that size, one on each device."""

    def __init__(self, module: GraphModule) -> None:
        numbers: dict[Any, dict[Any, Node]] = {}
        sizes: dict[Any, dict[Any, Node]] = {}
        self._places: dict[Node, int] = {}
        for node in module.graph.nodes:
            value = node.meta.get("val")
            self._places[node] = len(self._places)
            if isinstance(value, torch.SymInt):
                numbers.setdefault(value.node.expr, {None: node})
            elif isinstance(value, torch.Tensor):
                for size in value.shape:
                    if isinstance(size, torch.SymInt):
                        sizes.setdefault(size.node.expr, {}).setdefault(value.device, node)
        self._nodes = {symbol: nodes for symbol, nodes in (sizes | numbers).items() if symbol.is_symbol}
        self.all = {node for nodes in self._nodes.values() for node in nodes.values()}

    def node(self, symbol: Any, device: Any, before: Node) -> Node | None:
        """Returns the node that holds a symbol's value, preferably one on `device` that precedes `before`; None if there is none."""
        nodes = self._nodes.get(symbol, {})
        own = nodes.get(device)
        if own is not None and self._places[own] < self._places[before]:
            return own
        return next(iter(nodes.values()), None)


def _part(
    module: GraphModule,
    compiled: bool,
    nodes: Sequence[Node],
    definitions: _Definitions,
    outputs: Sequence[Node] | None = None,
    device: Any = None,
) -> GraphPart:
    inside = set(nodes)
    inputs: dict[Node, None] = {}
    constants: dict[Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                constants[source] = None
            elif source not in inside:
                inputs[source] = None
    if compiled:
        used = {symbol for node in (*inputs, *nodes) for symbol in symbols(node.meta.get("val"))}
        found = (definitions.node(symbol, device, nodes[0]) for symbol in used)
        inputs |= {node: None for node in found if node is not None and node not in inside}
    if outputs is None:
        outputs = [node for node in nodes if node in definitions.all or any(user not in inside for user in node.users)]
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for source in inputs:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in dict.fromkeys((*constants, *nodes)):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return GraphPart(compiled, GraphModule(module, graph), list(inputs), list(outputs))
