"""The steps from a graph to an executable: specialise to concrete sizes, trace, lower, compile, and bind to tensors."""

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
from ..buffers.native import GraphDevice, NativeBuffers
from ..buffers.plan import Storages
from ..buffers.protocol import Buffers
from ..capture.graph import AtenGraph, graph_device
from ..capture.inputs import Sizes, check_tensor
from ..config import Options
from ..errors import OptionError, UnsupportedTensor
from ..lowering import Check, Interpreter, Settings, SymbolValues, registry
from ..lowering.asynchronous import groups_in
from ..lowering.forms import Choices, generic
from ..lowering.function import Function
from ..lowering.ops.sharding_constraints import shardings_in
from ..observe import dump, metrics, rewrites
from ..passes import pipeline
from ..passes.jaxpr.open_layouts import check_closed, opens_layouts
from ..passes.jaxpr.transposes import Orders
from ..runtime import devices, meshes, networks, private, programs, streams
from ..runtime.store import StoreProtocol
from ..tuning import Tuner
from .executable import Executable, compilation_error, execution_error, is_exhausted
from .facts import Facts, Returned
from .options import default_options, options_for, quick_options, with_tiles

# Returns the store for a folder name, where later processes find entries; None if nothing is stored.
Stores = Callable[[str], StoreProtocol | None]


@dataclass(frozen=True)
class Specialised:
    """A graph with concrete sizes. It is independent of the inputs that it was specialised for.

    Attributes:
        function: The computation; None if there is nothing to compute.
        buffers: The memory of the graph's inputs and outputs.
        facts: The facts of a graph without a function; empty otherwise.
        settings: torch's settings at the time of specialisation.
        symbols: The values of the graph's size symbols.
        numbers: The non-tensor inputs, by position.
        members: The processes that take part in collectives that XLA itself executes; None without such collectives.
    """

    function: Function | None
    buffers: Buffers
    facts: Facts
    settings: Settings
    symbols: SymbolValues
    numbers: Mapping[int, Any]
    members: networks.Members | None = None


class Stages:
    """A graph with the facts about it that do not depend on its sizes. Each step from the graph to an executable is a method.

    Raises: UnsupportedOp, UnsupportedTensor, DeviceMismatch.
    """

    def __init__(self, graph: AtenGraph, options: Options, *, blocks: bool = False, store: Stores | None = None) -> None:
        self.name = graph.name
        self.options = options
        self.store = store or options.store
        self.phase = graph.phase
        # With gradients, each block passes on many values besides its result: a training step of BERT takes 1.1 times as long in parts.
        self.has_blocks = blocks and graph.phase == "inference" and options.collectives == "torch"
        self.waits = graph.waits
        self.device = graph_device(graph.module)
        self.platform = devices.platform_of(self.device)
        self.interpreter = Interpreter(graph.module, self.platform, kernels=options.fallback == "kernel", is_lowered=graph.is_lowered)
        self.static_inputs = frozenset(graph.static)
        self._kind = kind_of(self.device.type)
        if self._kind is None and meshes.exist() and shardings_in(graph.module.graph):
            raise UnsupportedTensor(
                f"{self.name} shards a tensor on {self.device}, and only tensors on the device jax can be on a mesh",
                hint='call dynaxla.enable_device(), and move the model and its inputs: x.to("jax")',
            )
        # The process groups whose collectives XLA itself executes.
        self.groups = groups_in(graph.module.graph) if options.collectives == "xla" else ()
        if self.groups and self.platform != "cpu":
            raise OptionError(
                f"option collectives='xla' for tensors on {self.device}", hint="leave it out: it supports only tensors on the CPU"
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
        """Chooses a form for each problem: by measurement with the option `tune`, otherwise by rules."""
        if self.options.tune:
            options = {**default_options(self.platform), **self.options.xla}
            heap_is_kept = self.options.heap == "keep"
            return Choices(Tuner(self.jax_device, self.options.forms, options, self.options.store("tuning"), heap_is_kept).choose)
        return Choices(lambda forms, problem: forms.choose(problem, self.options.forms))

    def specialise(self, args: Sequence[Any], settings: Settings | None = None, planned: bool = False) -> Specialised:
        """Returns the graph with the concrete sizes of these inputs.

        Args:
            args: The inputs of a call.
            settings: torch's settings; the current ones by default.
            planned: See `Request`.
        """
        interpreter, symbols, settings = self.interpreter, self.sizes.values(args), settings or Settings.current(self.platform)
        values = [node.meta["val"] for node in interpreter.placeholders]
        specs = [symbols.spec(value) for value in values if isinstance(value, torch.Tensor)]
        reorders = self.platform == "cpu" and interpreter.reorders(specs)
        place = GraphDevice(self.device, self.jax_device)
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
        # A graph without buffers of its own may still contain checks, or kernel calls with side effects.
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
        """Returns the values of the outputs that are numbers. Each is an input or follows from the sizes."""
        values = {self.interpreter.placeholders[position]: value for position, value in given.items()}
        return tuple(values[node] if node in values else symbols.integer(node.meta["val"]) for node in buffers.numbers)

    def trace(self, function: Function, buffers: Buffers, *, guarded: bool = True) -> tuple[jax.stages.Traced, Buffers, Facts]:
        """Traces the function from packed arrays to packed arrays.

        Args:
            guarded: If true, the program returns the old values of written inputs when a check fails (see `Buffers.guard`).

        Returns: the traced program, the buffers with the layouts of its results, and its facts.
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
            traced = pipeline.OPEN_LAYOUTS(traced, self.name, avals, buffers.loose, buffers.free)
        return traced, buffers.ordered(orders), facts

    def _traced_for_mesh(self, run: Any, avals: Sequence[jax.ShapeDtypeStruct], buffers: Buffers) -> jax.stages.Traced:
        """Traces like `traced`, using only operations that XLA's partitioner can partition."""
        registry.fill()  # not under jax tracing
        run.__name__ = self.name
        with metrics.timed("trace"), jax.enable_x64(True), jax.default_device(self.jax_device), rewrites.tracing() as report:
            program = jax.jit(pipeline.PARTITIONABLE(run, buffers.free), keep_unused=True, donate_argnums=tuple(buffers.donated))
            found = program.trace(*avals)
            report(len(found.jaxpr.jaxpr.eqns))
            return found

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
        """Traces a function of arrays that evaluates a graph, or a part of it.

        Args:
            run: The function.
            name: The name of the program.
            avals: The shapes and dtypes of its arguments.
            interpreter: The graph or the part that the function evaluates.
            reorders: Whether cpu/transposes.py evaluates the function.
            free: The indices of results whose dimensions may lie in any order.
            donated: See `Buffers`.

        Returns: the traced program and the dimension orders of its `free` results.
        Raises: UnsupportedTensor if a JAX function in the graph reads a tracer of another trace.
        """
        registry.fill()  # not under jax tracing
        run.__name__ = name
        orders: Orders = {}
        with metrics.timed("trace"), jax.enable_x64(True), jax.default_device(self.jax_device), rewrites.tracing() as report:
            if reorders:
                run, orders = pipeline.TRANSPOSES(run, self.platform, free)
            if self.platform == "cpu" and interpreter.has_halves:
                run = pipeline.BFLOAT16_ROUNDING(run, self.platform)
            traced = jax.jit(run, keep_unused=True, donate_argnums=tuple(donated)).trace(*avals)
            report(len(traced.jaxpr.jaxpr.eqns))
        if len(traced.jaxpr.in_avals) != len(avals):  # JAX turns tracers that a function closes over into extra operands
            raise UnsupportedTensor(
                f"{name}: a JAX function that it calls by to_torch reads a tracer of another JAX transformation, which has no value",
                hint="do not keep arrays of such a function in globals, closures or caches: return them, and pass them as arguments",
            )
        return traced, orders

    def lower(self, traced: jax.stages.Traced) -> jax.stages.Lowered:
        """Lowers the traced program to StableHLO."""
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
        """Compiles a lowered program, and writes the dump if the options ask for one.

        Args:
            lowered: The program as StableHLO.
            traced: The same program as a jaxpr; some XLA options depend on it.
            settings: torch's settings, which the program follows.
            module: The part of the graph that the program computes, for the dump; the whole graph by default.
            where: The mesh on which the program runs, if any.
            among: One device of each participating process, for a program with XLA's own collectives.
            device: This process's device; the graph's by default.

        Raises: CompilationError; OutOfMemory.
        """
        options = self._xla_options(traced, settings, where is not None)
        store, heap_is_kept = self.store("programs"), self.options.heap == "keep"

        def compile() -> programs.XlaProgram:
            place = device or self.jax_device
            return with_tiles(lambda given: programs.compile_lowered(lowered, place, given, store, heap_is_kept, among), options)

        with metrics.timed("compile"):
            try:
                try:
                    compiled = compile()
                except jax.errors.JaxRuntimeError as error:  # on a GPU, autotuning takes memory
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
        """Returns the graph's name, with a number appended for every executable after the first."""
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
        """Binds a compiled program to tensors.

        Args:
            compiled: The program; None if there is nothing to compute.
            buffers: The graph's buffers, with the layouts of the results.
            facts: The facts of the trace.
            first: The program of the checks, if they are a separate program that runs first.
            among: Makes the context manager in which a program with XLA's own collectives runs.
        """
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
