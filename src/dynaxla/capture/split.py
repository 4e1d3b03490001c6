"""Cuts a graph around ops that no XLA program can hold: those whose result's size or number depends on a tensor's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

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


def depends_on_data(module: GraphModule) -> set[Node]:
    """The nodes whose result has a size, or is a number, that only running them can tell."""
    known: set[Any] = set()
    found = set()
    for node in module.graph.nodes:
        symbols = free_unbacked_symbols(node.meta.get("val"))
        if node.op == "call_function" and not symbols <= known:
            found.add(node)
        known |= symbols
    return found


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
    return [_part(module, compiled, nodes) for compiled, nodes in groups]


def _is_size(node: Node) -> bool:
    return is_plain_python(node) or not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _part(module: GraphModule, compiled: bool, nodes: Sequence[Node]) -> Part:
    inside = set(nodes)
    inputs: dict[Node, None] = {}
    constants: dict[Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                constants[source] = None
            elif source not in inside:
                inputs[source] = None
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for source in inputs:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in dict.fromkeys((*constants, *nodes)):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Part(compiled, GraphModule(module, graph), list(inputs), outputs)
