"""A baseline for benchmarks: it does the work of lazy tensors at every call."""

from __future__ import annotations

from typing import Any

from ..capture.graph import AtenGraph
from ..config import Options
from ..errors import CompilationError
from ..observe import metrics
from ..passes import pipeline
from ..runtime import by_torch, programs
from .xla import Program


class Retrace:
    """An engine whose runners trace and lower their graph at every call, and find the compiled program by the lowered program's hash."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def runner(self, graph: AtenGraph) -> RetracedProgram:
        return RetracedProgram(graph, self.options)


class RetracedProgram(Program):
    """The runner of a graph; see `Retrace`."""

    def __call__(self, args: list[Any]) -> list[Any]:
        if by_torch.is_looked_at() or by_torch.is_needed(args):
            return self.run_by_torch(args)
        with programs.below_caller():
            return self._trace_and_run(args)

    def _trace_and_run(self, args: list[Any]) -> list[Any]:
        specialised = self.specialise(args)
        if specialised.function is None:
            executable = self.executable(None, specialised.buffers, specialised.facts)
            return executable(executable.take(args))
        traced, buffers, facts = self.trace(specialised.function, specialised.buffers)
        where = buffers.where
        if where is not None:
            traced = pipeline.SHARDED(traced, self.name, buffers.avals(), buffers.shardings, buffers.donated)
        lowered = self.lower(traced)
        with metrics.timed("lookup"):
            key = (programs.fingerprint(lowered), buffers.facts, facts, specialised.settings)
            found = self._executables.get(key)
        if found is None:
            try:
                compiled = self.compile(lowered, traced, specialised.settings, where=where)
            except CompilationError as error:
                self.do_without_refusable(error)
                return self._trace_and_run(args)
            found = self.executable(compiled, buffers, facts)
            self._executables.put(key, found)
        with metrics.timed("run"):
            return found(found.take(args))
