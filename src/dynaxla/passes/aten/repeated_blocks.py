"""Finds consecutive repeated blocks in a graph, such as the layers of a transformer, which can share one program.

AOTAutograd keeps the order in which the model ran, so equal blocks are equal stretches of nodes at equal distances. Two stretches compute
the same function if they have the same *form*: the same ops with the same numbers and constants, in the same order; results and outside
operands of the same shapes, strides and dtypes; and each argument from the same place, either a node of the stretch or its first, second,
... outside operand. The origin of outside operands and the names of modules do not matter.

A stretch that runs as a program of its own costs about 20 microseconds in Python, and XLA fuses nothing across its ends. So the matrix
products of a stretch must read and write many bytes (`LARGE`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from ...lowering import SymbolValues, TensorSpec
from ...lowering.cpu import weight_orders
from ...lowering.graphs import FOR_CHECKS
from ...lowering.interpreter import constant_value, to_numpy
from ...runtime import private

# The least bytes that the products of a stretch read and write. At 20 GB/s this takes 40 times as long as one more program costs.
LARGE = 1 << 24
# The least number of equal stretches in a row that are split off.
FEWEST = 3

_TRIED = 16
_PRODUCTS = {*flop_registry, weight_orders.packed_linear.overloadpacket, weight_orders.packed_convolution.overloadpacket}


@dataclass(frozen=True)
class Stretch:
    """Consecutive nodes of a graph, without constants.

    Attributes:
        nodes: the nodes.
        inputs: the outside nodes that they read, in the order of their first use, without constants.
        form: equal for two stretches that compute the same function; None if the stretch is not compared.
    """

    nodes: Sequence[Node]
    inputs: Sequence[Node]
    form: Hashable = None

    def part(self, outputs: Sequence[Node]) -> GraphModule:
        """Returns the stretch as a graph of its own, with the stretch's inputs and with these nodes as outputs."""
        graph = Graph()
        copies: dict[Node, Node] = {}
        for source in self.inputs:
            copies[source] = graph.placeholder(source.name)
            copies[source].meta = dict(source.meta)
        constants = [source for node in self.nodes for source in node.all_input_nodes if source.op == "get_attr"]
        for node in dict.fromkeys((*constants, *self.nodes)):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        owner = self.nodes[0].graph.owning_module
        assert owner is not None
        return GraphModule(owner, graph)


def stretches(nodes: Sequence[Node], symbols: SymbolValues, layout: Callable[[Node], Hashable]) -> list[Stretch] | None:
    """Splits a graph into stretches, some of which have equal forms; returns None if it has no repeats that pay.

    Args:
        nodes: the computed nodes, in order, without constants.
        symbols: the values of the graph's sizes.
        layout: returns a key of an outside operand that must be equal, besides shape, strides and dtype.
    """
    forms = _Forms(symbols, layout)
    if sum(forms.product_bytes([node]) for node in nodes) < FEWEST * LARGE:
        return None
    kinds: dict[Hashable, int] = {}
    tokens = [kinds.setdefault(forms.token(node), len(kinds)) for node in nodes]
    crossings = _crossings(nodes)
    found: list[Stretch] = []

    def cut(start: int, end: int) -> None:
        run = _run(nodes, tokens, crossings, forms, start, end)
        if run is None:
            if start < end:
                found.append(Stretch(nodes[start:end], forms.of(nodes[start:end])[1]))
            return
        first, equal = run
        cut(start, first)
        found.extend(equal)
        cut(first + sum(len(stretch.nodes) for stretch in equal), end)

    cut(0, len(nodes))
    return found if len(found) > 1 else None


def _run(
    nodes: Sequence[Node], tokens: Sequence[int], crossings: Sequence[float], forms: _Forms, start: int, end: int
) -> tuple[int, list[Stretch]] | None:
    """Returns the start of a run of equal stretches within nodes[start:end], and the stretches; None if there is no run."""
    for period, first, length in sorted(_periodic(tokens, start, end), key=lambda run: run[0] - run[2] // run[0] * run[0]):
        count = length // period
        places = sorted(range(first, first + length % period + 1), key=lambda place: crossings[place + period])
        for place in places[:2]:
            ends = range(place, place + count * period + 1, period)
            if math.isinf(max(crossings[end] for end in ends)) or forms.product_bytes(nodes[place : place + period]) < LARGE:
                continue
            each = [nodes[begin : begin + period] for begin in ends[:-1]]
            made = [Stretch(part, inputs, form) for part, (form, inputs) in zip(each, map(forms.of, each), strict=True)]
            index, equal = _longest(made)
            if len(equal) >= FEWEST:
                return place + index * period, equal
    return None


def _periodic(tokens: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (period, first, length) of periodic runs of tokens with at least FEWEST periods."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for place in range(start, end):
        if tokens[place] in last:
            distances[place - last[tokens[place]]] += 1
        last[tokens[place]] = place
    for period, _ in distances.most_common(_TRIED):
        first = start
        for place in range(start, end - period + 1):
            if place == end - period or tokens[place] != tokens[place + period]:
                if place - first >= (FEWEST - 1) * period:
                    yield period, first, place - first + period
                first = place + 1


def _longest(made: Sequence[Stretch]) -> tuple[int, list[Stretch]]:
    """Returns the longest run of stretches with the same form: the index of the first, and the stretches."""
    best, start = (0, 0), 0
    for index in range(1, len(made) + 1):
        if index == len(made) or made[index].form != made[start].form:
            best, start = max(best, (index - start, -start)), index
    count, first = best[0], -best[1]
    return first, list(made[first : first + count])


def _crossings(nodes: Sequence[Node]) -> list[float]:
    """Returns, for each cut in front of a node and after the last, the number of values that cross it.

    Infinity if one of them is neither a tensor nor a number.
    """
    places = {node: place for place, node in enumerate(nodes)}
    changes = [0.0] * (len(nodes) + 1)
    closed = [False] * (len(nodes) + 1)
    for node, place in places.items():
        last = max((places[user] for user in node.users if user in places), default=place)
        changes[place + 1] += 1
        changes[min(last, len(nodes) - 1) + 1] -= 1
        if not isinstance(node.meta.get("val"), (torch.Tensor, int, torch.SymInt)):
            closed[place + 1 : last + 1] = [True] * (last - place)
    return [math.inf if is_closed else count for count, is_closed in zip(itertools.accumulate(changes), closed, strict=True)]


class _Forms:
    """Computes the forms of parts of a graph.

    Args:
        symbols: the values of the graph's sizes.
        layout: as in `stretches`.
    """

    def __init__(self, symbols: SymbolValues, layout: Callable[[Node], Hashable]) -> None:
        self._symbols, self._layout = symbols, layout
        self._tokens: dict[Node, Hashable] = {}
        self._values: dict[Node, Hashable] = {}

    def token(self, node: Node) -> Hashable:
        """Returns a key of the function that a node computes, independent of the nodes that it reads."""
        if node not in self._tokens:
            arguments = self._encoded((node.args, node.kwargs), lambda source: source.op == "get_attr" and self._constant(source))
            memory = tuple(_shares(node, source) for source in node.all_input_nodes)
            self._tokens[node] = (node.op, node.target, arguments, self._value(node), memory, FOR_CHECKS in node.meta)
        return self._tokens[node]

    def of(self, nodes: Sequence[Node], inputs: Sequence[Node] = ()) -> tuple[Hashable, list[Node]]:
        """Returns the form of nodes, and the outside nodes that they read. inputs: outside nodes that come first, in this order."""
        inside = {node: index for index, node in enumerate(nodes)}
        outside = {node: index for index, node in enumerate(inputs)}

        def place(source: Node) -> Hashable:
            if source.op == "get_attr":
                return None
            return inside[source] if source in inside else ~outside.setdefault(source, len(outside))

        # In the order of the arguments in the tokens.
        read = tuple(tuple(map(place, _sources(node))) for node in nodes)
        operands = tuple((self._value(source), self._layout(source)) for source in outside)
        return (tuple(map(self.token, nodes)), read, operands), list(outside)

    def product_bytes(self, nodes: Collection[Node]) -> int:
        """Returns the bytes that the products among some nodes read and write, each tensor counted once."""
        found: dict[int, int] = {}
        for node in nodes:
            if getattr(node.target, "overloadpacket", None) in _PRODUCTS:
                for tensor in pytree.tree_leaves([item.meta.get("val") for item in (node, *node.all_input_nodes)]):
                    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                        found[private.storage_id(tensor)] = math.prod(map(self._symbols.integer, tensor.shape)) * tensor.itemsize
        inner = sum(self.product_bytes(list(graph.graph.nodes)) for node in nodes for graph in _graphs(node))
        return sum(found.values()) + inner

    def _value(self, node: Node) -> Hashable:
        if node not in self._values:
            value = node.meta.get("val")
            flags = [(tensor.is_conj(), tensor.is_neg()) for tensor in pytree.tree_leaves(value) if isinstance(tensor, torch.Tensor)]
            self._values[node] = (self._encoded(self._symbols.concrete(value), lambda source: source), tuple(flags))
        return self._values[node]

    def _encoded(self, argument: Any, node: Callable[[Node], Hashable]) -> Hashable:
        """Returns a hashable key of an argument: 1, 1.0 and True have different keys, and all NaNs have the same."""
        if isinstance(argument, Node):
            return node(argument)
        if isinstance(argument, TensorSpec):
            return argument
        if isinstance(argument, (list, tuple)):
            return ("sequence", *(self._encoded(item, node) for item in argument))
        if isinstance(argument, dict):
            return ("mapping", *((name, self._encoded(item, node)) for name, item in argument.items()))
        if isinstance(argument, slice):
            return ("slice", *(self._encoded(item, node) for item in (argument.start, argument.stop, argument.step)))
        return type(argument), repr(argument)

    def _constant(self, node: Node) -> Hashable:
        assert node.graph.owning_module is not None
        value = constant_value(node.graph.owning_module, node)
        if isinstance(value, GraphModule):
            nodes = [item for item in value.graph.nodes if item.op not in ("placeholder", "get_attr")]
            return "graph", self.of(nodes, value.graph.find_nodes(op="placeholder"))[0]
        if isinstance(value, torch.Tensor):
            return "tensor", value.dtype, tuple(value.shape), to_numpy(value).tobytes()
        return "object", id(value)


def _sources(node: Node) -> list[Node]:
    """Returns the nodes among a node's arguments, with repetitions."""
    found: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda source: found.append(source))
    return found


def _shares(node: Node, source: Node) -> bool:
    """True if a node's fake result shares the storage of a fake operand, which a few lowerings depend on."""
    values = node.meta.get("val"), source.meta.get("val")
    if not all(isinstance(value, torch.Tensor) and value.layout == torch.strided for value in values):
        return False
    return private.storage_id(values[0]) == private.storage_id(values[1])


def _graphs(node: Node) -> list[GraphModule]:
    """Returns the subgraphs that a node's op calls."""
    constants = [source for source in node.all_input_nodes if source.op == "get_attr" and source.graph.owning_module is not None]
    values = [constant_value(source.graph.owning_module, source) for source in constants if source.graph.owning_module is not None]
    return [value for value in values if isinstance(value, GraphModule)]
