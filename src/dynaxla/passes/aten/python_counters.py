"""Moves Python counters out of a graph: numbers among the inputs on which only other numbers depend, and no tensor.

An example is a step count that the graph increases and returns. TorchDynamo makes a number that changes from call to call an input of the
graph, and a graph has one executable for each value of its numbers. So a counter would cause a compilation at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...capture.graph import copy_graph, subgraph
from ...lowering.interpreter import is_plain_python
from .split import symbols


@dataclass(frozen=True)
class Counters:
    """A graph without its counters, and a second graph that computes the outputs that depend on counters.

    Attributes:
        rest: the graph without its counters and the values computed from them.
        rest_inputs: the positions of the whole graph's inputs that `rest` takes.
        rest_outputs: the positions of the whole graph's outputs that `rest` returns.
        counter_graph: a graph that computes the other outputs.
        counter_inputs: the positions of the whole graph's inputs that `counter_graph` takes.
    """

    rest: GraphModule
    rest_inputs: Sequence[int]
    rest_outputs: Sequence[int]
    counter_graph: GraphModule
    counter_inputs: Sequence[int]


def split_counters(module: GraphModule) -> Counters | None:
    """Splits the counters off a graph. Returns None if the graph has no counters."""
    nodes = list(module.graph.nodes)
    placeholders = module.graph.find_nodes(op="placeholder")
    outputs: Sequence[Any] = module.graph.output_node().args[0]
    counters = _counters(module.graph)
    if not counters:
        return None
    dependent = set(counters)
    dependent.update(node for node in nodes[:-1] if not dependent.isdisjoint(node.all_input_nodes))
    counted = [node for node in outputs if node in dependent]
    needed = set(counted)
    for node in reversed(nodes[:-1]):
        if node in needed:
            needed.update(node.all_input_nodes)
    rest = copy_graph(module)
    copies = dict(zip(nodes, rest.graph.nodes, strict=True))
    returned = [index for index, node in enumerate(outputs) if node not in dependent]
    output = rest.graph.output_node()
    if output.meta.get("desc") is not None:
        output.meta["desc"] = [output.meta["desc"][index] for index in returned]
    output.args = (tuple(output.args[0][index] for index in returned),)
    for node in reversed(nodes):
        if node in dependent:
            rest.graph.erase_node(copies[node])
    rest.recompile()
    return Counters(
        rest,
        rest_inputs=[index for index, node in enumerate(placeholders) if node not in counters],
        rest_outputs=returned,
        counter_graph=subgraph(module, (), [node for node in nodes if node in needed], counted),
        counter_inputs=[index for index, node in enumerate(placeholders) if node in needed],
    )


def _counters(graph: Graph) -> set[Node]:
    """Returns the inputs that are numbers on which only arithmetic on numbers depends: no tensor, and no size of a tensor."""
    candidates = {node: node.meta["val"] for node in graph.find_nodes(op="placeholder") if isinstance(node.meta["val"], torch.SymInt)}
    counters_of: dict[Node, set[Node]] = {node: {node} for node in candidates}
    sizes: set[Any] = set()
    for node in graph.nodes:
        if node in candidates or node.op == "output":
            continue
        counters_of[node] = {counter for source in node.all_input_nodes for counter in counters_of[source]}
        if not _is_number_arithmetic(node):
            sizes |= symbols(node.meta.get("val"))
            for counter in counters_of[node]:
                candidates.pop(counter, None)
    return {node for node, value in candidates.items() if value.node.expr.is_symbol and value.node.expr not in sizes}


def _is_number_arithmetic(node: Node) -> bool:
    """True if a node is plain arithmetic on numbers."""
    return is_plain_python(node) and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
