"""The four steps from a graph with concrete sizes to an executable: trace, lower, compile, and bind to tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding

from ..buffers.protocol import Buffers
from ..errors import UnsupportedTensor
from ..lowering import Check, Interpreter, Settings, registry
from ..lowering.function import Function
from ..observe import dump, metrics, rewrites
from ..passes import pipeline
from ..passes.jaxpr.open_layouts import check_closed
from ..passes.jaxpr.transposes import Orders
from ..runtime import meshes, private, programs, streams
from .executable import Executable, compilation_error, execution_error, is_exhausted
from .options import compile_with_cublas_fallback, options_for, quick_options
from .trace_outputs import TracedOutputs, TraceMetadata
from .unit import CompilationUnit


def trace(
    unit: CompilationUnit, function: Function, buffers: Buffers, *, protects_inputs: bool = True
) -> tuple[jax.stages.Traced, Buffers, TraceMetadata]:
    """Traces the program of a graph, as a function from packed arrays to packed arrays.

    Args:
        unit: The graph.
        function: The function to trace.
        buffers: The graph's buffers.
        protects_inputs: True if the program returns the old values of written inputs when a check fails (see `Buffers.protect_inputs`).

    Returns: the traced program, the buffers with the memory orders of its results, and its metadata.
    """

    def program(*arrays: jax.Array) -> TracedOutputs:
        inputs, key = buffers.unpack(arrays)
        results = function(inputs, key)
        code = [Check.first_failed(results.checks)] if results.checks else []
        outputs = (
            buffers.protect_inputs(results.outputs, inputs, code[0], len(results.checks)) if code and protects_inputs else results.outputs
        )
        checks = tuple((check.error, check.message) for check in results.checks)
        return TracedOutputs([*buffers.pack(outputs), *code], TraceMetadata(checks, results.numbers, results.kernels))

    avals = meshes.avals_for_compilation(buffers.avals())
    if buffers.replicated is not None:
        traced, orders = _trace_for_mesh(unit, program, avals, buffers), dict[int, tuple[int, ...]]()
    else:
        traced, orders = trace_graph(
            unit, program, unit.name, avals, unit.interpreter, function.reorders, buffers.free_results, buffers.donated
        )
    metadata = traced.out_info.metadata
    if unit.opens_layouts and (buffers.open_inputs or buffers.free_results):
        traced = pipeline.OPEN_LAYOUTS(traced, unit.name, avals, buffers.open_inputs, buffers.free_results)
    return traced, buffers.with_result_orders(orders), metadata


def _trace_for_mesh(unit: CompilationUnit, run: Any, avals: Sequence[jax.ShapeDtypeStruct], buffers: Buffers) -> jax.stages.Traced:
    """Traces a program for a mesh, using only operations that XLA's partitioner can partition."""
    registry.fill()  # imports the lowerings, which must not happen while JAX traces
    run.__name__ = unit.name
    with metrics.timed("trace", unit.name), jax.enable_x64(True), jax.default_device(unit.jax_device), rewrites.tracing() as report:
        program = jax.jit(pipeline.PARTITIONABLE(run, buffers.free_results), keep_unused=True, donate_argnums=tuple(buffers.donated))
        traced = program.trace(*avals)
        report(len(traced.jaxpr.jaxpr.eqns))
        return traced


def trace_graph(
    unit: CompilationUnit,
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
        unit: The whole graph.
        name: The name of the program.
        avals: The shapes and dtypes of its arguments.
        interpreter: The interpreter of the graph, or of the part that the function evaluates.
        reorders: True if the pass TRANSPOSES (passes/jaxpr/transposes.py) rewrites the program.
        free: The indices of results whose dimensions may have any order in memory.
        donated: The indices of arguments that are donated to the program.

    Returns: the traced program, and the memory orders of its `free` results by index.
    Raises: UnsupportedTensor if a JAX function in the graph reads a tracer of another trace.
    """
    registry.fill()  # imports the lowerings, which must not happen while JAX traces
    run.__name__ = name
    orders: Orders = {}
    with metrics.timed("trace", unit.name), jax.enable_x64(True), jax.default_device(unit.jax_device), rewrites.tracing() as report:
        if reorders:
            run, orders = pipeline.TRANSPOSES(run, unit.platform, free)
        if unit.platform == "cpu" and interpreter.has_bfloat16:
            run = pipeline.BFLOAT16_ROUNDING(run, unit.platform)
        if unit.platform == "tpu":  # XLA:TPU chooses the memory orders of values; a reshape that merges dimensions would fix the order
            run = pipeline.PARTITIONABLE(run)
        traced = jax.jit(run, keep_unused=True, donate_argnums=tuple(donated)).trace(*avals)
        report(len(traced.jaxpr.jaxpr.eqns))
    if len(traced.jaxpr.in_avals) != len(avals):  # JAX turns tracers that a function closes over into extra arguments
        raise UnsupportedTensor(
            f"{name}: a JAX function that it calls by to_torch reads a tracer of another JAX transformation, which has no value",
            hint="do not keep arrays of such a function in globals, closures or caches: return them, and pass them as arguments",
        )
    return traced, orders


def lower(unit: CompilationUnit, traced: jax.stages.Traced) -> jax.stages.Lowered:
    """Lowers the traced program to StableHLO.

    Raises: CompilationError if lowering fails and the program uses an implementation that not every machine supports, such as a Pallas
        kernel; else the original exception.
    """
    with metrics.timed("lower", unit.name), jax.enable_x64(True), jax.default_device(unit.jax_device):
        try:
            return private.lower(traced, unit.platform if meshes.topology() is not None else None)
        except Exception as error:  # Pallas raises errors of many classes for a kernel that Mosaic does not support
            if not unit.choose.refusable:
                raise
            raise compilation_error(unit.name, error) from error


def compile_lowered(
    unit: CompilationUnit,
    lowered: jax.stages.Lowered,
    traced: jax.stages.Traced,
    settings: Settings,
    module: torch.fx.GraphModule | None = None,
    mesh: NamedSharding | None = None,
    processes: Sequence[jax.Device] = (),
    device: jax.Device | None = None,
) -> programs.XlaProgram:
    """Compiles a lowered program, and writes the dump if the options ask for one.

    Args:
        unit: The whole graph.
        lowered: The program as StableHLO.
        traced: The same program as a jaxpr; some XLA options depend on it.
        settings: torch's settings, which the program follows.
        module: The graph that the program computes, for the dump; the whole graph by default.
        mesh: The replicated sharding of the mesh on which the program runs, if any.
        processes: One device of each participating process, for a program with XLA's own collectives.
        device: This process's device; the graph's by default.

    Raises: CompilationError; OutOfMemory.
    """
    options = xla_options(unit, traced, settings, mesh is not None)
    store, heap_is_kept = unit.store("programs"), unit.options.heap == "keep"

    def compile() -> programs.XlaProgram:
        if meshes.topology() is not None:
            return programs.compile_for_inspection(lowered, options)
        target = device or unit.jax_device
        return compile_with_cublas_fallback(
            lambda options: programs.compile_lowered(lowered, target, options, store, heap_is_kept, processes), options
        )

    with metrics.timed("compile", unit.name):
        try:
            try:
                compiled = compile()
            except jax.errors.JaxRuntimeError as error:  # on a GPU, autotuning takes memory
                if not is_exhausted(error) or not streams.give_back_memory(unit.device):
                    raise
                compiled = compile()
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            if is_exhausted(error):
                raise execution_error(unit.name, error) from error
            raise compilation_error(unit.name, error) from error
    dump.record(unit.dump_name(), module or unit.interpreter.module, lowered, compiled.text, unit.options.dump_directory)
    return compiled


def xla_options(unit: CompilationUnit, traced: jax.stages.Traced, settings: Settings, on_mesh: bool = False) -> Mapping[str, Any]:
    """Returns XLA's options for a program, by name. The user's options override dynaxla's."""
    quick = quick_options() if meshes.is_compile_only() and meshes.topology() is None else {}
    return {**options_for(unit.platform, traced.jaxpr, settings, on_mesh), **quick, **unit.options.xla}


def bind(
    unit: CompilationUnit,
    compiled: programs.XlaProgram | None,
    buffers: Buffers,
    metadata: TraceMetadata,
    precheck: programs.XlaProgram | None = None,
    collectives: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
) -> Executable:
    """Binds a compiled program to tensors.

    Args:
        unit: The graph.
        compiled: The program; None if there is nothing to compute.
        buffers: The graph's buffers, with the memory orders of the results.
        metadata: The metadata of the trace.
        precheck: The program of the checks, if the checks are a separate program that runs first.
        collectives: For a program with XLA's own collectives: creates the context manager in which each call runs.
    """
    if compiled is not None and unit.opens_layouts and (buffers.open_inputs or buffers.free_results):
        argument_orders, result_orders = compiled.orders()
        check_closed(argument_orders, buffers.open_inputs)
        check_closed(result_orders, buffers.free_results)
        if buffers.open_inputs:
            unit.open_inputs.orders = {position: argument_orders[index] for index, position in buffers.open_inputs.items()}
            buffers = buffers.with_input_orders(argument_orders)
    return Executable(
        unit.name,
        compiled,
        buffers.bind(metadata.numbers),
        metadata.checks,
        has_side_effects=bool(metadata.kernels) or collectives is not None,
        precheck=precheck,
        collectives=collectives or contextlib.nullcontext,
    )
