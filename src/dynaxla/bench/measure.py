"""The measurements: every engine of a model is prepared and checked, then all engines are timed in turns.

The engines take turns because a machine's speed drifts, and because the state that an engine leaves behind (caches, clocks) should not
always affect the same next engine. In each round, each engine makes one untimed call to warm up, and `iterations_per_run` timed calls. From
round to round the order of the engines rotates by one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..autoselect.agreement import NumericalAgreement, compare, perturbed_results, results_in_float64, worst
from ..observe import metrics
from . import capture
from .engines import BenchEngine
from .runner import AddedMemory, BenchRunner, Inputs, LocalRunner, ModelSetup, first_line, release_memory, with_empty_caches
from .suites import BenchCase
from .training import TrainingStep

MINIMUM_ROUNDS = 3
MAXIMUM_ROUNDS = 100
# TorchDynamo keeps the compiled code of all engines under one function, and by default stops compiling after 8 versions.
RECOMPILE_LIMIT = 256


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a measurement.

    Attributes:
        setup: the setup of models and inputs.
        iterations_per_run: the number of calls that are timed together.
        randomize_input: True for new values at each call, instead of one input.
        baseline: the engine whose speedup is 1.00.
        rounds: the number of rounds; None to use `seconds`.
        seconds: the approximate seconds for which each engine of a model is timed.
        memory: a function that measures the memory of an engine for a case; None if memory is not measured.
        traceback: True to print the tracebacks of failures.
        amortized: the number of calls that are also timed with one synchronization at their end; 0 for none.
        before_rounds: called after the first calls, before the timing.
    """

    setup: ModelSetup = field(default_factory=ModelSetup)
    iterations_per_run: int = 1
    randomize_input: bool = False
    baseline: str = "eager"
    rounds: int | None = None
    seconds: float = 3.0
    memory: Callable[[BenchEngine, BenchCase, ModelSetup, Sequence[Inputs]], AddedMemory] | None = None
    traceback: bool = False
    amortized: int = 0
    before_rounds: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Spread:
    """Milliseconds per call over the rounds: the median, and the lower and upper quartiles."""

    median: float
    lower: float
    upper: float

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        if len(samples) < 2:
            return Spread(samples[0], samples[0], samples[0])
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(median, lower, upper)


@dataclass
class EngineResult:
    """The results of one engine on one model. Values that could not be measured are None.

    Attributes:
        model: the model's name.
        engine: the engine's name.
        failure: the reason why the engine failed, or "".
        first_call_seconds: wall time of the first call.
        first_phases: seconds of dynaxla's phases in the first call.
        call_phases: mean milliseconds of these phases in a timed call.
        traces: the number of traces of graphs in all timed calls together.
        compilations: the number of compilations of programs in all timed calls together.
        recorded_ops: the mean number of ops that lazy mode records in a timed call.
        wall: wall time per call.
        cpu: CPU time per call.
        wall_samples: the wall time per call in each round, in milliseconds.
        cpu_samples: the CPU time per call in each round, in milliseconds.
        amortized: wall time per call of several calls that share one synchronization (`BenchSettings.amortized`).
        amortized_samples: the wall time per such call in each round, in milliseconds.
        speedup: the speedup over the baseline.
        agreement: the comparison of the results with eager mode.
        memory: the engine's memory.
    """

    model: str
    engine: str
    failure: str = ""
    first_call_seconds: float | None = None
    first_phases: dict[str, float] = field(default_factory=dict)
    call_phases: dict[str, float] = field(default_factory=dict)
    traces: int = 0
    compilations: int = 0
    recorded_ops: float = 0.0
    wall: Spread | None = None
    cpu: Spread | None = None
    wall_samples: list[float] = field(default_factory=list)
    cpu_samples: list[float] = field(default_factory=list)
    amortized: Spread | None = None
    amortized_samples: list[float] = field(default_factory=list)
    speedup: float | None = None
    agreement: NumericalAgreement | None = None
    memory: AddedMemory | None = None

    @property
    def agrees(self) -> bool:
        """True if the engine did not fail, and its results agree with eager mode."""
        return not self.failure and self.agreement is not None and self.agreement.agrees


@dataclass
class ModelResult:
    """The results of one model.

    Attributes:
        model: the model's name.
        rows: a row for each engine.
        captured: the counts of the model's capture; None in training, or if counting failed.
        capture_failure: the reason why counting failed, or "".
    """

    model: str
    rows: list[EngineResult]
    captured: capture.Capture | None = None
    capture_failure: str = ""


class BenchProgress(Protocol):
    """Shows the current activity, and the number of finished steps of a model."""

    def begin(self, model: str, steps: int) -> None: ...

    def step(self, text: str, steps: float = 1) -> None: ...


class NoProgress:
    """A `BenchProgress` that shows nothing."""

    def begin(self, model: str, steps: int) -> None:
        pass

    def step(self, text: str, steps: float = 1) -> None:
        pass


# The number of steps of a progress bar for all rounds of a model. Each engine's first call is one step.
ROUND_STEPS = 5


def measure(case: BenchCase, engines: Sequence[BenchEngine], settings: BenchSettings, progress: BenchProgress | None = None) -> ModelResult:
    """Measures one model in all engines. The row of a failing engine has its failure.

    Raises: exceptions of a model that cannot be built.
    """
    progress = progress or NoProgress()
    progress.begin(case.name, 2 + len(engines) * (2 if settings.memory else 1) + ROUND_STEPS)
    generator = torch.Generator().manual_seed(settings.setup.seed + 1)
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(
            recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True
        ),
    ):
        try:
            return _Measurement(case, settings, generator, progress).run(engines)
        finally:
            torch._dynamo.reset()
            jax.clear_caches()
            release_memory()


class _Measurement:
    """The measurement of one model by `run`, with eager mode's results for comparison."""

    def __init__(self, case: BenchCase, settings: BenchSettings, generator: torch.Generator, progress: BenchProgress) -> None:
        self.case, self.settings, self.generator, self.progress = case, settings, generator, progress
        progress.step("building")
        self.model = settings.setup.model(case)
        self.eager_model = self.model if settings.setup.eager_setup is settings.setup else settings.setup.eager_setup.model(case)
        # The second input is for a check after the timing: programs compiled for the first input must be right for the second, too.
        self.inputs = [self._new_inputs(), self._new_inputs()]
        self.expected: list[Any] = []
        self.reference: list[Any] | None = None
        self.perturbed: list[list[Any]] = [[], []]

    def _new_inputs(self) -> Inputs:
        return self.settings.setup.inputs(self.case, self.generator)

    def run(self, engines: Sequence[BenchEngine]) -> ModelResult:
        rows = {engine.name: EngineResult(self.case.name, engine.name) for engine in engines}
        result = ModelResult(self.case.name, list(rows.values()))
        eager_inputs = [tuple(tensor.to(self.settings.setup.eager_setup.device) for tensor in args) for args in self.inputs]
        try:
            self.expected = [pytree.tree_map_only(torch.Tensor, torch.clone, self.eager_model(*args)) for args in eager_inputs]
        except Exception as error:
            for row in result.rows:
                row.failure = f"eager mode itself fails: {self._failure_text(error)}"
            return result
        self.reference = results_in_float64(self.eager_model, eager_inputs)
        if self.settings.setup.training:
            # Rounding may change gradients by much: if another element becomes the maximum of a pooling window, that element gets the
            # gradient. Results for slightly changed inputs show how large such changes are.
            self.perturbed = [perturbed_results(self.eager_model, args) for args in eager_inputs]
        self.progress.step("counting what TorchDynamo captures")
        if not self.settings.setup.training:
            try:
                result.captured = capture.count_captures(self.model, self.inputs[0])
            except Exception as error:
                result.capture_failure = self._failure_text(error)
            torch._dynamo.reset()

        if self.settings.memory is not None:
            for engine in engines:
                self.progress.step(f"{engine.name}: memory")
                with self._record_failure(rows[engine.name]):
                    batches = [self.inputs[0], *(self._new_inputs() for _ in range(3))]
                    rows[engine.name].memory = self.settings.memory(engine, self.case, self.settings.setup, batches)
        runners: dict[str, BenchRunner] = {}
        try:
            for engine in engines:
                self.progress.step(f"{engine.name}: first call")
                self._first_call(engine, rows[engine.name], runners)
            self.settings.before_rounds()
            self._rounds(rows, runners)
            self._check_second_input(engines, rows, runners)
        finally:
            for runner in runners.values():
                runner.close()
        self._compare(rows)
        return result

    @contextlib.contextmanager
    def _record_failure(self, row: EngineResult) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            row.failure = row.failure or self._failure_text(error)

    def _failure_text(self, error: Exception) -> str:
        if self.settings.traceback:
            traceback.print_exception(error)
        return first_line(error)

    def _first_call(self, engine: BenchEngine, row: EngineResult, runners: dict[str, BenchRunner]) -> None:
        capture.reset_dynamic_sizes()
        setup = self.settings.setup
        runner: BenchRunner | None = None
        with self._record_failure(row):
            # A separate process builds the model before the clock starts, so that its first call measures only the engine.
            if engine.process is not None:
                runner = engine.process(engine, self.case, setup)
            before = metrics.seconds()
            start = time.perf_counter()
            runner = runner or LocalRunner(engine, self.eager_model if engine.native else self.model, self.inputs[0], setup)
            result = runner.call(self.inputs[0])
            row.first_call_seconds = time.perf_counter() - start
            row.first_phases = _difference(metrics.seconds(), before)
            row.agreement = self._agreement_of(engine, result, 0)
            # The next calls are not timed: in them memory is first reused, TorchScript specializes, and sizes become dynamic.
            for _ in range(3):
                runner.call(self._new_inputs() if self.settings.randomize_input else self.inputs[0])
        if row.failure and runner is not None:
            runner.close()
        elif runner is not None:
            runners[engine.name] = runner

    def _rounds(self, rows: dict[str, EngineResult], runners: dict[str, BenchRunner]) -> None:
        settings = self.settings
        names = list(runners)
        timings = {name: _PhaseCounts() for name in names}
        budget = settings.seconds * len(names)
        start = time.perf_counter()
        reported_share = 0.0
        for number in range(settings.rounds or MAXIMUM_ROUNDS):
            elapsed = time.perf_counter() - start
            if settings.rounds is None and number >= MINIMUM_ROUNDS and elapsed >= budget:
                break
            for position in range(len(names)):
                name = names[(position + number) % len(names)]
                if rows[name].failure:
                    continue
                batches = [
                    self._new_inputs() if settings.randomize_input else self.inputs[0] for _ in range(1 + settings.iterations_per_run)
                ]
                with self._record_failure(rows[name]):
                    runners[name].call(batches[0])
                    with timings[name]:
                        timing = runners[name].time(batches[1:])
                    rows[name].wall_samples.append(timing.wall_seconds / settings.iterations_per_run * 1e3)
                    rows[name].cpu_samples.append(timing.cpu_seconds / settings.iterations_per_run * 1e3)
                    if settings.amortized:
                        timing = runners[name].time([batches[0]] * settings.amortized)
                        rows[name].amortized_samples.append(timing.wall_seconds / settings.amortized * 1e3)
            share = (number + 1) / settings.rounds if settings.rounds else min(1.0, (time.perf_counter() - start) / max(budget, 1e-9))
            self.progress.step(f"round {number + 1}", (share - reported_share) * ROUND_STEPS)
            reported_share = share
        for name in names:
            row = rows[name]
            calls = len(row.wall_samples) * settings.iterations_per_run
            if calls:
                row.wall, row.cpu = Spread.of(row.wall_samples), Spread.of(row.cpu_samples)
                row.amortized = Spread.of(row.amortized_samples) if row.amortized_samples else None
                row.call_phases = {phase: seconds / calls * 1e3 for phase, seconds in timings[name].seconds.items()}
                counts = timings[name].counts
                row.traces, row.compilations, row.recorded_ops = counts["trace"], counts["compile"], counts["lazy_ops"] / calls

    def _check_second_input(self, engines: Sequence[BenchEngine], rows: dict[str, EngineResult], runners: dict[str, BenchRunner]) -> None:
        for engine in engines:
            row, runner = rows[engine.name], runners.get(engine.name)
            if runner is None or row.failure or row.agreement is None:
                continue
            with self._record_failure(row):
                row.agreement = worst([row.agreement, self._agreement_of(engine, runner.call(self.inputs[1]), 1)])

    def _agreement_of(self, engine: BenchEngine, result: Any, index: int) -> NumericalAgreement:
        if self.eager_model is not self.model:
            setup = self.settings.setup.eager_setup if engine.native else self.settings.setup
            wrong_devices = {str(leaf.device) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)} - {
                str(setup.device)
            }
            if wrong_devices:
                return NumericalAgreement(False, detail=f"device {', '.join(wrong_devices)}, the model is on {setup.device}")
            result = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, result)
        reference = self.reference[index] if self.reference else None
        training = bool(self.settings.setup.training)
        return compare(result, self.expected[index], reference, gradients=training, perturbed=self.perturbed[index])

    def _compare(self, rows: dict[str, EngineResult]) -> None:
        baseline = rows.get(self.settings.baseline)
        if baseline is None or baseline.wall is None or baseline.failure:
            return
        for row in rows.values():
            if row.wall is not None and not row.failure:
                row.speedup = baseline.wall.median / row.wall.median


class _PhaseCounts:
    """A context manager that adds up, over all uses, the changes of dynaxla's counters and of its seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> None:
        self._seconds, self._counts = metrics.seconds(), Counter(metrics.snapshot())

    def __exit__(self, *_: object) -> None:
        for phase, seconds in _difference(metrics.seconds(), self._seconds).items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self.counts += Counter(metrics.snapshot()) - self._counts


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {phase: seconds - before.get(phase, 0.0) for phase, seconds in after.items() if seconds > before.get(phase, 0.0)}


def warm_up_engines(engines: Sequence[BenchEngine], setup: ModelSetup) -> None:
    """Runs a tiny model in each engine of this process.

    Otherwise work that is done once per process (imports, the start of compilers) would count in the first model's times. Failures are
    ignored here, because the measurements will show them.
    """
    for engine in engines:
        if engine.process is None:
            device = setup.eager_setup.device if engine.native else setup.device
            model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.GELU()).to(device, setup.dtype).requires_grad_(False).eval()
            model = TrainingStep(model, setup.training) if setup.training else model
            inputs = (torch.ones(2, 4, device=device, dtype=setup.dtype),)
            with contextlib.suppress(Exception), torch.no_grad():
                engine.prepare_call(model, inputs)(*inputs)
    torch._dynamo.reset()


@contextlib.contextmanager
def xla_thread_pool(threads: int) -> Iterator[list[str]]:
    """Sets PJRT_NPROC inside the context, unless the environment has it, and yields notes for the report.

    JAX's own CPU client, which torchax and the device "jax" use, reads the size of its thread pool from PJRT_NPROC when it is created.
    """
    if os.environ.get("PJRT_NPROC"):
        yield [f"XLA's CPU pools have PJRT_NPROC={os.environ['PJRT_NPROC']} threads, as the environment says."]
        return
    os.environ["PJRT_NPROC"] = str(threads)
    try:
        yield []
    finally:
        del os.environ["PJRT_NPROC"]


@contextlib.contextmanager
def process_settings(threads: int) -> Iterator[list[str]]:
    """Inside the context, torch and XLA's CPU pools have this many threads, and the caches of dynaxla and Inductor on disk are empty.

    XLA's pools have another number of threads if PJRT_NPROC is set. Yields notes for the report.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        notes = stack.enter_context(xla_thread_pool(threads))
        stack.enter_context(with_empty_caches())
        if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            notes.append("JAX_COMPILATION_CACHE_DIR is set: dynaxla's first calls may have found programs of an earlier run.")
        # This logger's only message, about graph breaks at .item(), would appear in the middle of the progress bar.
        logger = logging.getLogger("torch._dynamo.variables.tensor")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        yield notes
