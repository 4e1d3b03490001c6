"""Moves writes to inputs out of a graph: torch's in-place ops do these late writes after the program has succeeded.

XLA cannot write to torch's memory: a program that changes one row of a large input returns the whole input, and the result is then copied
to the input. If the input's final value is a chain of writes to views of the input (write_chains.py), the program returns the written
values and their indices instead, and torch runs a second graph with the writes.

After the first late write nothing may fail, and no written value may depend on an earlier late write:

- An op that checks indices stays in the program only for its check. If torch's in-place op could fail for another reason, the writes
  stay in the program.
- A written value has memory of its own: the program clones a value that shares an input's memory.
- An output that shares the memory of a written input is cloned, too, unless AOTAutograd derives the output from the input after the call.
- A graph with in-place ops has no late writes.

Nodes that use the whole new value of an input, and outputs with memory of their own, still use the value that the program computes. A node
that uses a view of the new value uses the value that was written to this view (written_values.py).

On a GPU, calls return before the outcome of the program's checks is known. If a check has failed, the program returns valid indices and the
old values, so that the late writes change nothing (`commit_if_ok`). Writes for which this is not possible stay in the program.
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

from ...capture.graph import AtenGraph, add_call, written_inputs
from ...lowering.fallback import mutates
from ...lowering.graphs import FOR_CHECKS, is_tensor, view_source
from ...lowering.interpreter import is_plain_python
from ...lowering.ops.commit_if_ok import commit_if_ok
from ...runtime import private
from ...torch_ops import aten
from .device_transfers import has_several_devices
from .split import symbols
from .write_chains import InputView, ViewOp, Write, WrittenView, add_view, written_views
from .written_values import read_written_values

# An input gets late writes only if it has at least this many bytes per write. A smaller input is copied as a whole, which takes about ten
# microseconds.
MIN_BYTES_PER_WRITE = 1 << 16


@dataclass(frozen=True)
class LateWrites:
    """A graph without its late writes, and the graph of the late writes.

    Attributes:
        graph: returns the whole graph's outputs, with the written inputs themselves in place of their new values, and then the *parts*:
            the written values and their indices.
        program_inputs: the positions of the whole graph's inputs that `graph` takes.
        output_count: the number of the whole graph's outputs.
        writes: the graph of the writes, which torch runs afterwards.
        write_inputs: the positions of the whole graph's inputs that `writes` takes, before the parts.
        written: the positions of all written inputs, whether `writes` or the program's caller writes to them.
    """

    graph: AtenGraph
    program_inputs: Sequence[int]
    output_count: int
    writes: GraphModule
    write_inputs: Sequence[int]
    written: Sequence[int]


def split_late_writes(graph: AtenGraph) -> LateWrites | None:
    """Splits the late writes off a graph. Returns None if the graph has no late writes."""
    nodes = graph.module.graph
    targets = written_inputs(nodes)
    if graph.phase != "inference" or not targets or has_several_devices(graph.module) or any(mutates(node.target) for node in nodes.nodes):
        return None
    placeholders = nodes.find_nodes(op="placeholder")
    state_by_node = written_views(nodes, {placeholders[position] for position in targets.values()})
    outputs: Sequence[Any] = nodes.output_node().args[0]
    chains = {
        placeholders[position]: state
        for index, position in targets.items()
        if (state := state_by_node.get(outputs[index])) is not None and state.source is placeholders[position] and _is_large_enough(state)
        if not has_late_checks(placeholders[position]) or all(map(_can_restore_old_values, state.writes))
    }
    return _Splitter(graph, chains, state_by_node).result() if chains else None


def _is_large_enough(state: WrittenView) -> bool:
    """True if `state` describes a whole input after writes, and the input has at least `MIN_BYTES_PER_WRITE` or a symbolic size."""
    value = state.source.meta["val"]
    if not state.writes or not state.view.is_whole:
        return False
    sizes = [size for size in value.shape if isinstance(size, int)]
    return len(sizes) < value.dim() or math.prod(sizes) * value.itemsize >= MIN_BYTES_PER_WRITE * len(state.writes)


def has_late_checks(node: Node) -> bool:
    """True if calls of a program with this input return before the outcome of the program's checks is known."""
    return bool(node.meta["val"].device.type == "cuda")


def _can_restore_old_values(write: Write) -> bool:
    """True if a write can write the values from before the call instead of the new values."""
    if write.op is aten.index_put_.default:
        kinds = {item.meta["val"].dtype for item in write.args[0] if item is not None}
        return kinds == {torch.int64} and not any(write.args[2:])
    return write.op is aten.index_copy_.default or not write.is_indexed


class _Splitter:
    """Splits a graph into the program's graph and the graph of its late writes.

    Args:
        graph: the whole graph.
        chains: the final state of each input with late writes, by the input's node.
        states: the state of each node whose value is a view of an input: the input, the view and the writes so far.
    """

    def __init__(self, graph: AtenGraph, chains: dict[Node, WrittenView], states: dict[Node, WrittenView]) -> None:
        self._whole, self._chains, self._states = graph, chains, states
        self._placeholders = graph.module.graph.find_nodes(op="placeholder")
        self._output_node = graph.module.graph.output_node()
        self._targets = written_inputs(graph.module.graph)
        self._program, self._copies = Graph(), dict[Node, Node]()
        self._program.graph_copy(graph.module.graph, self._copies)
        # The graph of the writes. Its placeholders stand for inputs of the whole graph (_read) and for parts that the program returns
        # (_parts). Both dicts are by the whole graph's node.
        self._late = Graph()
        self._read: dict[Node, Node] = {}
        self._parts: dict[Node, Node] = {}
        self._part_nodes: list[Node] = []
        self._views: dict[tuple[Node, tuple[ViewOp, ...]], Node] = {}
        self._input_memory, self._written_memory = _Memory(self._placeholders), _Memory(chains)

    def result(self) -> LateWrites:
        """Returns both graphs."""
        read_written_values(
            self._program, self._copies, {node: state for node, state in self._states.items() if state.source in self._chains}
        )
        for source, state in self._chains.items():
            for write in state.writes:
                if write.is_indexed:
                    self._copies[write.node].meta[FOR_CHECKS] = True
                if has_late_checks(source):
                    op, args = self._write_unless_failed(source, write)
                    self._late.call_function(op, (self._late_view(source, write.view), *args))
                else:
                    args, kwargs = torch.fx.node.map_arg((write.args, write.kwargs), self._argument)
                    self._late.call_function(write.op, (self._late_view(source, write.view), *args), kwargs)
        self._late.output(())
        _move_to_start([*self._read.values(), *self._parts.values()])
        outputs = [self._output(index, output) for index, output in enumerate(self._output_node.args[0])]
        result = self._program.output((*outputs, *self._part_nodes))
        meta = self._output_node.meta
        result.meta = {**meta, "desc": [*(meta.get("desc") or [None] * len(outputs)), *[None] * len(self._part_nodes)]}
        inputs = self._erase_unused()
        positions = {node: position for position, node in enumerate(self._placeholders)}
        static = tuple(inputs.index(position) for position in self._whole.static)
        rest = dataclasses.replace(
            self._whole, module=GraphModule(self._whole.module, self._program), static=static, rederived_outputs=frozenset()
        )
        read = [positions[node] for node in self._read]
        written = sorted(set(self._targets.values()))
        return LateWrites(rest, inputs, len(outputs), GraphModule({}, self._late), read, written)

    def _input(self, node: Node) -> Node:
        """Returns the placeholder for an input of the whole graph in the graph of the writes."""
        if node not in self._read:
            self._read[node] = self._late.placeholder(node.name)
        return self._read[node]

    def _argument(self, node: Node) -> Node:
        """Returns the node for a write's argument in the graph of the writes."""
        if node.op == "placeholder" and node not in self._chains:
            return self._input(node)
        if is_plain_python(node) and all(map(_is_number, (node, *node.all_input_nodes))):
            return self._late.node_copy(node, self._argument)
        if node not in self._parts:
            self._parts[node] = self._late.placeholder(f"part_{node.name}")
            self._part_nodes.append(self._cloned_out_of(node, self._input_memory))
        return self._parts[node]

    def _cloned_out_of(self, node: Node, memory: _Memory) -> Node:
        """Returns the program's node for a value, cloned if the value is in `memory`."""
        copy = self._copies[node]
        return add_call(self._program, aten.clone.default, copy) if is_tensor(node) and memory.holds(node) else copy

    def _write_unless_failed(self, source: Node, write: Write) -> tuple[Any, tuple[Any, ...]]:
        """Returns an in-place op, and the arguments after its target, for a write whose failure is reported late.

        If a check of the program fails, the op writes the values from before the call.
        """

        def unless_failed(new: Node, old: Node) -> Node:
            return add_call(self._program, commit_if_ok, new, old)

        old = self._old_view(source, write.view)
        args = torch.fx.node.map_arg(write.args, self._copies.__getitem__)
        if write.op is aten.index_copy_.default:
            dim, index, new = args
            index = unless_failed(index, add_call(self._program, aten.zeros_like.default, index))
            new = unless_failed(new, add_call(self._program, aten.index_select.default, old, dim, index))
            return write.op, (dim, self._part(index), self._part(new))
        if write.op is aten.index_put_.default:
            indices = [item and unless_failed(item, add_call(self._program, aten.zeros_like.default, item)) for item in args[0]]
            old = add_call(self._program, aten.index.Tensor, old, indices)
            new = unless_failed(add_call(self._program, aten.copy.default, old, args[1]), old)
            return write.op, ([item and self._part(item) for item in indices], self._part(new))
        whole = aten.copy.default if write.op is aten.copy_.default else write.node.target
        new = unless_failed(add_call(self._program, whole, old, *args), old)
        return aten.copy_.default, (self._part(new),)

    def _part(self, node: Node) -> Node:
        """Makes a node an output of the program. Returns the placeholder for this output in the graph of the writes."""
        self._part_nodes.append(node)
        part = self._parts[node] = self._late.placeholder(f"part_{node.name}")
        return part

    def _old_view(self, source: Node, view: InputView) -> Node:
        """Returns the program's node for a view of an input before the call."""
        return add_view(self._program, view, source, self._copies)

    def _late_view(self, source: Node, view: InputView) -> Node:
        """Returns the node for a view of an input in the graph of the writes."""
        node = self._input(source)
        for count, step in enumerate(view.steps):
            key = source, view.steps[: count + 1]
            if key not in self._views:
                node = self._late.call_function(step.op, (node, *torch.fx.node.map_arg(step.args, self._argument)))
                self._views[key] = node if step.item is None else self._late.call_function(operator.getitem, (node, step.item))
            node = self._views[key]
        return node

    def _output(self, index: int, output: Any) -> Any:
        """Returns the program's node for one of the whole graph's outputs."""
        if not isinstance(output, Node):
            return output
        state = self._states.get(output)
        is_view_of_input = index in self._whole.rederived_outputs or index in self._targets
        if is_view_of_input and state is not None and state.source in self._chains and state.writes == self._chains[state.source].writes:
            return self._old_view(state.source, state.view)
        return self._copies[output] if index in self._whole.rederived_outputs else self._cloned_out_of(output, self._written_memory)

    def _erase_unused(self) -> list[int]:
        """Erases unused nodes and inputs of the program. Returns the positions of the remaining inputs.

        An unused number must not stay an input, since a program would be compiled for each value of the number.
        """
        with_state = {self._copies[node] for node in self._states}
        for node in reversed(self._program.nodes):
            is_erasable = node in with_state or (is_plain_python(node) and _is_number(node))
            if node.op == "call_function" and is_erasable and not node.users and FOR_CHECKS not in node.meta:
                self._program.erase_node(node)
        needed = {
            symbol
            for node in self._program.nodes
            if node.op != "placeholder" or is_tensor(node)
            for symbol in symbols(node.meta.get("val"))
        }
        remaining = []
        for position, node in enumerate(self._placeholders):
            copy = self._copies[node]
            if copy.users or is_tensor(node) or not needed.isdisjoint(symbols(node.meta["val"])):
                remaining.append(position)
            else:
                self._program.erase_node(copy)
        return remaining


class _Memory:
    """The storages of a set of inputs."""

    def __init__(self, inputs: Collection[Node]) -> None:
        self._inputs = set(inputs)
        self._storages = {private.storage_id(item.meta["val"]) for item in inputs if is_tensor(item)}

    def holds(self, node: Node) -> bool:
        """True if a node's tensor shares one of these storages, according to its chain of views or its fake tensor."""
        origin = node
        while (source := view_source(origin)) is not None:
            origin = source
        return origin in self._inputs or private.storage_id(node.meta["val"]) in self._storages


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))


def _move_to_start(nodes: Sequence[Node]) -> None:
    """Moves nodes to the start of their graph, in this order."""
    for node in reversed(nodes):
        first = next(iter(node.graph.nodes))
        if first is not node:
            first.prepend(node)
