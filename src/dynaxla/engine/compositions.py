"""Engines that wrap other engines, for graphs that need more than one program or some work outside of the program.

Late     writes slices of large inputs with torch's own ops, after the program has succeeded
Count    computes in Python numbers that no tensor depends on, so that one program serves all of their values
Freeze   computes everything that depends on parameters and buffers alone in a separate program, which runs again only after one of them has
         changed; packs weights into oneDNN's own order, for threads where that order is valid
Bucket   rounds sizes up, so that one program serves many sizes (bucket.py)
Split    runs ops that no XLA program can contain between programs; each program has one device
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from .. import forks
from ..buffers.addresses import states
from ..capture.graph import AtenGraph, OpenLayouts, Phase, copy_graph, graph_devices, tensors_of, written_inputs
from ..config import Options
from ..errors import CaptureError, DynaxlaError, UnsupportedOp
from ..lowering.cpu import weight_orders
from ..lowering.graphs import describe_inputs, user_line
from ..observe import coverage, metrics
from ..passes import pipeline
from ..passes.aten.device_transfers import COPY, has_several
from ..passes.aten.freeze import Frozen, copy_weights
from ..passes.aten.late_writes import LateWrites
from ..passes.aten.python_counters import Counters
from ..passes.aten.split import GraphPart
from ..passes.aten.unsupported_nodes import ASYNCHRONOUS, between_programs, last_writes
from ..passes.aten.weight_packing import pack_weights
from ..passes.jaxpr.open_layouts import opens_layouts
from ..runtime import by_torch, devices
from ..runtime.programs import Orders
from . import held_back
from .bucket import Bucket
from .executable import Executable
from .protocol import Engine, Runner
from .retrace import Retrace
from .xla import Xla


def engine_for(options: Options, *, retrace: bool = False, collectives: bool = True, innermost: Engine | None = None) -> Engine:
    """Returns the engine that the options ask for.

    Args:
        options: The options of the compilation.
        retrace: Whether to trace at every call (see retrace.py).
        collectives: See `Split`. False for the graph of a training step, which may contain none and is not cut into equal blocks.
        innermost: The engine that compiles programs; by default one for these options.
    """
    engine = innermost or (Retrace(options) if retrace else Xla(options, blocks=collectives))
    engine = Split(engine if options.sizes == "exact" else Bucket(engine, options), options, collectives=collectives)
    return Late(Count(Freeze(engine, options) if options.freeze else engine))


class Late:
    """An engine that leaves writes to slices of large inputs to torch, which runs them after a program of the inner engine."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def runner(self, graph: AtenGraph) -> Runner:
        # In memory that XLA owns, the program itself writes in place.
        late = None if _is_in_xla(graph) else pipeline.LATE_WRITES(graph)
        return self.inner.runner(graph) if late is None else LateProgram(self.inner.runner(late.graph), late)


def _is_in_xla(graph: AtenGraph) -> bool:
    return devices.is_in_xla(devices.main_device(tensor.device for node in graph.module.graph.nodes for tensor in tensors_of(node)))


class LateProgram:
    """Runs a graph without its late writes, and then the late writes.

    Args:
        run: The runner of the graph without late writes.
        late: The late writes.
    """

    def __init__(self, run: Runner, late: LateWrites) -> None:
        self._boxed_call = True
        self.name = run.name
        self._run, self._late = run, late

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the program, then writes.

        Raises: RuntimeError, as torch does, for an inference tensor that must not be written to. Nothing is written in that case.
        """
        late = self._late
        if not torch.is_inference_mode_enabled() and any(args[position].is_inference() for position in late.written):
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed. Clone it first.")
        read = [args[position] for position in late.read]
        given = [args[position] for position in late.inputs]
        args.clear()
        results = self._run(given)
        metrics.add("late_writes")
        with by_torch.kernels():
            late.writes.forward(*read, *results[late.count :])
        return results[: late.count]

    def executables(self) -> list[Executable]:
        return self._run.executables()


class Count:
    """An engine for graphs with counters (`take_apart`). Programs of the inner engine compute the rest of the graph."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def runner(self, graph: AtenGraph) -> Runner:
        counters = pipeline.PYTHON_COUNTERS(graph.module)
        return self.inner.runner(graph) if counters is None else CountingProgram(self.inner, graph, counters)


class CountingProgram:
    """Runs a graph without its counters as a program. At every call, Python computes the values that depend on the counters.

    Args:
        engine: Compiles the graph without counters.
        graph: The whole graph.
        counters: Its parts.
    """

    def __init__(self, engine: Engine, graph: AtenGraph, counters: Counters) -> None:
        self._boxed_call = True
        self.name = graph.name
        self._counters = counters
        count = len(graph.module.graph.output_node().args[0])
        places = [*counters.returned, *sorted({*range(count)} - {*counters.returned})]
        self._order = [places.index(index) for index in range(count)]
        static = tuple(counters.kept.index(position) for position in graph.static if position in counters.kept)
        self._run = engine.runner(dataclasses.replace(graph, module=counters.rest, static=static, remade=frozenset()))

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        counted = self._counters.counted(*(args[index] for index in self._counters.sources))
        args[:] = [args[index] for index in self._counters.kept]
        found = [*self._run(args), *counted]
        return [found[index] for index in self._order]

    def executables(self) -> list[Executable]:
        return self._run.executables()


class Split:
    """An engine for graphs with ops that no XLA program can contain, such as copies between devices. They run between programs of the inner
    engine.

    Args:
        inner: The engine of the programs.
        options: The options of the compilation.
        collectives: Whether collectives and other asynchronous work may run between the programs.
    """

    def __init__(self, inner: Engine, options: Options, *, collectives: bool = True) -> None:
        self._inner, self._options, self._collectives = inner, options, collectives

    def runner(self, graph: AtenGraph) -> Runner:
        """Returns a runner for the graph.

        Raises: UnsupportedOp for an op between programs if options.fallback is "error"; CaptureError for a collective that is not allowed.
        """
        module = graph.module
        if has_several(module):
            module = copy_graph(module)
            pipeline.DETOURS(module.graph)
        drawn: set[torch.fx.Node] = set()
        if self._options.exact_rng:
            module, drawn = pipeline.RANDOM_HOISTING(module)
        found = between_programs(module)
        unseen = last_writes(module, found) | drawn
        arranged = pipeline.DEVICE_ORDER(module, found.keys() | drawn) if has_several(module) else None
        if arranged is not None:
            found |= arranged.crossings
            unseen |= {node for node, reason in found.items() if reason == COPY}
        for node, reason in found.items():
            if reason == ASYNCHRONOUS and not self._collectives:
                raise _refused(CaptureError, node, reason, _INSTEAD_OF_COLLECTIVES)
            if node in unseen:
                continue
            if self._options.fallback == "error":
                raise _refused(UnsupportedOp, node, reason, _INSTEAD_OF_SPLITTING)
            coverage.fell_back(str(node.target), f"the graph is split around it, since {reason}", user_line(node))
        graph = dataclasses.replace(graph, module=module)
        between = found.keys() | drawn
        if arranged is not None:
            return SplitProgram(self._inner, graph, pipeline.SPLIT(module, between.__contains__, arranged.devices.get))
        return SplitProgram(self._inner, graph, pipeline.SPLIT(module, between.__contains__)) if between else self._inner.runner(graph)


_INSTEAD_OF_SPLITTING = "options={'fallback': 'kernel'} splits the graph here; or use an op with a result of fixed size, e.g. torch.where"
_INSTEAD_OF_COLLECTIVES = (
    "compile only the model, with torch.compile(model, backend='dynaxla'): backward, collectives and optimizer then run as usual"
)


def _refused(kind: type[DynaxlaError], node: torch.fx.Node, reason: str, hint: str) -> DynaxlaError:
    message = f"{node.target} cannot be part of an XLA program: {reason}"
    return kind(message, op=str(node.target), inputs=describe_inputs(node), where=user_line(node), hint=hint)


class SplitProgram:
    """Runs the parts of a graph in order. torch runs ops that no program can contain (`between_programs`); the other parts are programs.

    Args:
        engine: Compiles the programs.
        graph: The whole graph.
        parts: Its parts, in the order in which they run.
    """

    def __init__(self, engine: Engine, graph: AtenGraph, parts: list[GraphPart]) -> None:
        self._boxed_call = True
        self.name = graph.name
        self.placeholders = graph.module.graph.find_nodes(op="placeholder")
        self.outputs = graph.module.graph.output_node().args[0]
        static = {self.placeholders[position] for position in graph.static}
        between = [node.target for part in parts if not part.compiled for node in part.module.graph.nodes]
        writes = any(isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable for op in between)
        waits = writes or bool(written_inputs(graph.module.graph))  # a part's program does not guard writes outside of it
        self._runners: list[Runner] = []
        self.parts: list[tuple[GraphPart, Callable[[list[Any]], Sequence[Any]]]] = []
        for part in parts:
            run: Callable[[list[Any]], Sequence[Any]]
            if part.compiled:
                positions = tuple(index for index, node in enumerate(part.inputs) if node in static)
                # Results of a part of a forward graph need the graph's strides, because torch may read them.
                phase: Phase = "inference" if graph.phase == "forward" else graph.phase
                run = engine.runner(AtenGraph(f"{self.name}_part{len(self.parts)}", part.module, positions, phase, waits))
                self._runners.append(run)
            else:
                run = functools.partial(by_torch.run, part.module)
            self.parts.append((part, run))
        last_use = {node: index for index, part in enumerate(parts) for node in part.inputs}
        kept = {node for node in self.outputs if isinstance(node, torch.fx.Node)}
        self._dead_after = [[node for node, last in last_use.items() if last == index and node not in kept] for index in range(len(parts))]

    def __call__(self, args: list[Any]) -> list[Any]:
        if held_back.threads:
            held_back.hold_back(self, args)
        values: dict[Any, Any] = dict(zip(self.placeholders, args, strict=True))
        args.clear()
        for (part, run), dead in zip(self.parts, self._dead_after, strict=True):
            values.update(zip(part.outputs, run([values[node] for node in part.inputs]), strict=True))
            for node in dead:
                del values[node]
        return [values[output] if isinstance(output, torch.fx.Node) else output for output in self.outputs]

    def executables(self) -> list[Executable]:
        return [executable for runner in self._runners for executable in runner.executables()]


class Freeze:
    """An engine for inference. Values that depend on parameters and buffers alone are computed once, by a program of the inner engine."""

    def __init__(self, inner: Engine, options: Options) -> None:
        self._inner, self._options = inner, options

    def runner(self, graph: AtenGraph) -> Runner:
        device = devices.main_device(graph_devices(graph.module, between_programs(graph.module)))
        forms = self._options.forms

        def pack(nodes: torch.fx.Graph, fixed: Collection[torch.fx.Node]) -> bool:
            return not forks.is_cut_off() and pack_weights(nodes, fixed, devices.jax_device(device), forms)

        def runner(frozen: Frozen | None) -> Runner:
            return self._inner.runner(graph) if frozen is None else FrozenProgram(self._inner, graph, frozen)

        if opens_layouts(device.type):
            return runner(pipeline.FREEZE(graph.module, graph.static, copy_weights))
        packed = pipeline.FREEZE(graph.module, graph.static, pack)
        if packed is None or not packed.packed:
            return runner(pipeline.FREEZE(graph.module, graph.static))
        return PackedProgram(FrozenProgram(self._inner, graph, packed), lambda: runner(pipeline.FREEZE(graph.module, graph.static)))


class FrozenProgram:
    """Runs an inference graph in two parts. The part that depends on parameters and buffers alone runs again only after one has changed.

    A change is detected by the tensor's identity, its address, and its version counter. Writes that do not bump the tensor's own version
    counter are not detected: through `tensor.data`, through NumPy or DLPack, and to tensors made in inference mode.
    """

    def __init__(self, engine: Engine, graph: AtenGraph, frozen: Frozen) -> None:
        self._boxed_call = True
        self.name = graph.name
        module, prepared, rest = frozen.module, frozen.prepared, frozen.rest
        self.by_torch: Callable[[list[Any]], Sequence[Any]] = functools.partial(by_torch.run, module)
        self.placeholders = module.graph.find_nodes(op="placeholder")
        self.output_values = module.graph.output_node().args[0]
        static = {self.placeholders[position] for position in graph.static} | set(prepared.outputs)
        self._sources = [self.placeholders.index(node) for node in prepared.inputs]
        self._prepare = engine.runner(AtenGraph(f"{self.name}_prepared", prepared.module, tuple(range(len(prepared.inputs))), waits=True))
        positions = tuple(position for position, node in enumerate(rest.inputs) if node in static)
        waits = bool(written_inputs(module.graph))  # AOTAutograd writes the results of the second part to inputs, outside of its program
        self._places = [rest.inputs.index(node) for node in prepared.outputs]
        self._loose = OpenLayouts(self._places)
        self._run = engine.runner(AtenGraph(self.name, rest.module, positions, waits=waits, loose=self._loose))
        self._derived = prepared.outputs
        self._rest = rest
        self._kept: _Prepared | None = None
        self._lock = forks.lock()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if by_torch.is_looked_at():
            return self.by_torch(args)
        sources = [args[index] for index in self._sources]
        kept = self._kept
        if kept is None or not kept.is_of(sources):
            if by_torch.is_needed(args):
                return self.by_torch(args)
            with self._lock:
                kept = self._kept
                if kept is None or not kept.is_of(sources):
                    metrics.add("preparations")
                    forget = weakref.WeakMethod(self._forget)
                    kept = self._kept = _Prepared(sources, self._prepare, lambda _: (call := forget()) and call())
        if self._loose.orders is not kept.orders:
            kept.lay_out(self._loose.orders, self._places)
        values: dict[Any, Any] = dict(zip(self.placeholders, args, strict=True))
        values.update(zip(self._derived, kept.results, strict=True))
        args.clear()
        results = self._run([values[node] for node in self._rest.inputs])
        values.update(zip(self._rest.outputs, results, strict=True))
        return [values[output] if isinstance(output, torch.fx.Node) else output for output in self.output_values]

    def _forget(self) -> None:
        self._kept = None

    def executables(self) -> list[Executable]:
        return [*self._prepare.executables(), *self._run.executables()]


class PackedProgram:
    """Runs a frozen program with weights packed for oneDNN's kernels, or one with plain weights in threads where oneDNN uses another order.

    Args:
        packed: The frozen program with packed weights.
        plain: Makes the runner with plain weights, when it is first needed.
    """

    def __init__(self, packed: FrozenProgram, plain: Callable[[], Runner]) -> None:
        self._boxed_call = True
        self.name = packed.name
        self._packed = packed
        self._packed.by_torch = self._run_plain  # torch has no kernels for packed weights
        self._make_plain = plain
        self._plain: Runner | None = None
        self._lock = forks.lock()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self._packed(args) if weight_orders.holds() else self._run_plain(args)

    def _run_plain(self, args: list[Any]) -> Sequence[Any]:
        with self._lock:
            if self._plain is None:
                self._plain = self._make_plain()
        return self._plain(args)

    def executables(self) -> list[Executable]:
        return [*self._packed.executables(), *(self._plain.executables() if self._plain is not None else [])]


class _Prepared:
    """The results of `compute` for some tensors, with the state of these tensors before the computation.

    It holds the tensors' storages (not the tensors), so that no other tensor can be allocated at their addresses.

    Args:
        sources: The tensors.
        compute: Computes the results from a list of the tensors.
        gone: Called when one of the tensors is freed.
    """

    def __init__(
        self, sources: Sequence[torch.Tensor], compute: Callable[[list[Any]], Sequence[Any]], gone: Callable[[Any], object]
    ) -> None:
        # Before the computation: a write by another thread during it is then detected at the next call.
        self._state = states(sources)
        self.results = compute(list(sources))
        self.orders: Orders | None = None
        self._storages = [source.untyped_storage() for source in sources]
        self._references = [weakref.ref(source, gone) for source in sources]

    def is_of(self, sources: Sequence[torch.Tensor]) -> bool:
        """True if the results were computed from these tensors and nothing has been written to them since."""
        return self._state == states(sources)

    def lay_out(self, orders: Orders | None, places: Sequence[int]) -> None:
        """Changes the layouts of the results to those in which a program reads them.

        Args:
            orders: The dimension orders by position among the program's inputs; None for row-major order.
            places: The position of each result among the program's inputs.
        """
        self.results = [_in_order(result, (orders or {}).get(place)) for result, place in zip(self.results, places, strict=True)]
        self.orders = orders


def _in_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    if order is None:
        return tensor
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
