"""Engines made of others: graphs that no single program can hold, graphs whose parameters seldom change, and graphs of which something is
better done beside the program.

Late     torch's own ops write to places in large inputs, after the program has succeeded
Count    numbers that no tensor depends on are computed beside the program, which is the same whatever they are
Freeze   one program for what parameters and buffers alone decide, one for the rest; its weights in the order in which oneDNN reads them, as
         far as a thread may rely on that
Bucket   one program for many sizes, which are rounded up (bucket.py)
Split    ops that no XLA program can hold run between programs, each of which has one device
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
from ..capture.aten_graph import AtenGraph, Loose, Phase, graph_devices, tensors_of, written_inputs
from ..capture.between import ASYNCHRONOUS, between_programs, last_writes
from ..capture.counters import Counters, take_apart
from ..capture.crossings import COPY, arrange, copied, has_several, remove_detours
from ..capture.freeze import Frozen, copy_weights, freeze
from ..capture.hoisting import hoist
from ..capture.late_writes import LateWrites, take_late_writes
from ..capture.packing import pack_weights
from ..capture.split import Part, split
from ..config import Options
from ..errors import CaptureError, DynaxlaError, UnsupportedOp
from ..lowering.cpu import weight_orders
from ..lowering.graphs import describe_inputs, user_line
from ..observe import coverage, metrics
from ..runtime import by_torch, devices
from ..runtime.programs import Orders
from . import held_back
from .bucket import Bucket
from .executable import Executable
from .layouts import opens_layouts
from .protocol import Engine, Runner
from .retrace import Retrace
from .xla import Xla


def engine_for(options: Options, *, retrace: bool = False, collectives: bool = True, innermost: Engine | None = None) -> Engine:
    """The engine that options ask for. retrace: trace at every call. collectives: see `Split`; a training step's graph may have none,
    and is not cut into equal blocks. innermost: what makes programs, if not an engine for these options."""
    engine = innermost or (Retrace(options) if retrace else Xla(options, blocks=collectives))
    engine = Split(engine if options.sizes == "exact" else Bucket(engine, options), options, collectives=collectives)
    return Late(Count(Freeze(engine, options) if options.freeze else engine))


class Late:
    """An engine that leaves writes to places in large inputs to torch, behind the programs of another engine."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def runner(self, graph: AtenGraph) -> Runner:
        # In XLA's memory a program writes in place.
        late = None if _is_in_xla(graph) else take_late_writes(graph)
        return self.inner.runner(graph) if late is None else LateProgram(self.inner.runner(late.graph), late)


def _is_in_xla(graph: AtenGraph) -> bool:
    return devices.is_in_xla(devices.main_device(tensor.device for node in graph.module.graph.nodes for tensor in tensors_of(node)))


class LateProgram:
    """A graph without its late writes, and these behind it. run: the program of that graph."""

    def __init__(self, run: Runner, late: LateWrites) -> None:
        self._boxed_call = True
        self.name = run.name
        self._run, self._late = run, late

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Raises: RuntimeError, as torch does, for an input that must not be written to. Nothing is written then."""
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
    """An engine for graphs with counters (`take_apart`): programs of another engine compute the rest."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def runner(self, graph: AtenGraph) -> Runner:
        counters = take_apart(graph.module)
        return self.inner.runner(graph) if counters is None else CountingProgram(self.inner, graph, counters)


class CountingProgram:
    """A graph without its counters as a program; what is computed of these, Python computes at every call. engine: of the program."""

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
    """An engine for graphs with ops that no XLA program can hold, copies between devices among them: these run between programs of another
    engine.

    collectives: whether there may be any, and other work in the background, between the programs.
    """

    def __init__(self, inner: Engine, options: Options, *, collectives: bool = True) -> None:
        self._inner, self._options, self._collectives = inner, options, collectives

    def runner(self, graph: AtenGraph) -> Runner:
        """Raises: UnsupportedOp for an op between programs with options.fallback "error"; CaptureError for a collective that may not be."""
        module = graph.module
        if has_several(module):
            module = copied(module)
            remove_detours(module.graph)
        drawn: set[torch.fx.Node] = set()
        if self._options.exact_rng:
            module, drawn = hoist(module)
        found = between_programs(module)
        unseen = last_writes(module, found) | drawn
        arranged = arrange(module, found.keys() | drawn) if has_several(module) else None
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
            return SplitProgram(self._inner, graph, split(module, between.__contains__, arranged.devices.get))
        return SplitProgram(self._inner, graph, split(module, between.__contains__)) if between else self._inner.runner(graph)


_INSTEAD_OF_SPLITTING = "options={'fallback': 'kernel'} splits the graph here; or use a form of fixed size, e.g. torch.where"
_INSTEAD_OF_COLLECTIVES = (
    "compile the model alone with torch.compile(model, backend='dynaxla'), and let backward, collectives and optimizer run as usual"
)


def _refused(kind: type[DynaxlaError], node: torch.fx.Node, reason: str, hint: str) -> DynaxlaError:
    message = f"{node.target} cannot be part of an XLA program: {reason}"
    return kind(message, op=str(node.target), inputs=describe_inputs(node), where=user_line(node), hint=hint)


class SplitProgram:
    """A graph with ops that no program can hold (`between_programs`): torch runs them itself, and the parts in between are programs.

    engine: of the programs.
    """

    def __init__(self, engine: Engine, graph: AtenGraph, parts: list[Part]) -> None:
        self._boxed_call = True
        self.name = graph.name
        self.placeholders = graph.module.graph.find_nodes(op="placeholder")
        self.outputs = graph.module.graph.output_node().args[0]
        static = {self.placeholders[position] for position in graph.static}
        between = [node.target for part in parts if not part.compiled for node in part.module.graph.nodes]
        writes = any(isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable for op in between)
        waits = writes or bool(written_inputs(graph.module.graph))  # no part's program guards what is written outside of it
        self._runners: list[Runner] = []
        self.parts: list[tuple[Part, Callable[[list[Any]], Sequence[Any]]]] = []
        for part in parts:
            run: Callable[[list[Any]], Sequence[Any]]
            if part.compiled:
                positions = tuple(index for index, node in enumerate(part.inputs) if node in static)
                # What a forward part gives has the strides of the graph: it may be read by torch.
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
    """An engine for inference: what parameters and buffers alone decide is computed once, by programs of another engine."""

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
            return runner(freeze(graph.module, graph.static, copy_weights))
        packed = freeze(graph.module, graph.static, pack)
        if packed is None or not packed.packed:
            return runner(freeze(graph.module, graph.static))
        return PackedProgram(FrozenProgram(self._inner, graph, packed), lambda: runner(freeze(graph.module, graph.static)))


class FrozenProgram:
    """A graph for inference, in two parts: what parameters and buffers alone decide is computed again only after one has changed.

    A change is seen by the tensor itself (another object), its address, or its version counter. Writes that bump no counter of the
    tensor itself are not: through `tensor.data`, through NumPy or DLPack, and to tensors made in inference mode.
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
        waits = bool(written_inputs(module.graph))  # what the rest gives is written outside of it
        self._places = [rest.inputs.index(node) for node in prepared.outputs]
        self._loose = Loose(self._places)
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
    """A frozen program whose weights are packed for oneDNN's kernels, and one whose weights are not, for threads in which these kernels
    take them in another order. plain: makes the second one."""

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
    """What `compute` gives for tensors, and how these were before it. gone: called when one of them is freed.

    It holds the tensors' storages (not the tensors), so that no other can come to lie at their addresses.
    """

    def __init__(
        self, sources: Sequence[torch.Tensor], compute: Callable[[list[Any]], Sequence[Any]], gone: Callable[[Any], object]
    ) -> None:
        # First: what another thread changes while the results are computed is seen at the next call.
        self._state = states(sources)
        self.results = compute(list(sources))
        self.orders: Orders | None = None
        self._storages = [source.untyped_storage() for source in sources]
        self._references = [weakref.ref(source, gone) for source in sources]

    def is_of(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors that it was computed from, and nothing has been written to them."""
        return self._state == states(sources)

    def lay_out(self, orders: Orders | None, places: Sequence[int]) -> None:
        """Bring the results into the order in which a program reads them. orders: by place; places: one for each result."""
        self.results = [_in_order(result, (orders or {}).get(place)) for result, place in zip(self.results, places, strict=True)]
        self.orders = orders


def _in_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    if order is None:
        return tensor
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
