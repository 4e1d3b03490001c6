"""Finds the program of an earlier trace of an equal graph, by the record of that trace (see records.py), and stores such records."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch

from ..buffers.protocol import Buffers
from ..capture.graph_text import graph_text
from ..lowering import Settings
from ..lowering.function import Function
from ..observe import dump, metrics
from ..runtime import programs
from . import records
from .compile import bind, xla_options
from .executable import Executable
from .trace_outputs import TraceMetadata
from .unit import CompilationUnit, SpecialisedGraph

# The programs of this process that have a record and are still in use, by (record key, device, option heap). So equal graphs share one
# program: layers that are compiled one by one, a second bucket of DistributedDataParallel, a notebook cell that runs again.
_live_programs: weakref.WeakValueDictionary[tuple[str, jax.Device, str], programs.XlaProgram] = weakref.WeakValueDictionary()


def graph_key(unit: CompilationUnit, specialised: SpecialisedGraph, function: Function) -> str | None:
    """Returns the key of the whole graph's record; see `record_key`."""
    key_parts = "graph", unit.has_blocks, specialised.buffers.facts
    return record_key(unit, unit.interpreter.module, specialised.settings, function, specialised.buffers.avals(), key_parts)


def record_key(
    unit: CompilationUnit,
    module: torch.fx.GraphModule,
    settings: Settings,
    function: Function,
    avals: Sequence[jax.ShapeDtypeStruct],
    key_parts: Sequence[Any],
) -> str | None:
    """Returns the key of the record of a graph, or of a segment of a graph; None if it has no record.

    Only graphs on the CPU with static sizes and without XLA's own collectives have records, and only if there is a store. There are no
    records with a dump, a debug log or the option `tune`, because these need a new trace.

    Args:
        unit: The graph.
        module: The graph's module, or that of a segment.
        settings: torch's settings.
        function: The function to trace.
        avals: The shapes and dtypes of the program's arguments.
        key_parts: All other values that the program or its calling convention depends on, as plain data.
    """
    is_dumped = unit.options.dump is not None or dump.log.isEnabledFor(logging.DEBUG)
    if unit.platform != "cpu" or unit.groups or not unit.sizes.is_static or is_dumped or unit.options.tune or unit.store("records") is None:
        return None
    arguments = [(aval.shape, str(aval.dtype)) for aval in avals]
    parts = unit.options.facts, unit.phase, unit.choose.avoids_refusable, *settings, function.default_dtype, arguments, *key_parts
    return records.key_of(graph_text(module), unit.jax_device, parts)


def stored_executable(unit: CompilationUnit, specialised: SpecialisedGraph) -> Executable | None:
    """Returns the executable for these sizes if the stores have its compiled program, so that XLA need not compile; else None."""
    if specialised.function is None or (key := graph_key(unit, specialised, specialised.function)) is None:
        return None
    with programs.without_outer_frames():
        return load_recorded_executable(unit, key, specialised.buffers, only_stored=True)


def load_recorded_executable(unit: CompilationUnit, key: str, buffers: Buffers, *, only_stored: bool = False) -> Executable | None:
    """Returns an executable with the program of a record; None if there is no such record.

    Args:
        unit: The graph.
        key: The record's key.
        buffers: The graph's buffers.
        only_stored: True to return None if XLA would have to compile the program again.
    """
    recorded = load_recorded(unit, key, only_stored=only_stored)
    if recorded is None:
        return None
    compiled, record = recorded
    unit.interpreter.count_lowered([*buffers.nodes, *buffers.numbers])
    return bind(unit, compiled, buffers.with_result_orders(record.orders), TraceMetadata(tuple(record.checks), record.numbers))


def load_recorded(
    unit: CompilationUnit, key: str | None, *, only_stored: bool = False
) -> tuple[programs.XlaProgram, records.Record] | None:
    """Returns the program and the record with this key; None if there is no such record, or its program cannot be loaded.

    Args:
        unit: The graph.
        key: The record's key; None if the graph has no record.
        only_stored: True to return None if XLA would have to compile the program again.
    """
    record_store, store = unit.store("records"), unit.store("programs")
    if key is None or record_store is None or store is None or (record := records.Record.find(record_store, key)) is None:
        return None
    live_key = key, unit.jax_device, unit.options.heap
    compiled = _live_programs.get(live_key)
    if compiled is None and only_stored and not programs.is_stored(record.reference):
        return None
    if compiled is None:
        # If XLA refuses the program, the caller builds a new one without the record.
        with metrics.timed("compile", unit.name), contextlib.suppress(jax.errors.JaxRuntimeError):
            compiled = programs.from_reference(record.reference, unit.jax_device, record.options, store, unit.options.heap == "keep")
    if compiled is None:
        return None
    _live_programs[live_key] = compiled
    metrics.add("recalls")
    return compiled, record


def record(
    unit: CompilationUnit,
    key: str | None,
    lowered: jax.stages.Lowered,
    compiled: programs.XlaProgram,
    traced: jax.stages.Traced,
    settings: Settings,
    metadata: TraceMetadata,
    orders: Mapping[int, tuple[int, ...]],
) -> None:
    """Stores the record of a trace. It does nothing without a key, and for a program that calls torch's kernels.

    Args:
        unit: The graph.
        key: The record's key; None if the graph has no record.
        lowered: The program as StableHLO.
        compiled: The compiled program.
        traced: The program as a jaxpr.
        settings: torch's settings, which the program follows.
        metadata: The metadata of the trace.
        orders: The memory orders of free results (see `Buffers.with_result_orders`).
    """
    store, options = unit.store("records"), xla_options(unit, traced, settings)
    if key is None or store is None or metadata.kernels:
        return
    reference = programs.reference_to(lowered, unit.jax_device, options)
    if reference is not None:
        _live_programs[key, unit.jax_device, unit.options.heap] = compiled
        records.Record(options, metadata.checks, metadata.numbers, metadata.draws, orders, reference).put(store, key)
