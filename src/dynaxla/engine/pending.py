"""What runs a graph until XLA has compiled it, and one in which XLA has nothing to do: torch's own kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..buffers.protocol import Binding, Buffers
from ..lowering.cpu.changed_parts import write_in_place
from ..lowering.graphs import user_frame
from ..observe import events, metrics
from ..runtime import background, by_torch, late_checks, private, transfer
from ..runtime.guards import ArgumentCheck


class Kernels:
    """A graph whose nodes torch computes one by one. nodes: those whose values are wanted."""

    def __init__(self, module: GraphModule, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        graph, copies = Graph(), dict[Node, Node]()
        graph.graph_copy(module.graph, copies)
        graph.output(tuple(copies[node] for node in self.nodes))
        graph.eliminate_dead_code()
        write_in_place(graph)
        self._module = GraphModule(module, graph)
        self.compute = self._module.forward
        # Tensors that the graph itself holds: no result may lie in their memory.
        self.constants = [*self._module.buffers(), *self._module.parameters()]

    def values(self, args: Sequence[Any]) -> Sequence[Any]:
        """The values of these nodes, in their order."""
        return _by_kernels(self.compute, args)

    def timed_values(self, args: Sequence[Any]) -> tuple[Sequence[Any], dict[int, float]]:
        """As `values`, with the seconds that they took, by the number of the user's line (see `events.line_number`)."""
        timed = _Timed(self._module)
        return _by_kernels(timed.run, args), timed.seconds


def _by_kernels(compute: Callable[..., Sequence[Any]], args: Sequence[Any]) -> Sequence[Any]:
    if private.mode_count():
        with _disable_current_modes(), by_torch.kernels():
            return compute(*args)
    with by_torch.kernels():
        return compute(*args)


class _Timed(Interpreter):
    """Runs a graph node by node. Attributes: seconds (by line)."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # what a kernel raises is eager mode's
        self.seconds: dict[int, float] = {}

    def run_node(self, node: Node) -> Any:
        if node.op != "call_function":
            return super().run_node(node)
        start = time.perf_counter()
        value = super().run_node(node)
        line = events.line_number(user_frame(node.meta.get("stack_trace")))
        self.seconds[line] = self.seconds.get(line, 0.0) + time.perf_counter() - start
        return value


@dataclass(frozen=True)
class _Alike:
    """What the first call was like. Attributes: inputs, values (whether others are laid out as those were); results (how each result is the
    value's memory: None if it is the value itself, else the shape and the strides of a tensor there, which is no view; None if all are
    the values); are_outputs (whether the results are the outputs)."""

    inputs: Callable[..., bool]
    values: Callable[..., bool]
    results: Sequence[tuple[Sequence[int], Sequence[int]] | None] | None
    are_outputs: bool


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _is_in_place(result: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a result is all of a value's memory, read as it is."""
    if value.is_conj() or value.is_neg() or value.dtype != result.dtype or value.storage_offset() != result.storage_offset():
        return False
    return private.storage_id(result) == private.storage_id(value)


class ByTorch:
    """A graph with concrete sizes that torch's kernels run. It is called as an `Executable` would be, and its outputs have the same
    strides, share memory in the same way, and have memory of their own where that one's have; what torch's kernels raise is eager mode's.

    kernels: of the graph, for the nodes and then the numbers that the buffers are for. buffers: for these sizes. device: the graph's.
    Attributes: name; program (there is none).

    A call of a few microseconds' work should not take many more: what one passes through here, another one has pushed out of the
    processor's caches.
    """

    program = None
    _counter = "by_torch"

    def __init__(self, name: str, kernels: Kernels, buffers: Buffers, device: torch.device) -> None:
        self.name = name
        self._kernels, self._buffers, self._device = kernels, buffers, device
        self._binding: Binding | None = None
        self._alike: _Alike | None = None

    @staticmethod
    def take(args: list[Any]) -> list[Any]:
        """All of them: a graph may read what a program does not. Empties args."""
        given = args.copy()
        args.clear()
        return given

    def __call__(self, given: list[Any]) -> list[Any]:
        """given: as `take` gives them. Raises: what torch's kernels raise; nothing is written then."""
        if private.is_profiling():
            with torch.profiler.record_function(self.name):
                return self._run(given)
        return self._run(given)

    def again(self, args: list[Any]) -> list[Any] | None:
        """What a call gives, if the tensors are laid out as those of the first one and nobody looks on; else None, and nothing is done.
        Raises: as a call. Empties args unless it gives None or raises.

        Then ATen's kernels, and `lone_ops.py` lets no others through, put their results where they did, whatever the values are: what was
        seen of those (that they are tensors with memory of their own, all of which they use) is not looked at again. Their layouts are,
        since torch's settings may have changed.
        """
        alike = self._alike
        if alike is None or events.is_heard() or private.is_profiling() or not alike.inputs(*args):
            return None
        with private.below_autograd():
            values = self._kernels.compute(*args)
        metrics.add(self._counter)
        if not alike.values(*values):
            return self._given(values, self.take(args))
        if alike.results is not None:
            made = zip(values, alike.results, strict=True)
            values = [value if place is None else transfer.reinterpret(value, *place) for value, place in made]
        if alike.are_outputs:
            args.clear()
            return list(values)
        assert self._binding is not None
        return self._binding.outputs(values, self._binding.take(args))

    def _run(self, given: list[Any]) -> list[Any]:
        if self._device.type != "cpu":
            late_checks.look(self._device)
        values = self._values(given)
        metrics.add(self._counter)
        return self._given(values, given)

    def _given(self, values: Sequence[Any], given: list[Any]) -> list[Any]:
        """The outputs, made of the nodes' values. Empties given."""
        count = len(self._buffers.nodes)
        binding = self._binding
        if binding is None:
            binding = self._binding = self._buffers.bind(values[count:])
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        results = self._buffers.results(values[:count], tensors + self._kernels.constants)
        is_first = self._alike is None and len(tensors) == len(given) and len(values) == count
        outputs = binding.outputs(results, binding.take(given))
        if is_first and all(map(_is_in_place, results, values)):
            checks = ArgumentCheck(tensors).matches, ArgumentCheck(values).matches
            places = [None if one is value else (one.shape, one.stride()) for one, value in zip(results, values, strict=True)]
            self._alike = _Alike(*checks, places if any(places) else None, _are_same(outputs, results))
        return outputs

    def _values(self, given: list[Any]) -> Sequence[Any]:
        if not events.is_heard():
            return self._kernels.values(given)
        values, lines = self._kernels.timed_values(given)
        events.tell(events.Ran(self, sum(lines.values()), self._binding is None, lines))
        return values


class Pending(ByTorch):
    """One that waits to be compiled. kernels: for all nodes that any sizes' buffers may be for."""

    _counter = "meanwhile"

    def _values(self, given: list[Any]) -> Sequence[Any]:
        with background.in_its_place():  # of what another thread compiles
            values = dict(zip(self._kernels.nodes, super()._values(given), strict=True))
        return [values[node] for node in (*self._buffers.nodes, *self._buffers.numbers)]
