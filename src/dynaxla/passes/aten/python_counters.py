"""Moves Python counters out of a graph: input numbers that the graph increases and returns, and on which no tensor depends.

TorchDynamo makes a number that changes from call to call an input of the graph, and a graph has one executable for each value of its
numbers. So a counter would cause a compilation at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...capture.graph import copy_graph
from ...lowering.interpreter import is_plain_python
from .split import symbols


@dataclass(frozen=True)
class Counters:
    """A graph without its counters, and a second graph that computes the new values of the counters.

    Attributes:
        rest: the graph without its counters and the values computed from them.
        kept: the positions of the whole graph's inputs that `rest` takes.
        returned: the positions of the whole graph's outputs that `rest` returns.
        counted: a graph that computes the other outputs.
        sources: the positions of the whole graph's inputs that `counted` takes.
    """

    rest: GraphModule
    kept: Sequence[int]
    returned: Sequence[int]
    counted: GraphModule
    sources: Sequence[int]


def split_counters(module: GraphModule) -> Counters | None:
    """Splits the counters off a graph. Returns None if the graph has no counters."""
    nodes = list(module.graph.nodes)
    placeholders = module.graph.find_nodes(op="placeholder")
    outputs: Sequence[Any] = module.graph.output_node().args[0]
    counters = _counters(module.graph)
    if not counters:
        return None
    depending = set(counters)
    depending.update(node for node in nodes[:-1] if not depending.isdisjoint(node.all_input_nodes))
    counted = [node for node in outputs if node in depending]
    needed = set(counted)
    for node in reversed(nodes[:-1]):
        if node in needed:
            needed.update(node.all_input_nodes)
    rest = copy_graph(module)
    copies = dict(zip(nodes, rest.graph.nodes, strict=True))
    returned = [index for index, node in enumerate(outputs) if node not in depending]
    output = rest.graph.output_node()
    if output.meta.get("desc") is not None:
        output.meta["desc"] = [output.meta["desc"][index] for index in returned]
    output.args = (tuple(output.args[0][index] for index in returned),)
    for node in reversed(nodes):
        if node in depending:
            rest.graph.erase_node(copies[node])
    rest.recompile()
    return Counters(
        rest,
        kept=[index for index, node in enumerate(placeholders) if node not in counters],
        returned=returned,
        counted=_subgraph_of(module, counted, needed),
        sources=[index for index, node in enumerate(placeholders) if node in needed],
    )


def _counters(graph: Graph) -> set[Node]:
    """Returns the number inputs on which only plain arithmetic on numbers depends, and no tensor and no tensor's size."""
    candidates = {node: node.meta["val"] for node in graph.find_nodes(op="placeholder") if isinstance(node.meta["val"], torch.SymInt)}
    reached: dict[Node, set[Node]] = {node: {node} for node in candidates}
    sizes: set[Any] = set()
    for node in graph.nodes:
        if node in candidates or node.op == "output":
            continue
        reached[node] = {counter for source in node.all_input_nodes for counter in reached[source]}
        if not _is_number_arithmetic(node):
            sizes |= symbols(node.meta.get("val"))
            for counter in reached[node]:
                candidates.pop(counter, None)
    return {node for node, value in candidates.items() if value.node.expr.is_symbol and value.node.expr not in sizes}


def _is_number_arithmetic(node: Node) -> bool:
    """True if a node is plain arithmetic on numbers."""
    return is_plain_python(node) and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)


def _subgraph_of(module: GraphModule, results: Sequence[Node], needed: set[Node]) -> GraphModule:
    """Returns a module that computes the nodes `results`. needed: the results, and all nodes from which the results are computed."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in module.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return GraphModule(module, graph)
