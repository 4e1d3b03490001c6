"""One executable for many sizes. Sizes are rounded up, and the program for the rounded sizes gets padded inputs and the true sizes.

All sizes that are rounded to the same values form a *bucket*.
"""

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
from ..passes.padding.padded_graph import PaddedGraph
from ..runtime import background, eager_fallback, late_checks, private
from ..runtime.cache import LeastRecentlyUsed
from .eager_executable import EagerGraph
from .eager_timings import EagerTimings
from .executable import Executable
from .padded_calls import CallPlan, Fill, PaddedCalls
from .protocol import Engine, Runner
from .unit import FOREGROUND_PROGRAMS
from .xla import CompiledGraph

# In place of a plan: the exact program runs the call, because the sizes cannot be rounded, or because they are among the first
# combinations.
_EXACT, _FIRST = "exact", "first"
# With the option `sizes="auto"`, the first combinations of sizes, up to this number, get exact executables. Later combinations get buckets.
# So nothing is padded if there are few combinations (a smaller last batch, another batch size for evaluation).
EXACT_COMBINATIONS = FOREGROUND_PROGRAMS
# If this many programs of a graph were slower than torch's kernels, and none was faster, no more programs of the graph are compiled.
_MAX_SLOWER = 2


class Bucket:
    """An engine that pads graphs with dynamic sizes (options `sizes="buckets"` and "auto"), and compiles them by another engine.

    Args:
        inner: The engine that compiles the programs.
        options: The options of the compilation.
        fill: Fills the padding of inputs.
    """

    def __init__(self, inner: Engine, options: Options, fill: Fill = torch.Tensor.zero_) -> None:
        self._inner, self._options, self._fill = inner, options, fill

    def runner(self, graph: AtenGraph) -> Runner:
        padded = pipeline.PADDING(graph)
        if isinstance(padded, str):
            level = logging.INFO if self._options.sizes == "auto" else logging.WARNING  # "auto": the user did not ask for buckets
            dump.log.log(level, "%s is compiled for each combination of sizes, without buckets: %s", graph.name, padded)
        if not isinstance(padded, PaddedGraph):
            return self._inner.runner(graph)
        exact_combinations = EXACT_COMBINATIONS if self._options.sizes == "auto" else 0
        return BucketProgram(self._inner, graph, padded, self._options, self._fill, exact_combinations)


class BucketProgram:
    """The runner of a graph whose sizes are rounded up: one program serves all sizes that are rounded to the same values.

    While another thread compiles the program, torch's kernels run the graph with the true sizes. With the option compile="auto", they also
    run a later call if they were measured to be faster for the call's sizes.

    Args:
        engine: Compiles the padded graph. It also compiles the original graph, for sizes that cannot be rounded.
        graph: The original graph.
        padded: The graph for rounded sizes.
        options: The options of the compilation.
        fill: Fills the padding of inputs.
        exact_combinations: The number of first combinations of sizes that get exact executables.
    """

    def __init__(
        self, engine: Engine, graph: AtenGraph, padded: PaddedGraph, options: Options, fill: Fill, exact_combinations: int = 0
    ) -> None:
        self._boxed_call = True
        self.name = graph.name
        self._engine, self._graph, self._padded, self._fill = engine, graph, padded, fill
        self._sizes = Sizes(graph.module.graph.find_nodes(op="placeholder"))
        self._device, self._options = graph_device(graph.module), options
        # By true sizes. A plan is small, so there are 64 times as many as executables.
        self._plans: LeastRecentlyUsed[CallPlan | str] = LeastRecentlyUsed(64 * options.executables)
        self._exact_left = self._exact_combinations = exact_combinations
        # The numbers of programs that were measured to be faster, and slower, than torch's kernels.
        self._faster = self._slower = 0

    @functools.cached_property
    def _padded_runner(self) -> Runner:
        runner = self._engine.runner(dataclasses.replace(self._graph, module=self._padded.module, rederived_outputs=frozenset()))
        if isinstance(runner, CompiledGraph):
            waits = not is_interchangeable(self._graph.module)
            runner.cache.foreground_left = math.inf if waits else max(0, runner.cache.foreground_left - self._exact_combinations)
        return runner

    @functools.cached_property
    def _may_choose_kernels(self) -> bool:
        """True if torch's kernels may run a call although its program is compiled."""
        runner = self._padded_runner
        return self._options.compile == "auto" and isinstance(runner, CompiledGraph) and runner.cache.foreground_left < math.inf

    @functools.cached_property
    def _exact_runner(self) -> Runner:
        return self._engine.runner(self._graph)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if eager_fallback.is_being_traced() or eager_fallback.is_needed(args):
            return self._exact_runner(args)
        key = self._sizes.key(args)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(args)
            self._plans.put(key, plan)
        if isinstance(plan, str):
            if plan is _EXACT:
                metrics.add("exact_sizes")
            return self._exact_runner(args)
        inputs = args.copy()
        args.clear()
        if self._may_choose_kernels:
            return self._run_faster(plan, inputs)
        outputs = self._run_program(plan, inputs)
        return self._run_kernels(plan, inputs, "meanwhile") if outputs is None else outputs

    def _run_faster(self, plan: CallPlan, inputs: Sequence[Any]) -> list[Any]:
        """Returns the graph's outputs, computed by the program or by torch's kernels, whichever is expected to be faster.

        Torch's kernels also run the call if the program is not compiled yet.
        """
        timings, start = plan.timings, time.perf_counter()
        is_timed = not timings.is_complete
        if timings.prefers_kernels(plan.valid_fraction) or (is_timed and self._slower >= _MAX_SLOWER and not self._faster):
            outputs = self._run_kernels(plan, inputs, "by_torch")
            if is_timed and timings.has_program:
                timings.add_kernels(time.perf_counter() - start, plan.valid_fraction)
        else:
            program_outputs = self._run_program(plan, inputs)
            if program_outputs is None:
                return self._run_kernels(plan, inputs, "meanwhile")
            outputs = program_outputs
            if is_timed:
                timings.add_program(time.perf_counter() - start)
        if is_timed and timings.is_complete:
            self._count_program(timings)
        return outputs

    def _count_program(self, timings: EagerTimings) -> None:
        """Counts a program as faster or slower than torch's kernels. Called once for each program, when its timings are complete."""
        self._slower, self._faster = self._slower + timings.program_is_slower, self._faster + (not timings.program_is_slower)
        if self._slower == _MAX_SLOWER and not self._faster:
            dump.log.info("%s: torch's kernels run further sizes, because they were faster than XLA's programs for earlier ones", self.name)

    def _run_program(self, plan: CallPlan, inputs: Sequence[Any]) -> list[Any] | None:
        """Returns the graph's outputs, computed by the program; None if the program is not yet compiled."""
        results = self._program_results(plan, inputs)
        if results is None:
            return None
        with eager_fallback.kernels():
            return plan.crop_results(inputs, results)

    def _program_results(self, plan: CallPlan, inputs: Sequence[Any]) -> Sequence[Any] | None:
        """Returns the program's results, which are padded; None if the program is not yet compiled."""
        executable, runner = None, self._padded_runner
        if isinstance(runner, CompiledGraph) and runner.cache.in_background:
            with eager_fallback.kernels():
                padded = plan.pad_inputs(inputs, self._fill if plan.is_ready else None)
            executable = runner.ready(padded)
            was_ready, plan.is_ready = plan.is_ready, executable is not None
            if executable is None:
                return None
            if was_ready:
                return executable(executable.take(padded))
        with eager_fallback.kernels():
            padded = plan.pad_inputs(inputs, self._fill)
        return runner(padded) if executable is None else executable(executable.take(padded))

    def _run_kernels(self, plan: CallPlan, inputs: Sequence[Any], counter: str) -> list[Any]:
        """Returns the graph's outputs, computed by torch's kernels with the true sizes. Increments a counter of `observe.metrics`."""
        late_checks.raise_if_failed(self._device)
        profiled = torch.profiler.record_function(self.name) if private.is_profiling() else contextlib.nullcontext()
        with profiled, background.eager_call():
            values = dict(zip(self._eager_graph.nodes, self._eager_graph.values(inputs), strict=True))
        metrics.add(counter)
        no_alias_of = [value for value in inputs if isinstance(value, torch.Tensor)] + self._eager_graph.constants
        with eager_fallback.kernels():
            return plan.wrap_values(inputs, [values[node] for node in self._padded.computed], no_alias_of)

    @functools.cached_property
    def _eager_graph(self) -> EagerGraph:
        return EagerGraph(self._graph.module, self._padded.computed)

    @functools.cached_property
    def _padded_calls(self) -> PaddedCalls:
        return PaddedCalls(self._padded, self._device, self._options.executables)

    def executables(self) -> list[Executable]:
        runners = [vars(self)[name] for name in ("_padded_runner", "_exact_runner") if name in vars(self)]
        return [executable for runner in runners for executable in runner.executables()]

    def _make_plan(self, args: Sequence[Any]) -> CallPlan | str:
        """Returns the plan of calls with these sizes; _EXACT or _FIRST if the exact program should run them."""
        if self._exact_left > 0:
            self._exact_left -= 1
            return _FIRST
        return self._padded_calls.plan(self._sizes.values(args)) or _EXACT
