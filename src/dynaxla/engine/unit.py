"""A graph to compile: with the facts about it that do not depend on its sizes (`CompilationUnit`), and with concrete sizes
(`SpecialisedGraph`)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from .. import forks
from ..buffers.device_kinds import BufferRequest, kind_of
from ..buffers.native import GraphDevice, NativeBuffers
from ..buffers.output_plan import Storages
from ..buffers.protocol import Buffers
from ..capture.graph import AtenGraph, graph_device, written_inputs
from ..capture.inputs import Sizes, check_tensor
from ..config import Options
from ..errors import CompilationError, OptionError, UnsupportedTensor
from ..lowering import Interpreter, Settings, SymbolValues
from ..lowering.asynchronous import groups_in
from ..lowering.function import Function
from ..lowering.implementations import RecordingChooser, choose_for_mesh
from ..lowering.ops.sharding_constraints import shardings_in
from ..lowering.torch_equivalence import is_interchangeable
from ..observe import dump
from ..passes.jaxpr.open_layouts import opens_layouts
from ..runtime import devices, eager_fallback, late_checks, meshes, process_networks
from ..runtime.store import StoreProtocol
from ..runtime.topologies import Topology
from ..tuning import Tuner
from .eager_executable import EagerGraph
from .options import default_options
from .trace_outputs import TraceMetadata

# Returns the store of a folder, given the folder's name (see runtime/store.py); None if the options ask for no stores.
GetStore = Callable[[str], StoreProtocol | None]
# With the option compile="auto", calls wait for the compilation of a graph's first programs, up to this number. Two combinations of sizes
# are usual even where sizes hardly change: a smaller last batch, or another batch size for evaluation. A graph with more than two
# combinations usually has many.
FOREGROUND_PROGRAMS = 2


@dataclass(frozen=True)
class SpecialisedGraph:
    """A graph with concrete sizes. It refers to no inputs, although it was specialised for the sizes of some.

    Attributes:
        function: The computation; None if there is nothing to compute.
        buffers: The memory of the graph's inputs and outputs.
        metadata: The metadata of a graph without a function. Empty for other graphs, whose metadata is known after the trace.
        settings: torch's settings at the time of specialisation.
        symbols: The values of the graph's size symbols.
        numbers: The inputs that are not tensors, by position.
        participants: The processes that take part in collectives that XLA itself executes; None without such collectives.
    """

    function: Function | None
    buffers: Buffers
    metadata: TraceMetadata
    settings: Settings
    symbols: SymbolValues
    numbers: Mapping[int, Any]
    participants: process_networks.Participants | None = None


class CompilationUnit:
    """A graph to compile, with all facts about it that do not depend on its sizes.

    Args:
        graph: The graph.
        options: The options of the compilation.
        blocks: True if equal blocks of an inference graph share one program (see blocks.py).
        store: Returns the store of a folder; by default that of the options.
        topology: The topology for which the graph is compiled, to be inspected and not to run. By default that is the tensors' device.

    Raises: UnsupportedOp, UnsupportedTensor, DeviceMismatch.
    """

    def __init__(
        self, graph: AtenGraph, options: Options, *, blocks: bool = False, store: GetStore | None = None, topology: Topology | None = None
    ) -> None:
        self._graph = graph
        self.name = graph.name
        self.options = options
        self.store = store or options.store
        self.phase = graph.phase
        # Only for inference: with gradients, each block passes on many values besides its result. A training step of BERT takes 1.1 times
        # as long if its graph is split.
        self.has_blocks = blocks and graph.phase == "inference" and options.distributed == "torch"
        self.waits_for_checks = graph.waits_for_checks
        self.device = graph_device(graph.module)
        self.platform = devices.platform_of(self.device) if topology is None else topology.platform
        self.interpreter = Interpreter(graph.module, self.platform, kernels=options.fallback == "kernel", is_lowered=graph.is_lowered)
        self.static_inputs = frozenset(graph.static)
        self.device_kind = kind_of(self.device.type)
        if self.device_kind is None and meshes.may_have_sharded_arrays() and shardings_in(graph.module.graph):
            raise UnsupportedTensor(
                f"{self.name} shards a tensor on {self.device}, and only tensors on the device jax can be on a mesh",
                hint='call dynaxla.device.enable(), and move the model and its inputs: x.to("jax")',
            )
        # The process groups whose collectives XLA itself executes.
        self.groups = groups_in(graph.module.graph) if options.distributed != "torch" else ()
        if self.groups and self.platform != "cpu":
            raise OptionError(
                f"the option distributed={options.distributed!r} does not support tensors on {self.device}",
                hint="leave it out: it supports only tensors on the CPU",
            )
        self.rederived_outputs = graph.rederived_outputs
        self.opens_layouts = self.device_kind is None and opens_layouts(self.platform)
        self.open_inputs = graph.open_inputs
        placeholders = self.interpreter.placeholders
        for node in placeholders:
            if isinstance(node.meta["val"], torch.Tensor):
                check_tensor(node.meta["val"], "an input")
        self.sizes = Sizes(placeholders)
        self._dumps = itertools.count(1)

    def for_topology(self, topology: Topology) -> CompilationUnit:
        """Returns a unit that compiles the same graph for a topology. Its ops between programs are those of the tensors' device."""
        return CompilationUnit(self._graph, self.options, topology=topology)

    @functools.cached_property
    def storages(self) -> Storages:
        """The storages of the graph's values."""
        return Storages(self.interpreter.module.graph)

    @functools.cached_property
    def jax_device(self) -> jax.Device:
        """The JAX device on which the graph's programs run."""
        return devices.jax_device(self.device)

    @functools.cached_property
    def reports_late(self) -> bool:
        """True if calls do not wait for the checks of the graph's programs: on an asynchronous device of the kind "jax".

        Writes of other programs must not depend on the checks (`AtenGraph.waits_for_checks`). (For torch's own GPU memory, see
        `NativeBinding.report`.)
        """
        return self.device_kind is not None and not self.waits_for_checks and late_checks.is_asynchronous(self.platform)

    @functools.cached_property
    def choose(self) -> RecordingChooser:
        """The function that chooses an implementation for each problem: by measurement with the option `tune`, else by rules."""
        if self.options.tune:
            options = {**default_options(self.platform), **self.options.xla}
            heap_is_kept = self.options.heap == "keep"
            return RecordingChooser(
                Tuner(self.jax_device, self.options.implementations, options, self.options.store("tuning"), heap_is_kept).choose
            )
        return RecordingChooser(lambda implementations, problem: implementations.choose(problem, self.options.implementations))

    def specialise(self, args: Sequence[Any], settings: Settings | None = None, planned: bool = False) -> SpecialisedGraph:
        """Returns the graph with the concrete sizes of these inputs.

        Args:
            args: The inputs of a call.
            settings: torch's settings; the current ones by default.
            planned: True if the program will not run, so that its inputs may be planned for a virtual mesh.
        """
        interpreter, symbols, settings = self.interpreter, self.sizes.values(args), settings or Settings.current(self.platform)
        values = [node.meta["val"] for node in interpreter.placeholders]
        specs = [symbols.spec(value) for value in values if isinstance(value, torch.Tensor)]
        reorders = self.platform == "cpu" and interpreter.reorders(specs)
        device = GraphDevice(self.device, self.jax_device)
        buffers: Buffers
        if self.device_kind is not None:
            rederived_outputs, donate = self.rederived_outputs, self.options.donate
            buffers = self.device_kind.buffers(
                BufferRequest(
                    interpreter, symbols, args, self.phase, device, self.storages, rederived_outputs, donate, planned, self.reports_late
                )
            )
        else:
            free, open_inputs = reorders or self.opens_layouts, self.open_inputs if self.opens_layouts else None
            buffers = NativeBuffers(
                interpreter, symbols, args, self.static_inputs, self.phase, device, free, self.waits_for_checks, open_inputs, self.storages
            )
        numbers = {index: args[index] for index in self.sizes.numbers}
        # A graph whose outputs are all inputs, views of inputs or numbers may still contain checks, or kernels with side effects.
        if not buffers.nodes and not interpreter.has_effects:
            return SpecialisedGraph(
                None, buffers, TraceMetadata(numbers=self.numbers(buffers, symbols, numbers)), settings, symbols, numbers
            )
        choose = self.choose if buffers.replicated is None else choose_for_mesh
        participants = process_networks.Participants.of(self.groups) if self.groups else None
        function = Function(
            interpreter, symbols, numbers, buffers.nodes, buffers.numbers,
            settings=settings, choose=choose, reorders=reorders and buffers.replicated is None, replicated=buffers.replicated,
            participants=participants,
        )  # fmt: skip
        return SpecialisedGraph(function, buffers, TraceMetadata(), settings, symbols, numbers, participants)

    def numbers(self, buffers: Buffers, symbols: SymbolValues, inputs: Mapping[int, Any]) -> tuple[Any, ...]:
        """Returns the values of the outputs that are numbers. Each of these is an input or a function of the sizes.

        Args:
            buffers: The graph's buffers.
            symbols: The values of the graph's size symbols.
            inputs: The inputs that are not tensors, by position.
        """
        values = {self.interpreter.placeholders[position]: value for position, value in inputs.items()}
        return tuple(values[node] if node in values else symbols.integer(node.meta["val"]) for node in buffers.numbers)

    def dump_name(self) -> str:
        """Returns the graph's name, with a number appended for every executable after the first."""
        number = next(self._dumps)
        return self.name if number == 1 else f"{self.name}_{number}"

    @functools.cached_property
    def eager_graph(self) -> EagerGraph:
        """The graph for torch's kernels. It returns every value that is a buffer for some sizes."""
        return EagerGraph(self.interpreter.module, self.storages.candidates)

    @functools.cached_property
    def may_run_eagerly(self) -> bool:
        """True if torch's kernels may run all calls of the graph.

        The graph must have no effects besides its outputs, must not write to an input, and must give the same results in torch and XLA, up
        to rounding.
        """
        module, interpreter = self.interpreter.module, self.interpreter
        if self.options.dump is not None or interpreter.has_effects or not interpreter.kernels:  # a dump needs a program
            return False
        return not written_inputs(module.graph) and is_interchangeable(module)

    @functools.cached_property
    def foreground_programs(self) -> float:
        """The number of programs for whose compilation calls wait. Further programs are compiled in the background.

        Infinity means that none is compiled in the background. With the option compile="auto", that is the case unless the graph has
        dynamic sizes and is on the CPU. It is also the case if all results must be those of XLA: for a dump, and for
        `torch.use_deterministic_algorithms`.
        """
        options = self.options
        # The environment variable DYNAXLA_COMPILE may ask for the background although an option of this graph excludes it.
        if options.compile == "now" or options.freeze or options.tune:
            return math.inf
        if options.compile == "auto":
            is_dynamic = self.device_kind is None and self.platform == "cpu" and not self.sizes.is_static
            if options.dump is not None or not is_dynamic or torch.are_deterministic_algorithms_enabled():
                return math.inf
        return (FOREGROUND_PROGRAMS if options.compile == "auto" else 0) if is_interchangeable(self.interpreter.module) else math.inf

    def do_without_refusable(self, error: CompilationError) -> None:
        """Makes later traces avoid implementations that this machine may not support, after a compilation has failed.

        Args:
            error: The error of the failed compilation.

        Raises: `error` if the program used no such implementation, or if they are avoided already.
        """
        if self.choose.avoids_refusable or not self.choose.refusable:
            raise error
        self.choose.avoids_refusable = True
        refused = ", ".join(sorted(self.choose.refusable))
        dump.log.warning("%s is compiled again without optional kernels (%s), which XLA refused: %s", self.name, refused, error.message)

    def run_by_torch(self, args: list[Any]) -> list[Any]:
        """Runs the graph without XLA. Raises: ForkError if options.fallback is "error" and this process cannot use XLA."""
        if self.options.fallback == "error" and forks.has_lost_xla():
            raise forks.fork_error()
        return eager_fallback.run(self.interpreter.module, args)
