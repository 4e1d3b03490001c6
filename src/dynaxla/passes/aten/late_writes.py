"""Late writes: takes out of a graph the writes to inputs that torch's in-place ops can do after the program has succeeded.

XLA cannot write to torch's memory: a program that changes one row of a large input returns the whole input, which is then copied over it.
If the input's final value is a chain of writes to places in it (write_chains.py), the program returns the written values and their indices
instead, and torch runs a second graph that writes them.

No step may fail after the first write, and no written value may depend on an earlier write:

- An op that checks indices stays in the program for its check alone. Where torch's in-place op could fail for another reason, there is no
  chain.
- Written values have memory of their own: the program copies a value that lies in an input's memory.
- The graph has no ops that write. An output in the memory of a changed input is copied, too, unless AOTAutograd derives it from the
  input itself after the call.

Consumers of the new value inside the program, and outputs with memory of their own, get it from the program as before. Consumers of a
single place read the value that was written there (written_places.py).

On a GPU no call waits for the program's checks. If a check has failed, the program returns the old values, to be written again, and valid
indices (`held`). Writes for which that is not possible stay in the program.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...capture.graph import AtenGraph, written_inputs
from ...lowering.fallback import writes
from ...lowering.graphs import FOR_CHECKS, viewed
from ...lowering.interpreter import is_plain_python
from ...lowering.ops.commit_if_ok import held
from ...runtime import private
from ...torch_ops import aten
from .device_transfers import has_several_devices
from .split import symbols
from .write_chains import InputView, ViewOp, Write, WrittenView, call, states, viewed_at
from .written_places import read_places

# The least bytes of an input for each late write to it. A smaller input is copied as a whole, as without late writes, which takes about ten
# microseconds.
SMALL = 1 << 16


@dataclass(frozen=True)
class LateWrites:
    """A graph without its late writes.

    Attributes:
        graph: returns the whole graph's outputs, with the written inputs themselves in place of their new values, and then the parts
            (written values and indices).
        inputs: the positions of the whole graph's inputs that `graph` takes.
        count: the number of the whole graph's outputs.
        writes: the graph of the writes, which torch runs afterwards.
        read: the positions of the whole graph's inputs that `writes` takes, in front of the parts.
        written: the positions of all inputs that are written to, by `writes` or by the program's caller.
    """

    graph: AtenGraph
    inputs: Sequence[int]
    count: int
    writes: GraphModule
    read: Sequence[int]
    written: Sequence[int]


def take_late_writes(graph: AtenGraph) -> LateWrites | None:
    """Splits the late writes off a graph; returns None if it has none."""
    nodes = graph.module.graph
    targets = written_inputs(nodes)
    if graph.phase != "inference" or not targets or has_several_devices(graph.module) or any(writes(node.target) for node in nodes.nodes):
        return None
    placeholders = nodes.find_nodes(op="placeholder")
    found = states(nodes, {placeholders[position] for position in targets.values()})
    outputs: Sequence[Any] = nodes.output_node().args[0]
    chains = {
        placeholders[position]: state
        for index, position in targets.items()
        if (state := found.get(outputs[index])) is not None and state.source is placeholders[position] and _pays(state)
        if not waits_for_no_check(placeholders[position]) or all(map(_can_be_held, state.writes))
    }
    return _Cut(graph, chains, found).result() if chains else None


def _pays(state: WrittenView) -> bool:
    value = state.source.meta["val"]
    if not state.writes or not state.place.is_whole:
        return False
    sizes = [size for size in value.shape if isinstance(size, int)]
    return len(sizes) < value.dim() or math.prod(sizes) * value.itemsize >= SMALL * len(state.writes)


def waits_for_no_check(node: Node) -> bool:
    """True if calls of a program with this input return before the results of the program's checks are known."""
    return bool(node.meta["val"].device.type == "cuda")


def _can_be_held(write: Write) -> bool:
    """True if a write can put back the values from before the call instead of the new ones."""
    if write.op is aten.index_put_.default:
        kinds = {item.meta["val"].dtype for item in write.args[0] if item is not None}
        return kinds == {torch.int64} and not any(write.args[2:])
    return write.op is aten.index_copy_.default or not write.is_indexed


class _Cut:
    """Splits a graph into the program's graph and the graph of its late writes.

    Args:
        graph: the whole graph.
        chains: the final state of each input that is written late, by the input's node.
        found: the states of all nodes that have one.
    """

    def __init__(self, graph: AtenGraph, chains: dict[Node, WrittenView], found: dict[Node, WrittenView]) -> None:
        self._whole, self._chains, self._found = graph, chains, found
        self._placeholders = graph.module.graph.find_nodes(op="placeholder")
        self._output_node = graph.module.graph.output_node()
        self._targets = written_inputs(graph.module.graph)
        self._rest, self._copies = Graph(), dict[Node, Node]()
        self._rest.graph_copy(graph.module.graph, self._copies)
        # The graph of the writes. Its inputs are inputs of the whole graph (_read) and parts that the program returns (_parts).
        self._late = Graph()
        self._read: dict[Node, Node] = {}
        self._parts: dict[Node, Node] = {}
        self._given: list[Node] = []
        self._views: dict[tuple[Node, tuple[ViewOp, ...]], Node] = {}
        self._input_memory, self._written_memory = _Memory(self._placeholders), _Memory(chains)

    def result(self) -> LateWrites:
        read_places(self._rest, self._copies, {node: state for node, state in self._found.items() if state.source in self._chains})
        for source, state in self._chains.items():
            for write in state.writes:
                if write.is_indexed:
                    self._copies[write.node].meta[FOR_CHECKS] = True
                if waits_for_no_check(source):
                    op, args = self._held(source, write)
                    self._late.call_function(op, (self._view(source, write.place), *args))
                else:
                    args, kwargs = torch.fx.node.map_arg((write.args, write.kwargs), self._argument)
                    self._late.call_function(write.op, (self._view(source, write.place), *args), kwargs)
        self._late.output(())
        _put_first([*self._read.values(), *self._parts.values()])
        outputs = [self._output(index, output) for index, output in enumerate(self._output_node.args[0])]
        result = self._rest.output((*outputs, *self._given))
        meta = self._output_node.meta
        result.meta = {**meta, "desc": [*(meta.get("desc") or [None] * len(outputs)), *[None] * len(self._given)]}
        inputs = self._without_needless()
        positions = {node: position for position, node in enumerate(self._placeholders)}
        static = tuple(inputs.index(position) for position in self._whole.static)
        rest = dataclasses.replace(
            self._whole, module=GraphModule(self._whole.module, self._rest), static=static, rederived_outputs=frozenset()
        )
        read = [positions[node] for node in self._read]
        written = sorted(set(self._targets.values()))
        return LateWrites(rest, inputs, len(outputs), GraphModule({}, self._late), read, written)

    def _input(self, node: Node) -> Node:
        if node not in self._read:
            self._read[node] = self._late.placeholder(node.name)
        return self._read[node]

    def _argument(self, node: Node) -> Node:
        """Returns the node in the graph of the writes for an argument of a write."""
        if node.op == "placeholder" and node not in self._chains:
            return self._input(node)
        if is_plain_python(node) and all(map(_is_number, (node, *node.all_input_nodes))):
            return self._late.node_copy(node, self._argument)
        if node not in self._parts:
            self._parts[node] = self._late.placeholder(f"part_{node.name}")
            self._given.append(self._apart(node, self._input_memory))
        return self._parts[node]

    def _apart(self, node: Node, memory: _Memory) -> Node:
        """Returns a value in the program, cloned if it lies in `memory`."""
        copy = self._copies[node]
        return call(self._rest, aten.clone.default, copy) if _is_tensor(node) and memory.holds(node) else copy

    def _held(self, source: Node, write: Write) -> tuple[Any, tuple[Any, ...]]:
        """Returns an in-place op and its arguments after the target, which write the same as `write`.

        If a check fails, they write the values that the place held before the call.
        """

        def unless_failed(new: Node, old: Node) -> Node:
            return call(self._rest, held, new, old)

        old = self._place(source, write.place)
        args = torch.fx.node.map_arg(write.args, self._copies.__getitem__)
        if write.op is aten.index_copy_.default:
            dim, index, new = args
            index = unless_failed(index, call(self._rest, aten.zeros_like.default, index))
            new = unless_failed(new, call(self._rest, aten.index_select.default, old, dim, index))
            return write.op, (dim, self._part(index), self._part(new))
        if write.op is aten.index_put_.default:
            indices = [item and unless_failed(item, call(self._rest, aten.zeros_like.default, item)) for item in args[0]]
            old = call(self._rest, aten.index.Tensor, old, indices)
            new = unless_failed(call(self._rest, aten.copy.default, old, args[1]), old)
            return write.op, ([item and self._part(item) for item in indices], self._part(new))
        whole = aten.copy.default if write.op is aten.copy_.default else write.node.target
        new = unless_failed(call(self._rest, whole, old, *args), old)
        return aten.copy_.default, (self._part(new),)

    def _part(self, node: Node) -> Node:
        """Makes a node an output of the program, and returns the input for it in the graph of the writes."""
        self._given.append(node)
        part = self._parts[node] = self._late.placeholder(f"part_{node.name}")
        return part

    def _place(self, source: Node, place: InputView) -> Node:
        """Returns a place of an input, with the values from before the call, in the program."""
        return viewed_at(self._rest, place, source, self._copies)

    def _view(self, source: Node, place: InputView) -> Node:
        """Returns a place of an input in the graph of the writes."""
        view = self._input(source)
        for count, step in enumerate(place.steps):
            key = source, place.steps[: count + 1]
            if key not in self._views:
                view = self._late.call_function(step.op, (view, *torch.fx.node.map_arg(step.args, self._argument)))
                self._views[key] = view if step.item is None else self._late.call_function(operator.getitem, (view, step.item))
            view = self._views[key]
        return view

    def _output(self, index: int, output: Any) -> Any:
        """Returns the program's node for one of the whole graph's outputs."""
        if not isinstance(output, Node):
            return output
        state = self._found.get(output)
        is_memory = index in self._whole.rederived_outputs or index in self._targets
        if is_memory and state is not None and state.source in self._chains and state.writes == self._chains[state.source].writes:
            return self._place(state.source, state.place)
        return self._copies[output] if index in self._whole.rederived_outputs else self._apart(output, self._written_memory)

    def _without_needless(self) -> list[int]:
        """Erases nodes and inputs that the program does not need any more, and returns the positions of the remaining inputs.

        Numbers among the inputs are erased, too, since there would be a program for each of their values.
        """
        followed = {self._copies[node] for node in self._found}
        for node in reversed(self._rest.nodes):
            is_needless = node in followed or (is_plain_python(node) and _is_number(node))
            if node.op == "call_function" and is_needless and not node.users and FOR_CHECKS not in node.meta:
                self._rest.erase_node(node)
        needed = {
            symbol for node in self._rest.nodes if node.op != "placeholder" or _is_tensor(node) for symbol in symbols(node.meta.get("val"))
        }
        kept = []
        for position, node in enumerate(self._placeholders):
            copy = self._copies[node]
            if copy.users or _is_tensor(node) or not needed.isdisjoint(symbols(node.meta["val"])):
                kept.append(position)
            else:
                self._rest.erase_node(copy)
        return kept


class _Memory:
    """The storages of a set of inputs."""

    def __init__(self, inputs: Collection[Node]) -> None:
        self._inputs = set(inputs)
        self._storages = {private.storage_id(item.meta["val"]) for item in inputs if _is_tensor(item)}

    def holds(self, node: Node) -> bool:
        """True if a node's tensor lies in this memory."""
        origin = node
        while (source := viewed(origin)) is not None:
            origin = source
        return origin in self._inputs or private.storage_id(node.meta["val"]) in self._storages


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))


def _put_first(nodes: Sequence[Node]) -> None:
    """Moves nodes to the start of their graph, in this order."""
    for node in reversed(nodes):
        first = next(iter(node.graph.nodes))
        if first is not node:
            first.prepend(node)
