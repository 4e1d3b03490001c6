"""Chooses how a graph with concrete sizes runs: by torch's kernels, by a stored program, or by a newly compiled one."""

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
from ..lowering import Interpreter, SymbolValues, dtypes
from ..lowering.context import Context
from ..lowering.cpu import unfusable_graphs
from ..lowering.xla_collectives import calls_in
from ..observe import events, metrics, rewrites
from ..passes import pipeline
from ..runtime import heap, meshes, process_networks, programs
from .blocks import compile_blocks
from .compile import bind, compile_lowered, lower, trace
from .eager_executable import EagerExecutable, EagerGraph
from .executable import Executable
from .stored import graph_key, load_recorded_executable, record
from .trace_outputs import TraceMetadata
from .unit import CompilationUnit, SpecialisedGraph

Runnable = Executable | EagerExecutable

# A compilation that takes longer than this, in seconds, leaves hundreds of megabytes of free memory in the C library's heap. The memory is
# then returned to the system.
SLOW_COMPILATION = 0.5


def make_runnable(unit: CompilationUnit, specialised: SpecialisedGraph) -> Runnable:
    """Returns the graph's executable: that of `eager_executable` if there is one, else that of `build`."""
    return eager_executable(unit, specialised) or build(unit, specialised)


def build(unit: CompilationUnit, specialised: SpecialisedGraph) -> Executable:
    """Returns an XLA executable of the graph: from the stores if they have its program, else newly traced, lowered and compiled."""
    start = time.perf_counter()
    dumping = rewrites.dumping_to(unit.options.dump_directory, unit.name)
    with programs.without_outer_frames(), building_events(unit.name, unit.interpreter, specialised.symbols) as built, dumping:
        executable = _build(unit, specialised)
        built.append(executable)
    if time.perf_counter() - start > SLOW_COMPILATION and unit.options.heap == "keep":
        heap.return_freed_memory()
    return executable


def eager_executable(unit: CompilationUnit, specialised: SpecialisedGraph) -> EagerExecutable | None:
    """Returns an executable that calls torch's kernels if XLA would not be faster than they are, else None."""
    if specialised.function is None or unit.device_kind is not None or unit.platform != "cpu" or not unit.may_run_eagerly:
        return None
    ctx = Context(unit.platform, specialised.settings, specialised.symbols, choose=unit.choose)
    outputs = [*specialised.buffers.nodes, *specialised.buffers.numbers]
    needed = unit.interpreter.needed(outputs)
    with building_events(unit.name, unit.interpreter, specialised.symbols) as built:
        if not unfusable_graphs.is_for_torch([node for node in unit.interpreter.module.graph.nodes if node in needed], ctx):
            return None
        specs = [specialised.symbols.spec(node.meta["val"]) for node in specialised.buffers.nodes]
        if unit.options.heap == "keep" and sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs) >= heap.LARGE_BYTES:
            heap.keep_freed_memory()
        executable = EagerExecutable(unit.name, EagerGraph(unit.interpreter.module, outputs), specialised.buffers, unit.device)
        built.append(executable)
        return executable


@contextlib.contextmanager
def building_events(name: str, interpreter: Interpreter, symbols: SymbolValues) -> Iterator[list[Runnable]]:
    """Emits `CompileStarted` on entry and `CompileEnded` on exit.

    Args:
        name: The graph's name.
        interpreter: The graph's interpreter.
        symbols: The values of its size symbols.

    Yields: an empty list. `CompileEnded` reports the runnable that the caller has appended to the list, if any.
    """
    built: list[Runnable] = []
    if not events.has_listeners():
        yield built
        return
    events.emit(events.CompileStarted(name, interpreter, symbols))
    try:
        yield built
    finally:
        events.emit(events.CompileEnded(name, built[0] if built else None))


def _build(unit: CompilationUnit, specialised: SpecialisedGraph) -> Executable:
    if specialised.function is None:
        return bind(unit, None, specialised.buffers, specialised.metadata)
    with dtypes.defaulting_to(specialised.function.default_dtype):
        blocks = compile_blocks(unit, specialised)
    if blocks is not None:
        return bind(unit, *blocks)
    key = graph_key(unit, specialised, specialised.function)
    if key is not None and (recorded := load_recorded_executable(unit, key, specialised.buffers)) is not None:
        return recorded
    donated = specialised.buffers.donated
    # A program returns the old values of its inputs if a check fails. For a program that overwrites donated inputs this would need copies,
    # so its checks become a separate program, which runs first, and the call waits for it. Where checks are reported late, no call may
    # wait.
    protects_inputs = not donated or unit.reports_late
    traced, buffers, metadata = trace(unit, specialised.function, specialised.buffers, protects_inputs=protects_inputs)
    checks = None
    if not protects_inputs and metadata.checks:
        split = _split_checks(unit, traced, buffers)
        if split is None:
            traced, buffers, metadata = trace(unit, specialised.function, specialised.buffers)
        else:
            checks, traced = split
    mesh = buffers.replicated
    if mesh is not None:
        traced = pipeline.SHARDED(traced, unit.name, buffers.avals(), buffers.shardings, donated)
    if specialised.participants is not None and specialised.participants.calls:
        return _build_for_processes(unit, specialised, specialised.participants, traced, buffers, metadata)
    try:
        lowered = lower(unit, traced)
        precheck = None if checks is None else compile_lowered(unit, lower(unit, checks), checks, specialised.settings, mesh=mesh)
        compiled = compile_lowered(unit, lowered, traced, specialised.settings, mesh=mesh)
    except CompilationError as error:
        unit.do_without_refusable(error)
        return _build(unit, specialised)
    record(unit, key, lowered, compiled, traced, specialised.settings, metadata, buffers.orders)
    return bind(unit, compiled, buffers, metadata, precheck)


def _build_for_processes(
    unit: CompilationUnit,
    specialised: SpecialisedGraph,
    participants: process_networks.Participants,
    traced: jax.stages.Traced,
    buffers: Buffers,
    metadata: TraceMetadata,
) -> Executable:
    """Builds an executable with collectives that XLA itself executes.

    Args:
        unit: The graph.
        specialised: The graph with concrete sizes.
        participants: The processes of the collectives.
        traced: The traced program.
        buffers: The graph's buffers, with the memory orders of the results.
        metadata: The metadata of the trace.

    Raises: CollectiveMismatch; CollectiveFailed; CompilationError.
    """
    network = participants.connected()
    compiled = compile_lowered(unit, lower(unit, traced), traced, specialised.settings, processes=network.devices, device=network.device)
    calls = calls_in(compiled.text())
    if calls != participants.calls and not participants.keeps_collectives:  # XLA removes collectives that no result depends on
        participants.keeps_collectives = True
        return _build(unit, specialised)
    if calls != participants.calls:
        raise CompilationError(
            f"XLA has changed the collectives of {unit.name}, and processes could wait for one another: the graph has "
            f"{participants.calls}, the compiled program {calls}",
            hint="use options={'distributed': 'torch'}, which leaves collectives to torch",
        )
    assert isinstance(buffers, NativeBuffers)
    collectives = functools.partial(participants.collectives.running, network.shut_down)
    return bind(unit, compiled, buffers.on(network.device), metadata, collectives=collectives)


def compile_for_planning(
    unit: CompilationUnit, specialised: SpecialisedGraph, traced: jax.stages.Traced | None
) -> tuple[Executable, jax.stages.Traced]:
    """Compiles a graph for a virtual mesh, for inspection only: the executable has no checks.

    Args:
        unit: The graph.
        specialised: The graph with concrete sizes and with planned shardings of its inputs.
        traced: The traced program that an earlier call of this function returned, for other shardings of the same inputs; None to trace
            now.

    Returns: the executable, and the traced program (without shardings).
    """
    assert specialised.function is not None
    buffers = specialised.buffers
    if traced is None:
        traced, _, metadata = trace(unit, specialised.function, buffers, protects_inputs=not buffers.donated)
        if buffers.donated and metadata.checks:
            split = _split_checks(unit, traced, buffers)
            traced = trace(unit, specialised.function, buffers)[0] if split is None else split[1]
    sharded = pipeline.SHARDED(traced, unit.name, buffers.avals(), buffers.shardings, buffers.donated)
    compiled = compile_lowered(unit, lower(unit, sharded), sharded, specialised.settings, mesh=buffers.replicated)
    return bind(unit, compiled, buffers, TraceMetadata()), traced


def _split_checks(unit: CompilationUnit, traced: jax.stages.Traced, buffers: Buffers) -> tuple[jax.stages.Traced, jax.stages.Traced] | None:
    """Splits a program in two: the checks, and the computation without checks. None if the checks need an expensive part of it."""
    with metrics.timed("trace", unit.name), jax.default_device(unit.jax_device):
        return pipeline.PRECHECKS(traced, unit.name, meshes.avals_for_compilation(buffers.avals()), buffers.donated)
