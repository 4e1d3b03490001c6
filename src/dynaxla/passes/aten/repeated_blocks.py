"""Finds consecutive repeated blocks in a graph, such as the layers of a transformer, which can share one program.

AOTAutograd keeps the order in which the model ran its ops. So equal layers are equal *segments* (consecutive nodes) at equal distances in
the graph. Two segments compute the same function if they have the same *structural key*. The key covers:

- the ops in their order, with their numbers and constants;
- the shape, strides and dtype of each result, and of each operand from outside the segment;
- the source of each argument: a node of the segment, or an outside operand, by its index.

The key does not depend on the nodes that compute the outside operands, nor on the names of modules.

A segment that is a program of its own adds about 20 microseconds of Python to a call, and XLA does not fuse ops across the boundaries of a
segment. So a segment is split off only if its matrix products read and write at least `MIN_PRODUCT_BYTES`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from ...capture.graph import called_subgraphs, subgraph
from ...lowering import SymbolValues, TensorSpec
from ...lowering.graphs import FOR_CHECKS
from ...lowering.interpreter import constant_value, to_numpy
from ...runtime import private

# The minimum number of bytes that the products of a repeated segment read and write. At 20 GB/s this takes 40 times as long as the call of
# one more program.
MIN_PRODUCT_BYTES = 1 << 24
# The minimum number of consecutive equal segments that are split off.
MIN_REPEATS = 3

# The number of periods (distances between equal nodes) that are tried for a range of nodes, the most frequent period first.
_MAX_TRIED_PERIODS = 16


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes of a graph, without constants.

    Attributes:
        nodes: the nodes.
        inputs: the outside nodes that the segment reads, in the order of their first use, without constants.
        structural_key: equal for two segments that compute the same function; None for a segment that is not repeated.
    """

    nodes: Sequence[Node]
    inputs: Sequence[Node]
    structural_key: Hashable = None

    def subgraph(self, outputs: Sequence[Node]) -> GraphModule:
        """Returns the segment as a graph of its own, whose inputs are `inputs` and whose outputs are the nodes `outputs`."""
        owner = self.nodes[0].graph.owning_module
        assert owner is not None
        return subgraph(owner, self.inputs, self.nodes, outputs)


def split_into_segments(nodes: Sequence[Node], symbols: SymbolValues, layout: Callable[[Node], Hashable]) -> list[Segment] | None:
    """Splits a graph into segments, some of which have equal structural keys. Returns None if no segment is repeated and large enough.

    Args:
        nodes: the computed nodes, in order, without constants.
        symbols: the values of the graph's symbolic sizes.
        layout: returns a key of an outside operand's memory layout, which becomes part of the structural key.
    """
    structural_keys = _StructuralKeys(symbols, layout)
    if sum(structural_keys.product_bytes([node]) for node in nodes) < MIN_REPEATS * MIN_PRODUCT_BYTES:
        return None
    numbers: dict[Hashable, int] = {}
    tokens = [numbers.setdefault(structural_keys.token(node), len(numbers)) for node in nodes]
    live_values = _live_values(nodes)
    segments: list[Segment] = []

    def split(start: int, end: int) -> None:
        """Adds the segments of nodes[start:end]."""
        repeats = _find_repeats(nodes, tokens, live_values, structural_keys, start, end)
        if repeats is None:
            if start < end:
                segments.append(Segment(nodes[start:end], structural_keys.key_and_inputs(nodes[start:end])[1]))
            return
        first, equal = repeats
        split(start, first)
        segments.extend(equal)
        split(first + sum(len(segment.nodes) for segment in equal), end)

    split(0, len(nodes))
    return segments if len(segments) > 1 else None


def _find_repeats(
    nodes: Sequence[Node], tokens: Sequence[int], live_values: Sequence[float], structural_keys: _StructuralKeys, start: int, end: int
) -> tuple[int, list[Segment]] | None:
    """Finds equal consecutive segments in nodes[start:end].

    Returns: the position of the first segment, and the segments; None if there are none.

    Periodic runs with more repeated nodes are tried first. For each run, the two offsets of the first segment are tried at which the fewest
    values are live across the boundary of a segment.
    """
    for period, first, length in sorted(_periodic_runs(tokens, start, end), key=lambda run: run[0] - run[2] // run[0] * run[0]):
        count = length // period
        offsets = sorted(range(first, first + length % period + 1), key=lambda offset: live_values[offset + period])
        for offset in offsets[:2]:
            boundaries = range(offset, offset + count * period + 1, period)
            if math.isinf(max(live_values[boundary] for boundary in boundaries)) or (
                structural_keys.product_bytes(nodes[offset : offset + period]) < MIN_PRODUCT_BYTES
            ):
                continue
            parts = [nodes[boundary : boundary + period] for boundary in boundaries[:-1]]
            segments = [
                Segment(part, inputs, key) for part, (key, inputs) in zip(parts, map(structural_keys.key_and_inputs, parts), strict=True)
            ]
            index, equal = _longest_equal_run(segments)
            if len(equal) >= MIN_REPEATS:
                return offset + index * period, equal
    return None


def _periodic_runs(tokens: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields the period, the start and the length of each run of tokens that consists of at least `MIN_REPEATS` equal periods."""
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for position in range(start, end):
        if tokens[position] in last:
            distances[position - last[tokens[position]]] += 1
        last[tokens[position]] = position
    for period, _ in distances.most_common(_MAX_TRIED_PERIODS):
        first = start
        for position in range(start, end - period + 1):
            if position == end - period or tokens[position] != tokens[position + period]:
                if position - first >= (MIN_REPEATS - 1) * period:
                    yield period, first, position - first + period
                first = position + 1


def _longest_equal_run(segments: Sequence[Segment]) -> tuple[int, list[Segment]]:
    """Returns the longest run of segments with the same structural key: the index of the first segment, and the segments."""
    best, start = (0, 0), 0
    for index in range(1, len(segments) + 1):
        if index == len(segments) or segments[index].structural_key != segments[start].structural_key:
            best, start = max(best, (index - start, -start)), index
    count, first = best[0], -best[1]
    return first, list(segments[first : first + count])


def _live_values(nodes: Sequence[Node]) -> list[float]:
    """Returns, for each boundary before a node and after the last node, the number of values that are live across this boundary.

    A value is live from its node to its last user. The number is infinite if a live value is neither a tensor nor a number.
    """
    positions = {node: position for position, node in enumerate(nodes)}
    changes = [0.0] * (len(nodes) + 1)
    uncuttable = [False] * (len(nodes) + 1)
    for node, position in positions.items():
        last = max((positions[user] for user in node.users if user in positions), default=position)
        changes[position + 1] += 1
        changes[min(last, len(nodes) - 1) + 1] -= 1
        if not isinstance(node.meta.get("val"), (torch.Tensor, int, torch.SymInt)):
            uncuttable[position + 1 : last + 1] = [True] * (last - position)
    counts = itertools.accumulate(changes)
    return [math.inf if is_uncuttable else count for count, is_uncuttable in zip(counts, uncuttable, strict=True)]


class _StructuralKeys:
    """Computes the structural keys of segments of one graph.

    Args:
        symbols: the values of the graph's symbolic sizes.
        layout: as in `split_into_segments`.
    """

    def __init__(self, symbols: SymbolValues, layout: Callable[[Node], Hashable]) -> None:
        self._symbols, self._layout = symbols, layout
        self._tokens: dict[Node, Hashable] = {}
        self._values: dict[Node, Hashable] = {}

    def token(self, node: Node) -> Hashable:
        """Returns a key of the function that a node computes. The key does not depend on the node's operands, except on constants."""
        if node not in self._tokens:
            arguments = self._argument_key((node.args, node.kwargs), lambda source: source.op == "get_attr" and self._constant_key(source))
            memory = tuple(_shares_storage(node, source) for source in node.all_input_nodes)
            self._tokens[node] = (node.op, node.target, arguments, self._value_key(node), memory, FOR_CHECKS in node.meta)
        return self._tokens[node]

    def key_and_inputs(self, nodes: Sequence[Node], inputs: Sequence[Node] = ()) -> tuple[Hashable, list[Node]]:
        """Returns the structural key of a segment's nodes, and the outside nodes that the segment reads.

        inputs: outside nodes that are returned first, in this order.
        """
        inside = {node: index for index, node in enumerate(nodes)}
        outside = {node: index for index, node in enumerate(inputs)}

        def source_index(source: Node) -> Hashable:
            """Returns the index of a node of the segment, or the complement of the index of an outside node."""
            if source.op == "get_attr":
                return None
            return inside[source] if source in inside else ~outside.setdefault(source, len(outside))

        # In the order in which `token` encodes the arguments.
        indices = tuple(tuple(map(source_index, _operands(node))) for node in nodes)
        operands = tuple((self._value_key(source), self._layout(source)) for source in outside)
        return (tuple(map(self.token, nodes)), indices, operands), list(outside)

    def product_bytes(self, nodes: Collection[Node]) -> int:
        """Returns the number of bytes that the products among `nodes` read and write. Each storage counts once."""
        sizes: dict[int, int] = {}
        for node in nodes:
            if getattr(node.target, "overloadpacket", None) in flop_registry:  # matrix products, convolutions, attention
                for tensor in pytree.tree_leaves([item.meta.get("val") for item in (node, *node.all_input_nodes)]):
                    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                        sizes[private.storage_id(tensor)] = math.prod(map(self._symbols.integer, tensor.shape)) * tensor.itemsize
        inner = sum(self.product_bytes(list(graph.graph.nodes)) for node in nodes for graph in called_subgraphs(node))
        return sum(sizes.values()) + inner

    def _value_key(self, node: Node) -> Hashable:
        if node not in self._values:
            value = node.meta.get("val")
            flags = [(tensor.is_conj(), tensor.is_neg()) for tensor in pytree.tree_leaves(value) if isinstance(tensor, torch.Tensor)]
            self._values[node] = (self._argument_key(self._symbols.concrete(value), lambda source: source), tuple(flags))
        return self._values[node]

    def _argument_key(self, argument: Any, node: Callable[[Node], Hashable]) -> Hashable:
        """Returns a hashable key of an argument: 1, 1.0 and True have different keys, and all NaNs have the same key.

        node: returns the key of an argument that is a node.
        """
        if isinstance(argument, Node):
            return node(argument)
        if isinstance(argument, TensorSpec):
            return argument
        if isinstance(argument, (list, tuple)):
            return ("sequence", *(self._argument_key(item, node) for item in argument))
        if isinstance(argument, dict):
            return ("mapping", *((name, self._argument_key(item, node)) for name, item in argument.items()))
        if isinstance(argument, slice):
            return ("slice", *(self._argument_key(item, node) for item in (argument.start, argument.stop, argument.step)))
        return type(argument), repr(argument)

    def _constant_key(self, node: Node) -> Hashable:
        assert node.graph.owning_module is not None
        value = constant_value(node.graph.owning_module, node)
        if isinstance(value, GraphModule):
            nodes = [item for item in value.graph.nodes if item.op not in ("placeholder", "get_attr")]
            return "graph", self.key_and_inputs(nodes, value.graph.find_nodes(op="placeholder"))[0]
        if isinstance(value, torch.Tensor):
            return "tensor", value.dtype, tuple(value.shape), to_numpy(value).tobytes()
        return "object", id(value)


def _operands(node: Node) -> list[Node]:
    """Returns the nodes among a node's arguments, with repetitions."""
    operands: list[Node] = []
    torch.fx.node.map_arg((node.args, node.kwargs), lambda source: operands.append(source))
    return operands


def _shares_storage(node: Node, source: Node) -> bool:
    """True if a node's fake result shares the storage of a fake operand. A few lowerings depend on this."""
    values = node.meta.get("val"), source.meta.get("val")
    if not all(isinstance(value, torch.Tensor) and value.layout == torch.strided for value in values):
        return False
    return private.storage_id(values[0]) == private.storage_id(values[1])
