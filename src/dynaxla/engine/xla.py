"""The engine of every day: a graph is lowered once for each combination of input sizes, compiled, and from then on only run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding
from torch.utils._python_dispatch import _disable_current_modes

from .. import forks
from ..buffers.device_kinds import Kind, Request, Unlike, kind_of
from ..buffers.native import NativeBuffers, Place
from ..buffers.plan import Storages
from ..buffers.protocol import Buffers
from ..capture.aten_graph import AtenGraph, graph_device, written_inputs
from ..capture.fingerprint import fingerprint
from ..capture.inputs import Sizes, check_tensor
from ..config import Options
from ..errors import CompilationError, DynaxlaError, OptionError, UnsupportedTensor
from ..lowering import Check, Interpreter, Settings, SymbolValues, dtypes, registry
from ..lowering.asynchronous import groups_in
from ..lowering.by_xla import calls_in
from ..lowering.context import Context
from ..lowering.cpu import lone_ops
from ..lowering.cpu.halves import with_few_roundings
from ..lowering.cpu.partitionable import partitionable
from ..lowering.cpu.transposes import Orders, without_transposes
from ..lowering.forms import Choices, generic
from ..lowering.function import Function
from ..lowering.interchange import is_interchangeable
from ..lowering.ops.sharding_constraints import shardings_in
from ..observe import dump, events, metrics
from ..runtime import background, by_torch, devices, heap, meshes, networks, private, programs, streams
from ..runtime.cache import LeastRecentlyUsed
from ..runtime.store import Keeper
from ..tuning import Tuner
from . import early_checks, held_back, records
from .blocks import in_parts
from .executable import Executable, compilation_error, drawing_under_trace, execution_error, is_exhausted
from .facts import Facts, Returned
from .layouts import check_closed, opens_layouts, sharded_as, with_open_layouts
from .options import default_options, options_for, quick_options, with_tiles
from .pending import ByTorch, Kernels, Pending

# What keeps what later processes read, by folder; None for nothing.
Stores = Callable[[str], Keeper | None]

Runnable = Executable | ByTorch

# Seconds. A compilation that takes longer leaves hundreds of megabytes behind in the C library's heap.
LONG = 0.5
# Layouts of one call's inputs that are looked at, in case another thread writes to their storages meanwhile.
_TRIES = 16


class Xla:
    """An engine whose runners keep a compiled program for each combination of input sizes.

    blocks: whether equal blocks of an inference graph are compiled once, see blocks.py.
    """

    def __init__(self, options: Options, *, blocks: bool = True) -> None:
        self.options, self.blocks = options, blocks
        self.store: Stores = options.store

    def runner(self, graph: AtenGraph) -> Program:
        return Program(graph, self.options, blocks=self.blocks, store=self.store)


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


@dataclass(frozen=True)
class Likeness:
    """What a call was like. Attributes: args (its inputs, tensors without memory in the place of tensors); settings, default_dtype
    (torch's, as they were then)."""

    args: Sequence[Any]
    settings: Settings
    default_dtype: torch.dtype


def _like(arg: Any) -> Any:
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta") if isinstance(arg, torch.Tensor) else arg


@dataclass(frozen=True)
class _Waiting:
    """What is to be compiled. Attributes: wanted; pending (what runs calls until then; None where somebody else knows how)."""

    wanted: Specialised | Likeness
    pending: Pending | None = None


class Program:
    """A graph's runner: see `protocol.Runner`.

    Raises: UnsupportedOp, UnsupportedTensor, DeviceMismatch.
    """

    def __init__(self, graph: AtenGraph, options: Options, *, blocks: bool = False, store: Stores | None = None) -> None:
        # On the instance, not the class: AOTAutograd wraps the backward with functools.wraps, which copies the instance's attributes only.
        self._boxed_call = True
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
        self._executables: LeastRecentlyUsed[Runnable] = LeastRecentlyUsed(options.executables)
        self._planned_for: LeastRecentlyUsed[Executable] = LeastRecentlyUsed(options.executables)
        # Whether torch's kernels run calls while XLA compiles.
        self.in_background = options.compile == "background" and is_interchangeable(graph.module)
        # What torch's kernels keep for a backward pass may have other strides than what a program keeps.
        self._tells_strides = self.in_background and graph.phase == "backward"
        self._waiting: OrderedDict[Any, _Waiting] = OrderedDict()  # what was wanted last comes last
        self._pending_lock = forks.lock()
        forks.renew(self)
        if not forks.is_cut_off():
            _ = self.jax_device  # whether there is one is known now
        self._lock = forks.lock()
        self._dumps = itertools.count(1)
        metrics.add("graphs")

    def __call__(self, args: list[Any]) -> list[Any]:
        if by_torch.is_looked_at():
            return self.run_by_torch(args)
        if held_back.threads:
            held_back.hold_back(self, args)
        if self._kind is not None:
            if self._kind.are_traced(args):
                return self._inlined(self._kind, args)
            if meshes.is_planning():
                return self._planned(self._kind, args)
        key = self._key(args)
        executable: Runnable | None = self._executables.get(key)
        if executable is None:
            if by_torch.is_needed(args):
                return self.run_by_torch(args)
            executable = self._pending_for(key, args) if self.in_background else self._built_for(key, args)
        for _ in range(_TRIES):
            try:
                taken = executable.take(args)
            except Unlike:  # of the one that is made for them, too, if another thread has written to an input's storage meanwhile
                executable = self._alike(key, args)
            else:
                return executable(taken)
        raise DynaxlaError(
            f"{self.name} finds its inputs laid out in another way each time that it looks",
            hint="do not write to them in other threads while it is called; if nobody does, this is a defect of dynaxla: please report it",
        )

    def _planned(self, kind: Kind, args: list[Any]) -> list[Any]:
        """A call whose program is compiled to be looked at, and does not run."""
        key = "planned", self._key(args), kind.plans(args)
        with self._lock:
            executable = self._planned_for.get(key)
            if executable is None:
                executable = self.build(self.specialise(args, planned=True))
                self._planned_for.put(key, executable)
        executable.show()
        return kind.blank(executable.binding, args, executable.program.lie() if executable.program is not None else ())

    def _inlined(self, kind: Kind, args: list[Any]) -> list[Any]:
        """A call inside a function that JAX traces: the graph becomes part of that. What it would check of values, nobody can look at.

        Raises: UnsupportedOp for random numbers; UnsupportedTensor for a tracer whose function has ended.
        """
        interpreter, symbols, settings = self.interpreter, self.sizes.values(args), Settings.current(self.platform)
        if interpreter.draws_random:
            raise drawing_under_trace(self.name)
        place, given = Place(self.device, self.jax_device), {index: args[index] for index in self.sizes.numbers}
        buffers = kind.buffers(Request(interpreter, symbols, args, self.phase, place, self._storages, self._remade, donate=False))
        function = Function(interpreter, symbols, given, buffers.nodes, buffers.numbers, settings=settings)
        binding = buffers.bind(self.numbers(buffers, symbols, given))
        tensors = binding.take(args)
        arrays = binding.arrays(tensors)
        try:
            with jax.enable_x64(True):
                inputs, key = buffers.unpack(arrays)
                results = buffers.pack(function(inputs, key).outputs)
        except jax.errors.UnexpectedTracerError as error:
            binding.abandon(False, tensors)
            raise kind.outlived(error) from error
        except BaseException:
            binding.abandon(False, tensors)
            raise
        return binding.outputs(binding.export(results, tensors), tensors)

    def _alike(self, key: Any, args: Sequence[Any]) -> Runnable:
        """The executable for inputs that lie in their storages as these do. It is tried first from now on."""
        assert self._kind is not None
        own = key, self._kind.signature(args)
        executable = self._executables.get(own) or self._built_for(own, args)
        self._executables.put(key, executable)
        return executable

    def ready(self, args: Sequence[Any]) -> Runnable | None:
        """What a call with inputs like these would run, unless it is torch's kernels until another thread has compiled it.

        args: need hold no numbers.
        """
        key = self._key(args)
        executable = self._executables.get(key)
        if executable is None and not self.in_background:
            return self._built_for(key, args)
        if executable is None:
            with self._pending_lock:
                executable = self._executables.get(key)
                if executable is not None:
                    return executable
                if key not in self._waiting:
                    likeness = Likeness([_like(arg) for arg in args], Settings.current(self.platform), torch.get_default_dtype())
                    self._wait(key, _Waiting(likeness))
                self._waiting.move_to_end(key)
            background.want(self)
        return executable

    def prepare(self) -> None:
        """Compile for the inputs that the graph was made for, where it says how they lie in memory. Raises: as a call."""
        if not self.sizes.is_static or self.phase == "backward" or self.groups or forks.is_cut_off():
            return
        with _disable_current_modes():  # those of the capture that this is part of
            args = [_like(node.meta["val"]) for node in self.interpreter.placeholders]
            self._built_for(self._key(args), args)

    def _key(self, args: Sequence[Any]) -> Any:
        """What tells apart inputs that need an executable each."""
        key: Any = () if self.sizes.is_static else self.sizes.key(args)
        if self.groups:
            key = (*key, networks.token(self.groups))
        if self.platform == "cuda":
            key = (*key, Settings.current(self.platform))
        if self._tells_strides:
            key = (*key, *[arg.stride() if isinstance(arg, torch.Tensor) else None for arg in args])
        return key

    def _built_for(self, key: Any, args: Sequence[Any]) -> Runnable:
        with self._lock:
            executable = self._executables.get(key)
            if executable is None:
                executable = self.made(self.specialise(args))
                self._executables.put(key, executable)
        return executable

    def _pending_for(self, key: Any, args: Sequence[Any]) -> Runnable:
        """What runs this call while another thread compiles. All that is compiled for is known when this has returned."""
        with self._pending_lock:
            executable = self._executables.get(key)
            if executable is not None:
                return executable
            waiting = self._waiting.get(key)
            if waiting is None or waiting.pending is None:
                specialised = self.specialise(args)
                if specialised.function is None or self._is_for_torch(specialised):
                    executable = self.made(specialised)
                else:
                    executable = self._compiled_before(specialised)
                if executable is not None:
                    self._executables.put(key, executable)
                    return executable
                waiting = _Waiting(specialised, Pending(self.name, self._kernels, specialised.buffers, self.device))
                self._wait(key, waiting)
            self._waiting.move_to_end(key)
            pending = waiting.pending
            assert pending is not None
        background.want(self)
        return pending

    def _wait(self, key: Any, waiting: _Waiting) -> None:
        self._waiting[key] = waiting
        if len(self._waiting) > self.options.executables:
            self._waiting.popitem(last=False)

    def work(self) -> bool:
        """Compile for the sizes that were wanted last, of those that wait. Returns: whether others do.

        If that fails, the log says so, and from then on this graph's calls compile: so they raise what there is to raise.
        """
        with self._pending_lock:
            if not self._waiting:
                return False
            key = next(reversed(self._waiting))
            wanted = self._waiting[key].wanted
        try:
            executable = self.made(wanted if isinstance(wanted, Specialised) else self._specialised(wanted))
        except Exception as error:
            dump.log.error("%s could not be compiled in the background, so its next call compiles it: %s", self.name, error)
            with self._pending_lock:
                self.in_background = False
                self._waiting.clear()
            return False
        with self._pending_lock:
            self._executables.put(key, executable)
            self._waiting.pop(key, None)
            return bool(self._waiting)

    def _specialised(self, likeness: Likeness) -> Specialised:
        with dtypes.defaulting_to(likeness.default_dtype):
            return self.specialise(likeness.args, likeness.settings)

    @functools.cached_property
    def _kernels(self) -> Kernels:
        return Kernels(self.interpreter.module, self._storages.candidates)

    @functools.cached_property
    def _storages(self) -> Storages:
        return Storages(self.interpreter.module.graph)

    def run_by_torch(self, args: list[Any]) -> list[Any]:
        """Without XLA. Raises: ForkError with options.fallback "error", where XLA cannot be used."""
        if self.options.fallback == "error" and forks.is_cut_off():
            raise forks.cut_off()
        return by_torch.run(self.interpreter.module, args)

    def after_fork(self) -> None:
        """Programs of the parent's are not called, and not freed either."""
        if len(self._executables):
            forks.leave(self._executables)
            self._executables = LeastRecentlyUsed(self.options.executables)

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

    def executables(self) -> list[Executable]:
        return list(dict.fromkeys(run for run in self._executables.values() if isinstance(run, Executable)))

    def made(self, specialised: Specialised) -> Runnable:
        """What runs the graph: its program, unless XLA has nothing to do in it."""
        if self._is_for_torch(specialised):
            specs = [specialised.symbols.spec(node.meta["val"]) for node in specialised.buffers.nodes]
            if self.options.heap == "keep" and sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs) >= heap.LARGE:
                heap.keep_freed_memory()
            with self._told(specialised) as made:
                made.append(ByTorch(self.name, self._kernels, specialised.buffers, self.device))
            return made[0]
        return self.build(specialised)

    def build(self, specialised: Specialised) -> Executable:
        """Trace, lower and compile the graph."""
        start = time.perf_counter()
        with programs.below_caller(), self._told(specialised) as made:
            executable = self._build(specialised)
            made.append(executable)
        if time.perf_counter() - start > LONG and self.options.heap == "keep":
            heap.return_freed_memory()
        return executable

    def _is_for_torch(self, specialised: Specialised) -> bool:
        if specialised.function is None or self._kind is not None or self.platform != "cpu" or not self._may_be_torchs:
            return False
        ctx = Context(self.platform, specialised.settings, specialised.symbols, choose=self.choose)
        needed = self.interpreter.needed([*specialised.buffers.nodes, *specialised.buffers.numbers])
        with self._told(specialised):
            return lone_ops.is_for_torch([node for node in self.interpreter.module.graph.nodes if node in needed], ctx)

    @functools.cached_property
    def _may_be_torchs(self) -> bool:
        """Whether a graph only computes its outputs, and it makes no difference who does."""
        module, interpreter = self.interpreter.module, self.interpreter
        if self.options.dump is not None or interpreter.acts or not interpreter.kernels:  # a program is to be seen, or must do it
            return False
        return not written_inputs(module.graph) and is_interchangeable(module)

    @contextlib.contextmanager
    def _told(self, specialised: Specialised) -> Iterator[list[Runnable]]:
        """Inside, who listens is told that a program is being made; of what the list has then, that it is."""
        made: list[Runnable] = []
        if not events.is_heard():
            yield made
            return
        events.tell(events.Building(self.name, self.interpreter, specialised.symbols))
        try:
            yield made
        finally:
            events.tell(events.Built(self.name, made[0] if made else None))

    def _build(self, specialised: Specialised) -> Executable:
        if specialised.function is None:
            return self.executable(None, specialised.buffers, specialised.facts)
        with dtypes.defaulting_to(specialised.function.default_dtype):
            parts = in_parts(self, specialised)
        if parts is not None:
            return self.executable(*parts)
        key = self._record_key(specialised, specialised.function)
        if key is not None and (recalled := self._recalled(key, specialised.buffers)) is not None:
            return recalled
        donated = specialised.buffers.donated
        traced, buffers, facts = self.trace(specialised.function, specialised.buffers, guarded=not donated)
        checks = None
        if donated and facts.checks:
            apart = self._split_checks(traced, buffers)
            if apart is None:
                traced, buffers, facts = self.trace(specialised.function, specialised.buffers)
            else:
                checks, traced = apart
        where = buffers.where
        if where is not None:
            traced = sharded_as(traced, self.name, buffers.avals(), buffers.shardings, donated)
        if specialised.members is not None and specialised.members.calls:
            return self._built_for_processes(specialised, specialised.members, traced, buffers, facts)
        lowered = self.lower(traced)
        try:
            first = None if checks is None else self.compile(self.lower(checks), checks, specialised.settings, where=where)
            compiled = self.compile(lowered, traced, specialised.settings, where=where)
        except CompilationError as error:
            self.do_without_refusable(error)
            return self._build(specialised)
        self.record(key, lowered, traced, specialised.settings, facts, buffers.orders)
        return self.executable(compiled, buffers, facts, first)

    def _built_for_processes(
        self, specialised: Specialised, members: networks.Members, traced: jax.stages.Traced, buffers: Buffers, facts: Facts
    ) -> Executable:
        """Raises: CollectiveMismatch; CollectiveFailed; CompilationError."""
        network = members.connected()
        compiled = self.compile(self.lower(traced), traced, specialised.settings, among=network.devices, device=network.device)
        found = calls_in(compiled.text())
        if found != members.calls and not members.holds:  # XLA leaves out what no result depends on
            members.holds = True
            return self._build(specialised)
        if found != members.calls:
            raise CompilationError(
                f"XLA calls the collectives {found} in {self.name}, which has {members.calls}",
                hint="options={'collectives': 'torch'}; this is a defect of dynaxla: please report it",
            )
        assert isinstance(buffers, NativeBuffers)
        among = functools.partial(members.agreement.under_way, network.cut)
        return self.executable(compiled, buffers.on(network.device), facts, among=among)

    def compiled_for(self, specialised: Specialised, known: jax.stages.Traced | None) -> tuple[Executable, jax.stages.Traced]:
        """What would run on a mesh, for looking at alone: it checks nothing. And what was traced for it, which is `known` for other
        placements of the same inputs."""
        assert specialised.function is not None
        buffers = specialised.buffers
        if known is None:
            known, _, facts = self.trace(specialised.function, buffers, guarded=not buffers.donated)
            if buffers.donated and facts.checks:
                apart = self._split_checks(known, buffers)
                known = self.trace(specialised.function, buffers)[0] if apart is None else apart[1]
        traced = sharded_as(known, self.name, buffers.avals(), buffers.shardings, buffers.donated)
        compiled = self.compile(self.lower(traced), traced, specialised.settings, where=buffers.where)
        return self.executable(compiled, buffers, Facts()), known

    def _split_checks(self, traced: jax.stages.Traced, buffers: Buffers) -> tuple[jax.stages.Traced, jax.stages.Traced] | None:
        with metrics.timed("trace"), jax.default_device(self.jax_device):
            return early_checks.split(traced, self.name, buffers.avals(), buffers.donated)

    # What an earlier process has traced

    def _record_key(self, specialised: Specialised, function: Function) -> str | None:
        """The name of this graph's record, as of `record_key`."""
        facts = "graph", self.has_blocks, specialised.buffers.facts
        return self.record_key(self.interpreter.module, specialised.settings, function, specialised.buffers.avals(), facts)

    def record_key(
        self,
        module: torch.fx.GraphModule,
        settings: Settings,
        function: Function,
        avals: Sequence[jax.ShapeDtypeStruct],
        facts: Sequence[Any],
    ) -> str | None:
        """The name of the record of a graph, or of a part of it; None for one that has none, or whose way is to be seen or measured.

        avals: what its program takes. facts: what else the program, or the way in which it is called, depends on, as plain data.
        """
        seen = self.options.dump is not None or dump.log.isEnabledFor(logging.DEBUG)
        if self.platform != "cpu" or self.groups or not self.sizes.is_static or seen or self.options.tune or self.store("records") is None:
            return None
        taken = [(aval.shape, str(aval.dtype)) for aval in avals]
        known = self.options.facts, self.phase, self.choose.is_certain, *settings, function.default_dtype, taken, *facts
        return records.key_of(fingerprint(module), self.jax_device, known)

    def _compiled_before(self, specialised: Specialised) -> Executable | None:
        """The executable for these sizes, if it need only be read from a file."""
        if specialised.function is None or (key := self._record_key(specialised, specialised.function)) is None:
            return None
        with programs.below_caller():
            return self._recalled(key, specialised.buffers, only_stored=True)

    def _recalled(self, key: str, buffers: Buffers, *, only_stored: bool = False) -> Executable | None:
        """The executable that a record tells of, if there is one. only_stored: unless XLA has to compile it once more."""
        found = self.recalled(key, only_stored=only_stored)
        if found is None:
            return None
        compiled, record = found
        self.interpreter.count_lowered([*buffers.nodes, *buffers.numbers])
        return self.executable(compiled, buffers.ordered(record.orders), Facts(tuple(record.checks), record.numbers))

    def recalled(self, key: str | None, *, only_stored: bool = False) -> tuple[programs.XlaProgram, records.Record] | None:
        """The program that a record tells of, with the record, if there is one. only_stored: unless XLA has to compile it once more."""
        kept, store = self.store("records"), self.store("programs")
        if key is None or kept is None or store is None or (record := records.Record.find(kept, key)) is None:
            return None
        if only_stored and not programs.is_stored(record.note):
            return None
        compiled = None
        with metrics.timed("compile"), contextlib.suppress(jax.errors.JaxRuntimeError):  # then it is made as if there were no record
            compiled = programs.from_note(record.note, self.jax_device, record.options, store, self.options.heap == "keep")
        if compiled is None:
            return None
        metrics.add("recalls")
        return compiled, record

    def record(
        self,
        key: str | None,
        lowered: jax.stages.Lowered,
        traced: jax.stages.Traced,
        settings: Settings,
        facts: Facts,
        orders: Mapping[int, tuple[int, ...]],
    ) -> None:
        """Keep what tracing has told, if it can be kept."""
        store, options = self.store("records"), self._xla_options(traced, settings)
        if key is None or store is None or facts.kernels:
            return
        note = programs.note(lowered, self.jax_device, options)
        if note is not None:
            records.Record(options, facts.checks, facts.numbers, facts.draws, orders, note).put(store, key)

    def do_without_refusable(self, error: CompilationError) -> None:
        """From now on take no form that the machine may lack. Raises: error, if none was taken or they are avoided already."""
        if self.choose.is_certain or not self.choose.refusable:
            raise error
        self.choose.is_certain = True
        dump.log.warning("%s is compiled again without %s: %s", self.name, ", ".join(sorted(self.choose.refusable)), error)

    # The way of a graph with concrete sizes

    def specialise(self, args: Sequence[Any], settings: Settings | None = None, planned: bool = False) -> Specialised:
        """The graph for inputs like these. settings: torch's, if not its present ones. planned: see `Request`."""
        interpreter, symbols, settings = self.interpreter, self.sizes.values(args), settings or Settings.current(self.platform)
        reorders = self.platform == "cpu" and interpreter.has_convolutions
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
            traced, orders = self.traced(program, self.name, avals, self.interpreter, buffers.free, buffers.donated)
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
        free: Sequence[int] = (),
        donated: Sequence[int] = (),
    ) -> tuple[jax.stages.Traced, Orders]:
        """A function of arrays that a graph stands in, under jax tracing; the orders of its `free` results. donated: see `Buffers`.

        Raises: UnsupportedTensor if a JAX function in it reads a tracer from elsewhere.
        """
        registry.fill()  # not under jax tracing
        run.__name__ = name
        orders: Orders = {}
        with metrics.timed("trace"), jax.enable_x64(True), jax.default_device(self.jax_device):
            if self.platform == "cpu":
                if interpreter.has_convolutions:
                    run, orders = without_transposes(run, self.platform, free)
                if interpreter.has_halves:
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
