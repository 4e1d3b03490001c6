"""A baseline for benchmarks: an engine that traces, lowers and looks up the program at every call, as lazy tensors do."""

from __future__ import annotations

from typing import Any

from ..capture.graph import AtenGraph
from ..config import Options
from ..errors import CompilationError
from ..observe import metrics
from ..passes import pipeline
from ..runtime import eager_fallback, programs
from .compile import bind, compile_lowered, lower, trace
from .executable import Executable
from .program_cache import ProgramCache
from .unit import CompilationUnit


class Retrace:
    """An engine whose runners trace and lower their graph at every call, and look up the compiled program by a hash of the lowered one."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def runner(self, graph: AtenGraph) -> RetracedProgram:
        return RetracedProgram(CompilationUnit(graph, self.options))


class RetracedProgram:
    """The runner of a graph; see `Retrace`."""

    def __init__(self, unit: CompilationUnit) -> None:
        self._boxed_call = True
        self.name, self.unit, self._cache = unit.name, unit, ProgramCache(unit)
        metrics.add("graphs")

    def __call__(self, args: list[Any]) -> list[Any]:
        if eager_fallback.is_being_traced() or eager_fallback.is_needed(args):
            return self.unit.run_by_torch(args)
        with programs.without_outer_frames():
            return self._trace_and_run(args)

    def _trace_and_run(self, args: list[Any]) -> list[Any]:
        unit = self.unit
        specialised = unit.specialise(args)
        if specialised.function is None:
            executable = bind(unit, None, specialised.buffers, specialised.metadata)
            return executable(executable.take(args))
        traced, buffers, metadata = trace(unit, specialised.function, specialised.buffers)
        mesh = buffers.replicated
        if mesh is not None:
            traced = pipeline.SHARDED(traced, self.name, buffers.avals(), buffers.shardings, buffers.donated)
        try:
            lowered = lower(unit, traced)
        except CompilationError as error:
            unit.do_without_refusable(error)
            return self._trace_and_run(args)
        with metrics.timed("lookup"):
            key = (programs.fingerprint(lowered), buffers.facts, metadata, specialised.settings)
            runnable = self._cache.get(key)
        if runnable is None:
            try:
                compiled = compile_lowered(unit, lowered, traced, specialised.settings, mesh=mesh)
            except CompilationError as error:
                unit.do_without_refusable(error)
                return self._trace_and_run(args)
            runnable = bind(unit, compiled, buffers, metadata)
            self._cache.put(key, runnable)
        with metrics.timed("run"):
            return runnable(runnable.take(args))

    def executables(self) -> list[Executable]:
        return self._cache.executables()
