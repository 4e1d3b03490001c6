"""Runs graphs by torch's own kernels: until XLA has compiled them, or always if XLA would not be faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..buffers.protocol import Binding, Buffers
from ..lowering.cpu.inplace_updates import write_in_place
from ..lowering.graphs import user_frame_or_module
from ..observe import events, metrics
from ..runtime import background, eager_fallback, late_checks, private, transfer
from ..runtime.guards import ArgumentCheck


class EagerGraph:
    """A graph whose nodes torch's kernels compute one by one.

    Args:
        module: The graph.
        nodes: The nodes whose values are returned: tensors or numbers.
    """

    def __init__(self, module: GraphModule, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        graph, copies = Graph(), dict[Node, Node]()
        graph.graph_copy(module.graph, copies)
        graph.output(tuple(copies[node] for node in self.nodes))
        graph.eliminate_dead_code()
        write_in_place(graph)
        self._module = GraphModule(module, graph)
        self.compute = self._module.forward
        # The graph's constant tensors. An output of the graph must not alias them.
        self.constants = [*self._module.buffers(), *self._module.parameters()]

    def values(self, args: Sequence[Any]) -> Sequence[Any]:
        """Returns the values of `nodes`, in order."""
        return _run_kernels(self.compute, args)

    def timed_values(self, args: Sequence[Any]) -> tuple[Sequence[Any], dict[int, float]]:
        """Returns the values of `nodes`, and the seconds that each line of user code took, by line number (see `events.line_number`)."""
        timed = _TimedInterpreter(self._module)
        return _run_kernels(timed.run, args), timed.seconds


def _run_kernels(compute: Callable[..., Sequence[Any]], args: Sequence[Any]) -> Sequence[Any]:
    """Calls a function so that torch's ops in it run as kernels, without the caller's dispatch modes."""
    if private.mode_count():
        with _disable_current_modes(), eager_fallback.kernels():
            return compute(*args)
    with eager_fallback.kernels():
        return compute(*args)


class _TimedInterpreter(Interpreter):
    """Runs a graph node by node and measures the time of each line of user code.

    Attributes:
        seconds: The time of each line, by line number (see `events.line_number`).
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # an exception of a kernel must be the same as in eager mode
        self.seconds: dict[int, float] = {}

    def run_node(self, node: Node) -> Any:
        if node.op != "call_function":
            return super().run_node(node)
        start = time.perf_counter()
        value = super().run_node(node)
        line = events.line_number(user_frame_or_module(node))
        self.seconds[line] = self.seconds.get(line, 0.0) + time.perf_counter() - start
        return value


@dataclass(frozen=True)
class _FirstCallLayouts:
    """The layouts of the first call, for the fast path of later calls.

    A *value* is a node's value as torch's kernels have computed it. A *result* is the same value with the strides of a program's result.

    Attributes:
        match_inputs: Called with input tensors; returns true if they have the layouts of the first call's inputs.
        match_values: Called with values; returns true if they have the layouts of the first call's values.
        results: For each result, None if it is the value itself; else the shape and strides in which a new tensor (to autograd not a view)
            reinterprets the value's memory. None in place of the list if every result is the value itself.
        are_outputs: True if the graph's outputs are exactly the results.
    """

    match_inputs: Callable[..., bool]
    match_values: Callable[..., bool]
    results: Sequence[tuple[Sequence[int], Sequence[int]] | None] | None
    are_outputs: bool


def _are_same_objects(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """True if two sequences consist of the same objects in the same order."""
    return len(first) == len(second) and all(item is other for item, other in zip(first, second, strict=True))


def _is_value_itself(result: torch.Tensor, value: torch.Tensor) -> bool:
    """True if a result has the storage, offset and dtype of a value, and the value has no conjugate or negative bit."""
    if value.is_conj() or value.is_neg() or value.dtype != result.dtype or value.storage_offset() != result.storage_offset():
        return False
    return private.storage_id(result) == private.storage_id(value)


class EagerExecutable:
    """A graph with concrete sizes that torch's kernels run. It has the interface of an `Executable`.

    Its outputs have the same strides and aliases as those of an `Executable`, and own their memory in the same cases. Exceptions of torch's
    kernels are those of eager mode.

    A small graph takes a few microseconds, and a call's overhead should not be larger. Between calls, other code evicts this code from the
    processor's caches, so that each further line costs time.

    Args:
        name: The graph's name.
        graph: The graph for torch's kernels. It returns the values of `buffers.nodes` and then of `buffers.numbers`.
        buffers: The graph's buffers.
        device: The graph's device.
    """

    program = None
    _counter = "by_torch"

    def __init__(self, name: str, graph: EagerGraph, buffers: Buffers, device: torch.device) -> None:
        self.name = name
        self._eager_graph, self._buffers, self._device = graph, buffers, device
        self._binding: Binding | None = None
        self._first_layouts: _FirstCallLayouts | None = None

    @staticmethod
    def take(args: list[Any]) -> list[Any]:
        """Returns all arguments, because torch's kernels may read inputs that a program would not read. Empties args."""
        inputs = args.copy()
        args.clear()
        return inputs

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Returns the graph's outputs for the arguments from `take`.

        Raises: exceptions of torch's kernels. If it raises, no input has been written to.
        """
        if private.is_profiling():
            with torch.profiler.record_function(self.name):
                return self._run(inputs)
        return self._run(inputs)

    def fast_path(self, args: list[Any]) -> list[Any] | None:
        """Returns the graph's outputs with little overhead, for inputs with the layouts of the first call's inputs.

        Returns None, and runs nothing, for inputs with other layouts, and while events or profiling are on. Empties args unless it returns
        None or raises. Raises: as a call does.

        The first call has established that each value is a tensor that owns its memory and uses all of it. This is not checked again:
        `unfusable_graphs.py` admits only ATen's own kernels, whose allocations do not depend on the values. The layouts of values are
        checked, because they may depend on torch's settings.
        """
        first = self._first_layouts
        if first is None or events.has_listeners() or private.is_profiling() or not first.match_inputs(*args):
            return None
        with private.below_autograd():
            values = self._eager_graph.compute(*args)
        metrics.add(self._counter)
        if not first.match_values(*values):
            return self._outputs(values, self.take(args))
        if first.results is not None:
            pairs = zip(values, first.results, strict=True)
            values = [value if view is None else transfer.reinterpret(value, *view) for value, view in pairs]
        if first.are_outputs:
            args.clear()
            return list(values)
        assert self._binding is not None
        return self._binding.outputs(values, self._binding.take(args))

    def _run(self, inputs: list[Any]) -> list[Any]:
        if self._device.type != "cpu":
            late_checks.raise_if_failed(self._device)
        values = self._values(inputs)
        metrics.add(self._counter)
        return self._outputs(values, inputs)

    def _outputs(self, values: Sequence[Any], inputs: list[Any]) -> list[Any]:
        """Returns the graph's outputs, given the nodes' values. Empties inputs."""
        count = len(self._buffers.nodes)
        binding = self._binding
        if binding is None:
            binding = self._binding = self._buffers.bind(values[count:])
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        results = self._buffers.results(values[:count], tensors + self._eager_graph.constants)
        is_first = self._first_layouts is None and len(tensors) == len(inputs) and len(values) == count
        outputs = binding.outputs(results, binding.take(inputs))
        if is_first and all(map(_is_value_itself, results, values)):
            checks = ArgumentCheck(tensors).matches, ArgumentCheck(values).matches
            views = [None if result is value else (result.shape, result.stride()) for result, value in zip(results, values, strict=True)]
            self._first_layouts = _FirstCallLayouts(*checks, views if any(views) else None, _are_same_objects(outputs, results))
        return outputs

    def _values(self, inputs: list[Any]) -> Sequence[Any]:
        """Returns the values of the nodes, computed by torch's kernels. Emits `ProgramRan` if there are listeners."""
        if not events.has_listeners():
            return self._eager_graph.values(inputs)
        values, lines = self._eager_graph.timed_values(inputs)
        events.emit(events.ProgramRan(self, sum(lines.values()), self._binding is None, lines))
        return values


class PendingExecutable(EagerExecutable):
    """A graph with concrete sizes that torch's kernels run until its program is compiled.

    Its `EagerGraph` is the same for all sizes. It returns the values of all nodes that are buffers for some sizes.
    """

    _counter = "meanwhile"

    def _values(self, inputs: list[Any]) -> Sequence[Any]:
        with background.eager_call():  # the background thread, which compiles the program, yields to this call
            values = dict(zip(self._eager_graph.nodes, super()._values(inputs), strict=True))
        return [values[node] for node in (*self._buffers.nodes, *self._buffers.numbers)]
