"""Splits a graph at the nodes that torch runs between programs (see unsupported_nodes.py), and where the device changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...capture.graph import subgraph
from ...lowering.interpreter import is_plain_python


@dataclass(frozen=True)
class GraphPart:
    """A part of a graph.

    Attributes:
        compiled: True if the part becomes an XLA program, False if torch's kernels run its nodes.
        module: the part as a graph of its own.
        inputs: the nodes of the whole graph that the part reads.
        outputs: the part's nodes whose values later parts read or the graph returns.
    """

    compiled: bool
    module: GraphModule
    inputs: list[Node]
    outputs: list[Node]


def split(module: GraphModule, uncompiled: Callable[[Node], bool], device: Callable[[Node], Any] = lambda node: None) -> list[GraphPart]:
    """Splits a graph into parts that run one after the other.

    A node that can be in any part, such as arithmetic on sizes, becomes a node of the preceding part.

    Args:
        module: the graph.
        uncompiled: returns True for a node that torch must run.
        device: returns the device of a compiled node; None for a node that can be on any device.
    """
    groups: list[_PartNodes] = []
    assigned: set[Node] = set()

    def assign(node: Node, compiled: bool, device: Any = None) -> None:
        last = groups[-1] if groups else None
        if last is None or not last.accepts(compiled, device):
            last = _PartNodes(compiled)
            groups.append(last)
        last.device = last.device or device
        last.nodes.append(node)
        assigned.add(node)

    for node in module.graph.nodes:
        is_constant = node.op == "get_attr" and all(user.op != "output" for user in node.users)
        if node.op in ("placeholder", "output") or is_constant or node in assigned:
            continue
        if uncompiled(node):
            assign(node, False)
            # The items and sizes of the node's result are taken in the same part.
            for user in node.users:
                if is_plain_python(user) and set(user.all_input_nodes) <= {node}:
                    assign(user, False)
        elif _runs_in_any_part(node) and device(node) is None:
            assign(node, groups[-1].compiled if groups else True)
        else:
            assign(node, True, device(node))
    definitions = _SymbolDefinitions(module)
    return [_part(module, group.compiled, group.nodes, definitions, device=group.device) for group in groups]


@dataclass
class _PartNodes:
    """The nodes of one part. The device is None until a node of the part needs a device."""

    compiled: bool
    device: Any = None
    nodes: list[Node] = field(default_factory=list)

    def accepts(self, compiled: bool, device: Any) -> bool:
        """True if a node can become a node of this part. device: the device that the node needs, or None."""
        return self.compiled == compiled and (device is None or self.device is None or device == self.device)


def part_of(module: GraphModule, nodes: Sequence[Node], outputs: Sequence[Node] | None = None) -> GraphPart:
    """Returns these nodes of a graph as a part for an XLA program.

    Args:
        module: the graph.
        nodes: the part's nodes, in the graph's order.
        outputs: the part's outputs; None for all nodes that other nodes read.
    """
    return _part(module, True, nodes, _SymbolDefinitions(module), outputs)


def _runs_in_any_part(node: Node) -> bool:
    """True for arithmetic on sizes, for getitem, and for any other node that returns no tensors."""
    return is_plain_python(node) or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def symbols(value: Any) -> set[Any]:
    """Returns the symbols in the sizes, strides and offset of a tensor, or in a number, or in all items of a tuple or list."""
    free_symbols: set[Any] = set()
    for leaf in value if isinstance(value, (tuple, list)) else [value]:
        numbers = [leaf]
        if isinstance(leaf, torch.Tensor):
            numbers = [*leaf.shape, *leaf.stride(), leaf.storage_offset()] if leaf.layout == torch.strided else [*leaf.shape]
        for number in numbers:
            if isinstance(number, torch.SymInt):
                free_symbols |= number.node.expr.free_symbols
    return free_symbols


class _SymbolDefinitions:
    """For each size symbol of a graph, the nodes that can define the symbol in a part.

    This is the node whose value is the symbol. If there is none, it is the first node on each device that is a tensor with this size.

    Attributes:
        all: the nodes of all symbols.
    """

    def __init__(self, module: GraphModule) -> None:
        numbers: dict[Any, dict[Any, Node]] = {}
        sizes: dict[Any, dict[Any, Node]] = {}
        self._positions: dict[Node, int] = {}
        for node in module.graph.nodes:
            value = node.meta.get("val")
            self._positions[node] = len(self._positions)
            if isinstance(value, torch.SymInt):
                numbers.setdefault(value.node.expr, {None: node})
            elif isinstance(value, torch.Tensor):
                for size in value.shape:
                    if isinstance(size, torch.SymInt):
                        sizes.setdefault(size.node.expr, {}).setdefault(value.device, node)
        self._nodes = {symbol: nodes for symbol, nodes in (sizes | numbers).items() if symbol.is_symbol}
        self.all = {node for nodes in self._nodes.values() for node in nodes.values()}

    def node(self, symbol: Any, device: Any, before: Node) -> Node | None:
        """Returns a node that defines a symbol, preferably one on `device` that precedes the node `before`; None if no node defines it."""
        nodes = self._nodes.get(symbol, {})
        on_device = nodes.get(device)
        if on_device is not None and self._positions[on_device] < self._positions[before]:
            return on_device
        return next(iter(nodes.values()), None)


def _part(
    module: GraphModule,
    compiled: bool,
    nodes: Sequence[Node],
    definitions: _SymbolDefinitions,
    outputs: Sequence[Node] | None = None,
    device: Any = None,
) -> GraphPart:
    inside = set(nodes)
    inputs = {source: None for node in nodes for source in node.all_input_nodes if source.op != "get_attr" and source not in inside}
    if compiled:
        used_symbols = {symbol for node in (*inputs, *nodes) for symbol in symbols(node.meta.get("val"))}
        defining = (definitions.node(symbol, device, nodes[0]) for symbol in used_symbols)
        inputs |= {node: None for node in defining if node is not None and node not in inside}
    if outputs is None:
        outputs = [node for node in nodes if node in definitions.all or any(user not in inside for user in node.users)]
    return GraphPart(compiled, subgraph(module, list(inputs), nodes, outputs), list(inputs), list(outputs))
