"""Cuts a graph around the nodes that run between programs: see between.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..lowering.interpreter import is_plain_python


@dataclass(frozen=True)
class Part:
    """A piece of a graph.

    Attributes: compiled (whether an XLA program takes it; else torch runs its nodes one by one); module; inputs, outputs (nodes of the
    whole graph that it reads, and that later parts or the graph's outputs read).
    """

    compiled: bool
    module: GraphModule
    inputs: list[Node]
    outputs: list[Node]


def split(module: GraphModule, uncompiled: Callable[[Node], bool]) -> list[Part]:
    """The graph in parts, to be run in order. Arithmetic on sizes goes with what stands before it."""
    groups: list[tuple[bool, list[Node]]] = []
    placed: set[Node] = set()

    def place(node: Node, compiled: bool) -> None:
        if not groups or groups[-1][0] != compiled:
            groups.append((compiled, []))
        groups[-1][1].append(node)
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
        else:
            place(node, groups[-1][0] if groups and _is_size(node) else True)
    definitions = _definitions(module)
    return [_part(module, compiled, nodes, definitions) for compiled, nodes in groups]


def part_of(module: GraphModule, nodes: Sequence[Node], outputs: Sequence[Node] | None = None) -> Part:
    """These nodes of a graph, in its order, for an XLA program. outputs: of the part; None: those that anything else reads."""
    return _part(module, True, nodes, _definitions(module), outputs)


def _is_size(node: Node) -> bool:
    return is_plain_python(node) or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _symbols(value: Any) -> set[Any]:
    """Those in the sizes, strides and offset of a tensor, or in a number."""
    found: set[Any] = set()
    for leaf in value if isinstance(value, (tuple, list)) else [value]:
        numbers = [leaf]
        if isinstance(leaf, torch.Tensor):
            numbers = [*leaf.shape, *leaf.stride(), leaf.storage_offset()] if leaf.layout == torch.strided else [*leaf.shape]
        for number in numbers:
            if isinstance(number, torch.SymInt):
                found |= number.node.expr.free_symbols
    return found


def _definitions(module: GraphModule) -> dict[Any, Node]:
    """For each symbol a node that tells its value: a number, or else a tensor that has it as a size."""
    numbers: dict[Any, Node] = {}
    sizes: dict[Any, Node] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            numbers.setdefault(value.node.expr, node)
        elif isinstance(value, torch.Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt):
                    sizes.setdefault(size.node.expr, node)
    return {symbol: node for symbol, node in (sizes | numbers).items() if symbol.is_symbol}


def _part(
    module: GraphModule, compiled: bool, nodes: Sequence[Node], definitions: Mapping[Any, Node], outputs: Sequence[Node] | None = None
) -> Part:
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
        used = {symbol for node in (*inputs, *nodes) for symbol in _symbols(node.meta.get("val"))}
        inputs |= {definitions[symbol]: None for symbol in used if symbol in definitions and definitions[symbol] not in inside}
    defining = set(definitions.values())
    if outputs is None:
        outputs = [node for node in nodes if node in defining or any(user not in inside for user in node.users)]
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for source in inputs:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in dict.fromkeys((*constants, *nodes)):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Part(compiled, GraphModule(module, graph), list(inputs), list(outputs))
