"""Programs that an earlier trace of an equal graph has made: records of traces, and the executables of these."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch

from ..buffers.protocol import Buffers
from ..capture.fingerprint import fingerprint
from ..lowering import Settings
from ..lowering.function import Function
from ..observe import dump, metrics
from ..runtime import programs
from . import records
from .compile import bind, xla_options
from .executable import Executable
from .facts import Facts
from .unit import CompilationUnit, Specialised

# Live programs by record key, device and heap option. Equal graphs share one program: layers that are compiled one by one, a second bucket
# of DistributedDataParallel, a notebook cell that runs again.
_still_there: weakref.WeakValueDictionary[tuple[str, jax.Device, str], programs.XlaProgram] = weakref.WeakValueDictionary()


def graph_key(unit: CompilationUnit, specialised: Specialised, function: Function) -> str | None:
    """Returns the key of the whole graph's record; see `record_key`."""
    facts = "graph", unit.has_blocks, specialised.buffers.facts
    return record_key(unit, unit.interpreter.module, specialised.settings, function, specialised.buffers.avals(), facts)


def record_key(
    unit: CompilationUnit,
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
    seen = unit.options.dump is not None or dump.log.isEnabledFor(logging.DEBUG)
    if unit.platform != "cpu" or unit.groups or not unit.sizes.is_static or seen or unit.options.tune or unit.store("records") is None:
        return None
    taken = [(aval.shape, str(aval.dtype)) for aval in avals]
    known = unit.options.facts, unit.phase, unit.choose.avoids_refusable, *settings, function.default_dtype, taken, *facts
    return records.key_of(fingerprint(module), unit.jax_device, known)


def stored_executable(unit: CompilationUnit, specialised: Specialised) -> Executable | None:
    """Returns the executable for these sizes if the stores hold its compiled program; else None."""
    if specialised.function is None or (key := graph_key(unit, specialised, specialised.function)) is None:
        return None
    with programs.below_caller():
        return recalled_executable(unit, key, specialised.buffers, only_stored=True)


def recalled_executable(unit: CompilationUnit, key: str, buffers: Buffers, *, only_stored: bool = False) -> Executable | None:
    """Returns the executable of a record, if there is one.

    only_stored: If true, return None where XLA would have to compile the program again.
    """
    found = recalled(unit, key, only_stored=only_stored)
    if found is None:
        return None
    compiled, record = found
    unit.interpreter.count_lowered([*buffers.nodes, *buffers.numbers])
    return bind(unit, compiled, buffers.ordered(record.orders), Facts(tuple(record.checks), record.numbers))


def recalled(unit: CompilationUnit, key: str | None, *, only_stored: bool = False) -> tuple[programs.XlaProgram, records.Record] | None:
    """Returns the program of a record, and the record, if there is one.

    only_stored: If true, return None where XLA would have to compile the program again.
    """
    kept, store = unit.store("records"), unit.store("programs")
    if key is None or kept is None or store is None or (record := records.Record.find(kept, key)) is None:
        return None
    place = key, unit.jax_device, unit.options.heap
    compiled = _still_there.get(place)
    if compiled is None and only_stored and not programs.is_stored(record.note):
        return None
    if compiled is None:
        with metrics.timed("compile", unit.name), contextlib.suppress(jax.errors.JaxRuntimeError):  # on failure: build without the record
            compiled = programs.from_note(record.note, unit.jax_device, record.options, store, unit.options.heap == "keep")
    if compiled is None:
        return None
    _still_there[place] = compiled
    metrics.add("recalls")
    return compiled, record


def record(
    unit: CompilationUnit,
    key: str | None,
    lowered: jax.stages.Lowered,
    compiled: programs.XlaProgram,
    traced: jax.stages.Traced,
    settings: Settings,
    facts: Facts,
    orders: Mapping[int, tuple[int, ...]],
) -> None:
    """Stores the result of a trace under the key, if there is one and the program calls no torch kernels."""
    store, options = unit.store("records"), xla_options(unit, traced, settings)
    if key is None or store is None or facts.kernels:
        return
    note = programs.note(lowered, unit.jax_device, options)
    if note is not None:
        _still_there[key, unit.jax_device, unit.options.heap] = compiled
        records.Record(options, facts.checks, facts.numbers, facts.draws, orders, note).put(store, key)
