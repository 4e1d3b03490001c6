"""The way of a graph with concrete sizes: what is to be computed, traced, lowered, compiled, and bound to tensors."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding

from ..buffers.device_kinds import Request, kind_of
from ..buffers.native import NativeBuffers, Place
from ..buffers.plan import Storages
from ..buffers.protocol import Buffers
from ..capture.aten_graph import AtenGraph, graph_device
from ..capture.inputs import Sizes, check_tensor
from ..config import Options
from ..errors import OptionError, UnsupportedTensor
from ..lowering import Check, Interpreter, Settings, SymbolValues, registry
from ..lowering.asynchronous import groups_in
from ..lowering.cpu.halves import with_few_roundings
from ..lowering.cpu.partitionable import partitionable
from ..lowering.cpu.transposes import Orders, without_transposes
from ..lowering.forms import Choices, generic
from ..lowering.function import Function
from ..lowering.ops.sharding_constraints import shardings_in
from ..observe import dump, metrics
from ..runtime import devices, meshes, networks, private, programs, streams
from ..runtime.store import Keeper
from ..tuning import Tuner
from .executable import Executable, compilation_error, execution_error, is_exhausted
from .facts import Facts, Returned
from .layouts import check_closed, opens_layouts, with_open_layouts
from .options import default_options, options_for, quick_options, with_tiles

# What keeps what later processes read, by folder; None for nothing.
Stores = Callable[[str], Keeper | None]


@dataclass(frozen=True)
class Specialised:
    """A graph with concrete sizes, for which nothing has to be known any more of the inputs that it was made for.

    Attributes: function (None if there is nothing to compute); buffers; facts (of a graph without a function); settings (torch's, as they
    were then); symbols (the graph's sizes); numbers (the inputs that are no tensors, by position);
    members (the processes whose collectives are XLA's own).
    """

    function: Function | None
    buffers: Buffers
    facts: Facts
    settings: Settings
    symbols: SymbolValues
    numbers: Mapping[int, Any]
    members: networks.Members | None = None


class Stages:
    """A graph, and what there is to know of it whatever its sizes are; each step of its way is a method.

    Raises: UnsupportedOp, UnsupportedTensor, DeviceMismatch.
    """

    def __init__(self, graph: AtenGraph, options: Options, *, blocks: bool = False, store: Stores | None = None) -> None:
        self.name = graph.name
        self.options = options
        self.store = store or options.store
        self.phase = graph.phase
        # With gradients blocks hand on much besides their result: BERT's step takes 1.1 times as long in parts.
        self.has_blocks = blocks and graph.phase == "inference" and options.collectives == "torch"
        self.waits = graph.waits
        self.device = graph_device(graph.module)
        self.platform = devices.platform_of(self.device)
        self.interpreter = Interpreter(graph.module, self.platform, kernels=options.fallback == "kernel", is_lowered=graph.is_lowered)
        self.static_inputs = frozenset(graph.static)
        self._kind = kind_of(self.device.type)
        if self._kind is None and meshes.exist() and shardings_in(graph.module.graph):
            raise UnsupportedTensor(
                f"{self.name} marks a tensor on {self.device}, and only those on the device jax lie on a mesh",
                hint='dynaxla.enable_device(), and move the model and its inputs there: x.to("jax")',
            )
        # Those whose collectives are XLA's own.
        self.groups = groups_in(graph.module.graph) if options.collectives == "xla" else ()
        if self.groups and self.platform != "cpu":
            raise OptionError(
                f"option collectives='xla' for tensors on {self.device}", hint="leave it out: it is for processes with tensors on the CPU"
            )
        self._remade = graph.remade
        self.opens_layouts = self._kind is None and opens_layouts(self.platform)
        self.loose = graph.loose
        placeholders = self.interpreter.placeholders
        for node in placeholders:
            if isinstance(node.meta["val"], torch.Tensor):
                check_tensor(node.meta["val"], "an input")
        self.sizes = Sizes(placeholders)
        self._dumps = itertools.count(1)

    @functools.cached_property
    def _storages(self) -> Storages:
        return Storages(self.interpreter.module.graph)

    @functools.cached_property
    def jax_device(self) -> jax.Device:
        return devices.jax_device(self.device)

    @functools.cached_property
    def choose(self) -> Choices:
        """How a form is chosen for a problem."""
        if self.options.tune:
            options = {**default_options(self.platform), **self.options.xla}
            heap_is_kept = self.options.heap == "keep"
            return Choices(Tuner(self.jax_device, self.options.forms, options, self.options.store("tuning"), heap_is_kept).choose)
        return Choices(lambda forms, problem: forms.choose(problem, self.options.forms))

    def specialise(self, args: Sequence[Any], settings: Settings | None = None, planned: bool = False) -> Specialised:
        """The graph for inputs like these. settings: torch's, if not its present ones. planned: see `Request`."""
        interpreter, symbols, settings = self.interpreter, self.sizes.values(args), settings or Settings.current(self.platform)
        values = [node.meta["val"] for node in interpreter.placeholders]
        specs = [symbols.spec(value) for value in values if isinstance(value, torch.Tensor)]
        reorders = self.platform == "cpu" and interpreter.reorders(specs)
        place = Place(self.device, self.jax_device)
        buffers: Buffers
        if self._kind is not None:
            remade, donate = self._remade, self.options.donate
            buffers = self._kind.buffers(Request(interpreter, symbols, args, self.phase, place, self._storages, remade, donate, planned))
        else:
            free, loose = reorders or self.opens_layouts, self.loose if self.opens_layouts else None
            buffers = NativeBuffers(
                interpreter, symbols, args, self.static_inputs, self.phase, place, free, self.waits, loose, self._storages
            )
        given = {index: args[index] for index in self.sizes.numbers}
        # A graph without buffers of its own may still check something, or call a kernel for its effect.
        if not buffers.nodes and not interpreter.acts:
            return Specialised(None, buffers, Facts(numbers=self.numbers(buffers, symbols, given)), settings, symbols, given)
        choose = self.choose if buffers.where is None else generic
        members = networks.Members.of(self.groups) if self.groups else None
        function = Function(
            interpreter, symbols, given, buffers.nodes, buffers.numbers,
            settings=settings, choose=choose, reorders=reorders and buffers.where is None, where=buffers.where,
            members=members,
        )  # fmt: skip
        return Specialised(function, buffers, Facts(), settings, symbols, given, members)

    def numbers(self, buffers: Buffers, symbols: SymbolValues, given: Mapping[int, Any]) -> tuple[Any, ...]:
        """The values of the outputs that are numbers, which are inputs or follow from sizes."""
        values = {self.interpreter.placeholders[position]: value for position, value in given.items()}
        return tuple(values[node] if node in values else symbols.integer(node.meta["val"]) for node in buffers.numbers)

    def trace(self, function: Function, buffers: Buffers, *, guarded: bool = True) -> tuple[jax.stages.Traced, Buffers, Facts]:
        """The function from packed arrays to packed arrays, under jax tracing; the buffers as its results lie.

        guarded: whether it gives old values of what it writes to if a check fails (see `Buffers.guard`).
        """

        def program(*arrays: jax.Array) -> Returned:
            inputs, key = buffers.unpack(arrays)
            results = function(inputs, key)
            code = [Check.first_failed(results.checks)] if results.checks else []
            outputs = buffers.guard(results.outputs, inputs, code[0], len(results.checks)) if code and guarded else results.outputs
            checks = tuple((check.error, check.message) for check in results.checks)
            return Returned([*buffers.pack(outputs), *code], Facts(checks, results.numbers, results.kernels))

        avals = buffers.avals()
        if buffers.where is not None:
            traced, orders = self._traced_for_mesh(program, avals, buffers), dict[int, tuple[int, ...]]()
        else:
            traced, orders = self.traced(program, self.name, avals, self.interpreter, function.reorders, buffers.free, buffers.donated)
        facts = traced.out_info.facts
        if self.opens_layouts and (buffers.loose or buffers.free):
            traced = with_open_layouts(traced, self.name, avals, buffers.loose, buffers.free)
        return traced, buffers.ordered(orders), facts

    def _traced_for_mesh(self, run: Any, avals: Sequence[jax.ShapeDtypeStruct], buffers: Buffers) -> jax.stages.Traced:
        """As `traced`, of what XLA's partitioner can cut into parts."""
        registry.fill()  # not under jax tracing
        run.__name__ = self.name
        with metrics.timed("trace"), jax.enable_x64(True), jax.default_device(self.jax_device):
            return jax.jit(partitionable(run, buffers.free), keep_unused=True, donate_argnums=tuple(buffers.donated)).trace(*avals)

    def traced(
        self,
        run: Any,
        name: str,
        avals: Sequence[jax.ShapeDtypeStruct],
        interpreter: Interpreter,
        reorders: bool,
        free: Sequence[int] = (),
        donated: Sequence[int] = (),
    ) -> tuple[jax.stages.Traced, Orders]:
        """A function of arrays that a graph stands in, under jax tracing; the orders of its `free` results. reorders: whether
        cpu/transposes.py evaluates it; donated: see `Buffers`.

        Raises: UnsupportedTensor if a JAX function in it reads a tracer from elsewhere.
        """
        registry.fill()  # not under jax tracing
        run.__name__ = name
        orders: Orders = {}
        with metrics.timed("trace"), jax.enable_x64(True), jax.default_device(self.jax_device):
            if reorders:
                run, orders = without_transposes(run, self.platform, free)
            if self.platform == "cpu" and interpreter.has_halves:
                run = with_few_roundings(run, self.platform)
            traced = jax.jit(run, keep_unused=True, donate_argnums=tuple(donated)).trace(*avals)
        if len(traced.jaxpr.in_avals) != len(avals):  # JAX makes operands of tracers that a function reads besides its own
            raise UnsupportedTensor(
                f"{name}: a JAX function of to_torch in it reads a tracer, which has no value: it stands for an array in another function "
                "that JAX traces or has traced",
                hint="keep no arrays of a function of to_torch outside of it (in globals, closures, caches): return them, and take them as "
                "arguments",
            )
        return traced, orders

    def lower(self, traced: jax.stages.Traced) -> jax.stages.Lowered:
        """The traced program as StableHLO."""
        with metrics.timed("lower"), jax.enable_x64(True), jax.default_device(self.jax_device):
            return private.lower(traced)

    def compile(
        self,
        lowered: jax.stages.Lowered,
        traced: jax.stages.Traced,
        settings: Settings,
        module: torch.fx.GraphModule | None = None,
        where: NamedSharding | None = None,
        among: Sequence[jax.Device] = (),
        device: jax.Device | None = None,
    ) -> programs.XlaProgram:
        """module: of a part of the graph. where: the mesh that the program is for. among: a device of each process that it is for, and
        device: this one's. Raises: CompilationError; OutOfMemory."""
        options = self._xla_options(traced, settings, where is not None)
        store, heap_is_kept = self.store("programs"), self.options.heap == "keep"

        def compile() -> programs.XlaProgram:
            place = device or self.jax_device
            return with_tiles(lambda given: programs.compile_lowered(lowered, place, given, store, heap_is_kept, among), options)

        with metrics.timed("compile"):
            try:
                try:
                    compiled = compile()
                except jax.errors.JaxRuntimeError as error:  # on a GPU, trying kernels takes memory
                    if not is_exhausted(error) or not streams.give_back_memory(self.device):
                        raise
                    compiled = compile()
            except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                if is_exhausted(error):
                    raise execution_error(self.name, error) from error
                raise compilation_error(self.name, error) from error
        dump.record(self._dump_name(), module or self.interpreter.module, lowered, compiled.text, self.options.dump_directory)
        return compiled

    def _xla_options(self, traced: jax.stages.Traced, settings: Settings, on_mesh: bool = False) -> Mapping[str, Any]:
        quick = quick_options() if meshes.is_planning() else {}
        return {**options_for(self.platform, traced.jaxpr, settings, on_mesh), **quick, **self.options.xla}

    def _dump_name(self) -> str:
        """The graph's name; with a number behind it for every executable after the first."""
        number = next(self._dumps)
        return self.name if number == 1 else f"{self.name}_{number}"

    def executable(
        self,
        compiled: programs.XlaProgram | None,
        buffers: Buffers,
        facts: Facts,
        first: programs.XlaProgram | None = None,
        among: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> Executable:
        """first: the checks, if they are a program of their own. among: what one with collectives of XLA's own runs in."""
        if compiled is not None and self.opens_layouts and (buffers.loose or buffers.free):
            given, returned = compiled.orders()
            check_closed(given, buffers.loose)
            check_closed(returned, buffers.free)
            if buffers.loose:
                self.loose.orders = {position: given[index] for index, position in buffers.loose.items()}
                buffers = buffers.laid_out(given)
        acts = bool(facts.kernels) or among is not None
        inside = among or contextlib.nullcontext
        return Executable(self.name, compiled, buffers.bind(facts.numbers), facts.checks, acts=acts, first=first, among=inside)
