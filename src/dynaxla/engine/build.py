"""Chooses how a graph with concrete sizes runs: by a stored program, a newly compiled one, or torch's kernels."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator

import jax

from ..buffers.native import NativeBuffers
from ..buffers.protocol import Buffers
from ..errors import CompilationError
from ..lowering import dtypes
from ..lowering.context import Context
from ..lowering.cpu import unfusable_graphs
from ..lowering.xla_collectives import calls_in
from ..observe import events, metrics, rewrites
from ..passes import pipeline
from ..runtime import heap, process_networks, programs
from .blocks import in_parts
from .compile import bind, compile_lowered, lower, trace
from .eager_executable import EagerExecutable, Kernels
from .executable import Executable
from .facts import Facts
from .stored import graph_key, recalled_executable, record
from .unit import CompilationUnit, Specialised

Runnable = Executable | EagerExecutable

# Seconds. A compilation that takes longer leaves hundreds of megabytes behind in the C library's heap.
LONG = 0.5


def make_runnable(unit: CompilationUnit, specialised: Specialised) -> Runnable:
    """Returns the graph's executable, or torch's kernels if XLA would not improve on them."""
    if is_for_torch(unit, specialised):
        specs = [specialised.symbols.spec(node.meta["val"]) for node in specialised.buffers.nodes]
        if unit.options.heap == "keep" and sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs) >= heap.LARGE:
            heap.keep_freed_memory()
        kernels = Kernels(unit.interpreter.module, [*specialised.buffers.nodes, *specialised.buffers.numbers])
        with _reported(unit, specialised) as made:
            made.append(EagerExecutable(unit.name, kernels, specialised.buffers, unit.device))
        return made[0]
    return build(unit, specialised)


def build(unit: CompilationUnit, specialised: Specialised) -> Executable:
    """Traces, lowers and compiles the graph."""
    start = time.perf_counter()
    dumped = rewrites.dumping_to(unit.options.dump_directory, unit.name)
    with programs.below_caller(), _reported(unit, specialised) as made, dumped:
        executable = _build(unit, specialised)
        made.append(executable)
    if time.perf_counter() - start > LONG and unit.options.heap == "keep":
        heap.return_freed_memory()
    return executable


def is_for_torch(unit: CompilationUnit, specialised: Specialised) -> bool:
    """True if torch's kernels run the graph, because XLA would not improve on them."""
    if specialised.function is None or unit.kind is not None or unit.platform != "cpu" or not unit.may_be_torchs:
        return False
    ctx = Context(unit.platform, specialised.settings, specialised.symbols, choose=unit.choose)
    needed = unit.interpreter.needed([*specialised.buffers.nodes, *specialised.buffers.numbers])
    with _reported(unit, specialised):
        return unfusable_graphs.is_for_torch([node for node in unit.interpreter.module.graph.nodes if node in needed], ctx)


@contextlib.contextmanager
def _reported(unit: CompilationUnit, specialised: Specialised) -> Iterator[list[Runnable]]:
    """Emits `CompileStarted` on entry, and on exit `CompileEnded` with the runnable that the caller has put into the list."""
    made: list[Runnable] = []
    if not events.has_listeners():
        yield made
        return
    events.emit(events.CompileStarted(unit.name, unit.interpreter, specialised.symbols))
    try:
        yield made
    finally:
        events.emit(events.CompileEnded(unit.name, made[0] if made else None))


def _build(unit: CompilationUnit, specialised: Specialised) -> Executable:
    if specialised.function is None:
        return bind(unit, None, specialised.buffers, specialised.facts)
    with dtypes.defaulting_to(specialised.function.default_dtype):
        parts = in_parts(unit, specialised)
    if parts is not None:
        return bind(unit, *parts)
    key = graph_key(unit, specialised, specialised.function)
    if key is not None and (recalled := recalled_executable(unit, key, specialised.buffers)) is not None:
        return recalled
    donated = specialised.buffers.donated
    # Checks of a program that writes in place run first, and the call waits for them, where devices are synchronous.
    guarded = not donated or unit.reports_late
    traced, buffers, facts = trace(unit, specialised.function, specialised.buffers, guarded=guarded)
    checks = None
    if not guarded and facts.checks:
        apart = _split_checks(unit, traced, buffers)
        if apart is None:
            traced, buffers, facts = trace(unit, specialised.function, specialised.buffers)
        else:
            checks, traced = apart
    where = buffers.where
    if where is not None:
        traced = pipeline.SHARDED(traced, unit.name, buffers.avals(), buffers.shardings, donated)
    if specialised.members is not None and specialised.members.calls:
        return _build_for_processes(unit, specialised, specialised.members, traced, buffers, facts)
    try:
        lowered = lower(unit, traced)
        first = None if checks is None else compile_lowered(unit, lower(unit, checks), checks, specialised.settings, where=where)
        compiled = compile_lowered(unit, lowered, traced, specialised.settings, where=where)
    except CompilationError as error:
        unit.do_without_refusable(error)
        return _build(unit, specialised)
    record(unit, key, lowered, compiled, traced, specialised.settings, facts, buffers.orders)
    return bind(unit, compiled, buffers, facts, first)


def _build_for_processes(
    unit: CompilationUnit,
    specialised: Specialised,
    members: process_networks.Members,
    traced: jax.stages.Traced,
    buffers: Buffers,
    facts: Facts,
) -> Executable:
    """Builds an executable with collectives that XLA itself executes.

    Raises: CollectiveMismatch; CollectiveFailed; CompilationError.
    """
    network = members.connected()
    compiled = compile_lowered(unit, lower(unit, traced), traced, specialised.settings, among=network.devices, device=network.device)
    found = calls_in(compiled.text())
    if found != members.calls and not members.holds:  # XLA removes collectives that no result depends on
        members.holds = True
        return _build(unit, specialised)
    if found != members.calls:
        raise CompilationError(
            f"XLA has changed the collectives of {unit.name}, and processes could wait for one another: the graph has {members.calls}, "
            f"the compiled program {found}",
            hint="use options={'distributed': 'torch'}, which leaves collectives to torch",
        )
    assert isinstance(buffers, NativeBuffers)
    among = functools.partial(members.agreement.under_way, network.cut)
    return bind(unit, compiled, buffers.on(network.device), facts, among=among)


def compile_for_plan(
    unit: CompilationUnit, specialised: Specialised, known: jax.stages.Traced | None
) -> tuple[Executable, jax.stages.Traced]:
    """Compiles the program of a virtual mesh for inspection only: the executable has no checks.

    Args:
        specialised: The graph, with its inputs planned for the mesh.
        known: The traced program that an earlier call returned for other placements of the same inputs; None to trace now.

    Returns: the executable and the traced program.
    """
    assert specialised.function is not None
    buffers = specialised.buffers
    if known is None:
        known, _, facts = trace(unit, specialised.function, buffers, guarded=not buffers.donated)
        if buffers.donated and facts.checks:
            apart = _split_checks(unit, known, buffers)
            known = trace(unit, specialised.function, buffers)[0] if apart is None else apart[1]
    traced = pipeline.SHARDED(known, unit.name, buffers.avals(), buffers.shardings, buffers.donated)
    compiled = compile_lowered(unit, lower(unit, traced), traced, specialised.settings, where=buffers.where)
    return bind(unit, compiled, buffers, Facts()), known


def _split_checks(unit: CompilationUnit, traced: jax.stages.Traced, buffers: Buffers) -> tuple[jax.stages.Traced, jax.stages.Traced] | None:
    with metrics.timed("trace", unit.name), jax.default_device(unit.jax_device):
        return pipeline.PRECHECKS(traced, unit.name, buffers.avals(), buffers.donated)
