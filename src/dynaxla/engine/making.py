"""Chooses how a graph with concrete sizes runs: by a program from an earlier process, a newly compiled one, or torch's kernels."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import torch

from ..buffers.native import NativeBuffers
from ..buffers.protocol import Buffers
from ..capture.fingerprint import fingerprint
from ..capture.graph import written_inputs
from ..errors import CompilationError
from ..lowering import Settings, dtypes
from ..lowering.by_xla import calls_in
from ..lowering.context import Context
from ..lowering.cpu import lone_ops
from ..lowering.function import Function
from ..lowering.interchange import is_interchangeable
from ..observe import dump, events, metrics, rewrites
from ..passes import pipeline
from ..runtime import heap, networks, programs
from . import records
from .blocks import in_parts
from .executable import Executable
from .facts import Facts
from .pending import EagerExecutable, Kernels
from .stages import Specialised, Stages

Runnable = Executable | EagerExecutable

# Live programs by record key, device and heap option. Equal graphs share one program: layers that are compiled one by one, a second bucket
# of DistributedDataParallel, a notebook cell that runs again.
_still_there: weakref.WeakValueDictionary[tuple[str, jax.Device, str], programs.XlaProgram] = weakref.WeakValueDictionary()

# Seconds. A compilation that takes longer leaves hundreds of megabytes behind in the C library's heap.
LONG = 0.5


class ExecutableBuilder(Stages):
    """Builds the executable of a graph with concrete sizes, or chooses torch's kernels for it."""

    @functools.cached_property
    def _kernels(self) -> Kernels:
        return Kernels(self.interpreter.module, self._storages.candidates)

    def made(self, specialised: Specialised) -> Runnable:
        """Returns the graph's executable, or torch's kernels if XLA would not improve on them."""
        if self._is_for_torch(specialised):
            specs = [specialised.symbols.spec(node.meta["val"]) for node in specialised.buffers.nodes]
            if self.options.heap == "keep" and sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs) >= heap.LARGE:
                heap.keep_freed_memory()
            kernels = Kernels(self.interpreter.module, [*specialised.buffers.nodes, *specialised.buffers.numbers])
            with self._told(specialised) as made:
                made.append(EagerExecutable(self.name, kernels, specialised.buffers, self.device))
            return made[0]
        return self.build(specialised)

    def build(self, specialised: Specialised) -> Executable:
        """Traces, lowers and compiles the graph."""
        start = time.perf_counter()
        dumped = rewrites.dumped(self.options.dump_directory, self.name)
        with programs.below_caller(), self._told(specialised) as made, dumped:
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
        """True if the graph only computes outputs, writes no input, and gives the same results by torch and XLA, up to rounding."""
        module, interpreter = self.interpreter.module, self.interpreter
        if self.options.dump is not None or interpreter.acts or not interpreter.kernels:  # a dump, or the graph, needs a program
            return False
        return not written_inputs(module.graph) and is_interchangeable(module)

    @contextlib.contextmanager
    def _told(self, specialised: Specialised) -> Iterator[list[Runnable]]:
        """Emits a `Building` event on entry, and on exit a `Built` event with the runnable that the caller has put into the list."""
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
            traced = pipeline.SHARDED(traced, self.name, buffers.avals(), buffers.shardings, donated)
        if specialised.members is not None and specialised.members.calls:
            return self._built_for_processes(specialised, specialised.members, traced, buffers, facts)
        lowered = self.lower(traced)
        try:
            first = None if checks is None else self.compile(self.lower(checks), checks, specialised.settings, where=where)
            compiled = self.compile(lowered, traced, specialised.settings, where=where)
        except CompilationError as error:
            self.do_without_refusable(error)
            return self._build(specialised)
        self.record(key, lowered, compiled, traced, specialised.settings, facts, buffers.orders)
        return self.executable(compiled, buffers, facts, first)

    def _built_for_processes(
        self, specialised: Specialised, members: networks.Members, traced: jax.stages.Traced, buffers: Buffers, facts: Facts
    ) -> Executable:
        """Builds an executable with collectives that XLA itself executes.

        Raises: CollectiveMismatch; CollectiveFailed; CompilationError.
        """
        network = members.connected()
        compiled = self.compile(self.lower(traced), traced, specialised.settings, among=network.devices, device=network.device)
        found = calls_in(compiled.text())
        if found != members.calls and not members.holds:  # XLA removes collectives that no result depends on
            members.holds = True
            return self._build(specialised)
        if found != members.calls:
            raise CompilationError(
                f"XLA's program of {self.name} has the collectives {found}, and the graph has {members.calls}",
                hint="use options={'collectives': 'torch'}, which leaves collectives to torch",
            )
        assert isinstance(buffers, NativeBuffers)
        among = functools.partial(members.agreement.under_way, network.cut)
        return self.executable(compiled, buffers.on(network.device), facts, among=among)

    def compiled_for(self, specialised: Specialised, known: jax.stages.Traced | None) -> tuple[Executable, jax.stages.Traced]:
        """Compiles the program of a virtual mesh for inspection only: the executable has no checks.

        Args:
            specialised: The graph, with its inputs planned for the mesh.
            known: The traced program that an earlier call returned for other placements of the same inputs; None to trace now.

        Returns: the executable and the traced program.
        """
        assert specialised.function is not None
        buffers = specialised.buffers
        if known is None:
            known, _, facts = self.trace(specialised.function, buffers, guarded=not buffers.donated)
            if buffers.donated and facts.checks:
                apart = self._split_checks(known, buffers)
                known = self.trace(specialised.function, buffers)[0] if apart is None else apart[1]
        traced = pipeline.SHARDED(known, self.name, buffers.avals(), buffers.shardings, buffers.donated)
        compiled = self.compile(self.lower(traced), traced, specialised.settings, where=buffers.where)
        return self.executable(compiled, buffers, Facts()), known

    def _split_checks(self, traced: jax.stages.Traced, buffers: Buffers) -> tuple[jax.stages.Traced, jax.stages.Traced] | None:
        with metrics.timed("trace"), jax.default_device(self.jax_device):
            return pipeline.PRECHECKS(traced, self.name, buffers.avals(), buffers.donated)

    # Records of earlier traces

    def _record_key(self, specialised: Specialised, function: Function) -> str | None:
        """Returns the key of the whole graph's record; see `record_key`."""
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
        """Returns the key of the record of a graph, or of a part of it.

        None if it has no record. Only graphs on the CPU with static sizes and without XLA's own collectives have records, and only if there
        is a store. A dump, a debug log and the option `tune` need a new trace.

        Args:
            module: The graph or its part.
            settings: torch's settings.
            function: The function to trace.
            avals: The shapes and dtypes of the program's arguments.
            facts: Everything else that the program or its calling convention depends on, as plain data.
        """
        seen = self.options.dump is not None or dump.log.isEnabledFor(logging.DEBUG)
        if self.platform != "cpu" or self.groups or not self.sizes.is_static or seen or self.options.tune or self.store("records") is None:
            return None
        taken = [(aval.shape, str(aval.dtype)) for aval in avals]
        known = self.options.facts, self.phase, self.choose.is_certain, *settings, function.default_dtype, taken, *facts
        return records.key_of(fingerprint(module), self.jax_device, known)

    def _compiled_before(self, specialised: Specialised) -> Executable | None:
        """Returns the executable for these sizes if the stores hold its compiled program; else None."""
        if specialised.function is None or (key := self._record_key(specialised, specialised.function)) is None:
            return None
        with programs.below_caller():
            return self._recalled(key, specialised.buffers, only_stored=True)

    def _recalled(self, key: str, buffers: Buffers, *, only_stored: bool = False) -> Executable | None:
        """Returns the executable of a record, if there is one.

        only_stored: If true, return None where XLA would have to compile the program again.
        """
        found = self.recalled(key, only_stored=only_stored)
        if found is None:
            return None
        compiled, record = found
        self.interpreter.count_lowered([*buffers.nodes, *buffers.numbers])
        return self.executable(compiled, buffers.ordered(record.orders), Facts(tuple(record.checks), record.numbers))

    def recalled(self, key: str | None, *, only_stored: bool = False) -> tuple[programs.XlaProgram, records.Record] | None:
        """Returns the program of a record, and the record, if there is one.

        only_stored: If true, return None where XLA would have to compile the program again.
        """
        kept, store = self.store("records"), self.store("programs")
        if key is None or kept is None or store is None or (record := records.Record.find(kept, key)) is None:
            return None
        place = key, self.jax_device, self.options.heap
        compiled = _still_there.get(place)
        if compiled is None and only_stored and not programs.is_stored(record.note):
            return None
        if compiled is None:
            with metrics.timed("compile"), contextlib.suppress(jax.errors.JaxRuntimeError):  # on failure: build without the record
                compiled = programs.from_note(record.note, self.jax_device, record.options, store, self.options.heap == "keep")
        if compiled is None:
            return None
        _still_there[place] = compiled
        metrics.add("recalls")
        return compiled, record

    def record(
        self,
        key: str | None,
        lowered: jax.stages.Lowered,
        compiled: programs.XlaProgram,
        traced: jax.stages.Traced,
        settings: Settings,
        facts: Facts,
        orders: Mapping[int, tuple[int, ...]],
    ) -> None:
        """Stores the result of a trace under the key, if there is one and the program calls no torch kernels."""
        store, options = self.store("records"), self._xla_options(traced, settings)
        if key is None or store is None or facts.kernels:
            return
        note = programs.note(lowered, self.jax_device, options)
        if note is not None:
            _still_there[key, self.jax_device, self.options.heap] = compiled
            records.Record(options, facts.checks, facts.numbers, facts.draws, orders, note).put(store, key)

    def do_without_refusable(self, error: CompilationError) -> None:
        """Avoids, from now on, forms that this machine may not support.

        Raises: the given error if no such form was in use, or they are avoided already.
        """
        if self.choose.is_certain or not self.choose.refusable:
            raise error
        self.choose.is_certain = True
        dump.log.warning("%s is compiled again without %s: %s", self.name, ", ".join(sorted(self.choose.refusable)), error)
