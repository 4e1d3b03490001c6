"""One executable for many sizes: sizes are rounded up, and the program for the rounded sizes gets padded inputs and the true sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..capture.graph import AtenGraph, graph_device
from ..capture.inputs import Sizes
from ..config import Options
from ..lowering.torch_equivalence import is_interchangeable
from ..observe import dump, metrics
from ..passes import pipeline
from ..passes.padding.padded_graph import Padded
from ..runtime import background, eager_fallback, late_checks, private
from ..runtime.cache import LeastRecentlyUsed
from .eager_executable import Kernels
from .executable import Executable
from .padded_calls import CallPlan, Fill, PaddedCalls
from .protocol import Engine, Runner
from .race import Race
from .unit import AWAITED
from .xla import Program

_EXACT, _FIRST = "exact", "first"
# The number of combinations of sizes that get exact executables before others get buckets, with the option `sizes="auto"`. With few
# combinations (a smaller last batch, another batch size for evaluation) nothing is padded.
FIRST = AWAITED
# The number of programs that are slower than torch's kernels after which no more are compiled, if none has been faster.
_ENOUGH = 2


class Bucket:
    """An engine for graphs with dynamic sizes (options `sizes="buckets"` and "auto"). Programs of the inner engine run with rounded sizes.

    Args:
        inner: The engine of the programs.
        options: The options of the compilation.
        fill: Fills the padding of inputs.
    """

    def __init__(self, inner: Engine, options: Options, fill: Fill = torch.Tensor.zero_) -> None:
        self._inner, self._options, self._fill = inner, options, fill

    def runner(self, graph: AtenGraph) -> Runner:
        padded = pipeline.PADDING(graph)
        if isinstance(padded, str):
            level = logging.INFO if self._options.sizes == "auto" else logging.WARNING  # with "auto" the user has not asked for buckets
            dump.log.log(level, "%s is compiled for each combination of sizes, without buckets: %s", graph.name, padded)
        if not isinstance(padded, Padded):
            return self._inner.runner(graph)
        first = FIRST if self._options.sizes == "auto" else 0
        return BucketProgram(self._inner, graph, padded, self._options, self._fill, first)


class BucketProgram:
    """The runner of a graph whose sizes are rounded up: one program serves all sizes that are rounded to the same values.

    While another thread compiles the program, torch's kernels run the graph itself with its true sizes. With the option compile="auto",
    they also run it afterwards if they have been measured to be faster for a call's sizes.

    Args:
        engine: Compiles the padded graph, and the graph itself for exact sizes, which runs where an assumption on sizes does not hold for
            the rounded ones.
        graph: The graph.
        padded: The graph for rounded sizes.
        options: The options of the compilation. The plans of calls are remembered for 64 times as many combinations of true sizes as there
            are executables.
        fill: Fills the padding of inputs.
        first: The number of combinations of sizes that get exact executables before others get buckets.
    """

    def __init__(self, engine: Engine, graph: AtenGraph, padded: Padded, options: Options, fill: Fill, first: int = 0) -> None:
        self._boxed_call = True
        self.name = graph.name
        self._engine, self._graph, self._padded, self._fill = engine, graph, padded, fill
        self._sizes = Sizes(graph.module.graph.find_nodes(op="placeholder"))
        self._device, self._options = graph_device(graph.module), options
        self._calls: LeastRecentlyUsed[CallPlan | str] = LeastRecentlyUsed(64 * options.executables)
        self._first = self._exact_sizes = first
        self._won = self._lost = 0  # decided races

    @functools.cached_property
    def _run(self) -> Runner:
        run = self._engine.runner(dataclasses.replace(self._graph, module=self._padded.module, rederived_outputs=frozenset()))
        if isinstance(run, Program):
            waits = not is_interchangeable(self._graph.module)
            run.cache.awaited = math.inf if waits else max(0, run.cache.awaited - self._exact_sizes)
        return run

    @functools.cached_property
    def _may_choose(self) -> bool:
        """True if torch's kernels may run calls although the program is compiled."""
        return self._options.compile == "auto" and isinstance(self._run, Program) and self._run.cache.awaited < math.inf

    @functools.cached_property
    def _exact(self) -> Runner:
        return self._engine.runner(self._graph)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if eager_fallback.is_being_traced() or eager_fallback.is_needed(args):
            return self._exact(args)
        key = self._sizes.key(args)
        call = self._calls.get(key)
        if call is None:
            call = self._prepare(args)
            self._calls.put(key, call)
        if isinstance(call, str):
            if call is _EXACT:
                metrics.add("exact_sizes")
            return self._exact(args)
        given = args.copy()
        args.clear()
        if self._may_choose:
            return self._by_faster(call, given)
        outputs = self._by_program(call, given)
        return self._by_kernels(call, given, "meanwhile") if outputs is None else outputs

    def _by_faster(self, call: CallPlan, given: Sequence[Any]) -> list[Any]:
        """Returns the graph's outputs, computed by the program if it is compiled and expected to be faster than torch's kernels."""
        race, start = call.race, time.perf_counter()
        is_open = not race.is_decided
        if race.prefers_kernels(call.share) or (is_open and self._lost >= _ENOUGH and not self._won):
            outputs = self._by_kernels(call, given, "by_torch")
            if is_open and race.has_begun:
                race.add_kernels(time.perf_counter() - start, call.share)
        else:
            found = self._by_program(call, given)
            if found is None:
                return self._by_kernels(call, given, "meanwhile")
            outputs = found
            if is_open:
                race.add_program(time.perf_counter() - start)
        if is_open and race.is_decided:
            self._note(race)
        return outputs

    def _note(self, race: Race) -> None:
        """Counts a race that has just been decided."""
        self._lost, self._won = self._lost + race.is_lost, self._won + (not race.is_lost)
        if self._lost == _ENOUGH and not self._won:
            dump.log.info("%s: torch's kernels run further sizes, because they were faster than XLA's programs for earlier ones", self.name)

    def _by_program(self, call: CallPlan, given: Sequence[Any]) -> list[Any] | None:
        """Returns the graph's outputs, computed by the program; None if it is not yet compiled."""
        results = self._results(call, given)
        if results is None:
            return None
        with eager_fallback.kernels():
            return call.cut(given, results)

    def _results(self, call: CallPlan, given: Sequence[Any]) -> Sequence[Any] | None:
        """Returns the program's results; None if it is not yet compiled."""
        executable, run = None, self._run
        if isinstance(run, Program) and run.cache.in_background:
            with eager_fallback.kernels():
                padded = call.padded(given, self._fill if call.is_ready else None)
            executable = run.ready(padded)
            was_ready, call.is_ready = call.is_ready, executable is not None
            if executable is None:
                return None
            if was_ready:
                return executable(executable.take(padded))
        with eager_fallback.kernels():
            padded = call.padded(given, self._fill)
        return run(padded) if executable is None else executable(executable.take(padded))

    def _by_kernels(self, call: CallPlan, given: Sequence[Any], counter: str) -> list[Any]:
        """Returns the graph's outputs, computed by torch's kernels, and counts the call."""
        late_checks.look(self._device)
        profiled = torch.profiler.record_function(self.name) if private.is_profiling() else contextlib.nullcontext()
        with profiled, background.in_its_place():
            values = dict(zip(self._kernels.nodes, self._kernels.values(given), strict=True))
        metrics.add(counter)
        others = [value for value in given if isinstance(value, torch.Tensor)] + self._kernels.constants
        with eager_fallback.kernels():
            return call.exact(given, [values[node] for node in self._padded.computed], others)

    @functools.cached_property
    def _kernels(self) -> Kernels:
        return Kernels(self._graph.module, self._padded.computed)

    @functools.cached_property
    def _padded_calls(self) -> PaddedCalls:
        return PaddedCalls(self._padded, self._device, self._options.executables)

    def executables(self) -> list[Executable]:
        runners = [vars(self)[name] for name in ("_run", "_exact") if name in vars(self)]
        return [executable for runner in runners for executable in runner.executables()]

    def _prepare(self, args: Sequence[Any]) -> CallPlan | str:
        """Plans calls with these sizes. Returns _EXACT if the sizes cannot be rounded, _FIRST for the first combinations of sizes."""
        if self._first > 0:
            self._first -= 1
            return _FIRST
        return self._padded_calls.plan(self._sizes.values(args)) or _EXACT
