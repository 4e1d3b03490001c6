"""Process-wide counters and times, under dynaxla's own names and under those of PyTorch/XLA. Users know this module as `dynaxla.metrics`.

`snapshot` returns dynaxla's counters, `seconds` its times, and `reset` sets both to zero. `report`, `counter_names`, `counter_value`,
`metric_names`, `metric_data` and `clear` have the interface of `torch_xla.debug.metrics`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from .. import forks
from . import coverage, events, progress

_lock = forks.lock()
_clock: Callable[[], float] = time.perf_counter
_counts: Counter[str] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)
# dynaxla's phases by the names of PyTorch/XLA's metrics.
_METRICS = {"CompileTime": "compile", "ExecuteTime": "execute"}
# The latest samples of each phase in `_METRICS`: the Unix time of its end, and its duration in seconds.
_samples: dict[str, deque[tuple[float, float]]] = {phase: deque(maxlen=1024) for phase in _METRICS.values()}
# Runs of programs that are not counted yet: the Unix time of the run's end, its duration in seconds, and True for the first run since the
# program was compiled. A run only appends to the list, so that the lock is taken once for many runs.
_pending_runs: list[tuple[float, float, bool]] = []
_MAX_PENDING_RUNS = 256
# The attribute `nested_seconds`: the seconds of the phases and runs that have ended within this thread's current phase.
_thread = threading.local()


def add(name: str, amount: int = 1) -> None:
    """Adds to a counter."""
    with _lock:
        _counts[name] += amount


def use_clock(clock: Callable[[], float]) -> None:
    """Sets the clock of all phases from now on, in place of `time.perf_counter`; e.g. `time.process_time`."""
    global _clock
    _clock = clock


@contextlib.contextmanager
def timed(phase: str, graph: str = "", nodes: int = 0) -> Iterator[None]:
    """Adds the time of the block to a phase, without the time of nested phases, and adds one to the phase's count.

    Args:
        phase: The phase.
        graph: The name of the phase's graph, for reports of long compilations.
        nodes: The number of the graph's nodes, if the phase captures it; else 0.
    """
    start, outer = _clock(), getattr(_thread, "nested_seconds", 0.0)
    _thread.nested_seconds = 0.0
    token = progress.begin(phase, graph, nodes)
    try:
        yield
    finally:
        if token is not None:
            progress.end(token)
        passed = _clock() - start
        own = passed - _thread.nested_seconds
        with _lock:
            _add_sample(phase, own, time.time())
        _thread.nested_seconds = outer + passed
        if events.has_listeners():
            events.emit(events.PhaseEnded(phase, own))


def now() -> float:
    """Returns the start time for `count_run`."""
    return _clock()


def count_run(start: float, is_first: bool) -> float:
    """Counts a run of a program.

    Args:
        start: The value of `now()` before the run.
        is_first: True for the first run since the program was compiled.

    Returns: the duration in seconds.
    """
    seconds = _clock() - start
    _thread.nested_seconds = getattr(_thread, "nested_seconds", 0.0) + seconds
    _pending_runs.append((time.time(), seconds, is_first))
    if len(_pending_runs) >= _MAX_PENDING_RUNS:
        with _lock:
            _count_runs()
    return seconds


def _count_runs() -> None:
    """Counts the runs in `_pending_runs`. The caller must hold the lock. Other threads may append runs meanwhile."""
    runs = _pending_runs.copy()
    del _pending_runs[: len(runs)]
    _counts["calls"] += len(runs)
    for when, seconds, is_first in runs:
        if not is_first:
            _counts["later_runs"] += 1
        _add_sample("execute", seconds, when)


def _add_sample(phase: str, seconds: float, when: float) -> None:
    """Adds a sample to a phase. `when` is the Unix time of its end. The caller must hold the lock."""
    _seconds[phase] += seconds
    _counts[phase] += 1
    if (samples := _samples.get(phase)) is not None:
        samples.append((when, seconds))


@contextlib.contextmanager
def _locked_counts() -> Iterator[None]:
    """Inside the context, the lock is held, and all runs are counted."""
    with _lock:
        if _pending_runs:
            _count_runs()
        yield


def snapshot() -> dict[str, int]:
    """Returns dynaxla's counters since the process began or `reset()`, by name:

    graphs: ATen graphs received.
    capture, trace, lower, compile, tune: runs of each phase.
    loads: compilations replaced by a load from the cache directory.
    graphs_from_cache: graphs that an earlier process had traced and stored in the cache directory.
    recalls: programs that were not traced and lowered, because an earlier process, or this one, had done so.
    lookup: look-ups of executables by the program's hash (dynaxla_retrace), or by recorded ops (lazy mode).
    evictions: entries dropped from full caches in memory: executables, and facts that calls look up.
    calls: runs of compiled programs of graphs.
    execute: runs of programs.
    later_runs: calls, and runs of recorded ops on the device "jax", of programs that had run before.
    imports: tensors passed to XLA without a copy, for one call.
    aliases: arrays created on a tensor's memory without a copy, and kept for later calls. (Their use in later calls is not counted.)
    input_copies: copies of tensors whose memory XLA could not read as it was.
    by_torch: graphs (or parts of them) that torch ran op by op.
    kernels: kernels of torch that a program has called.
    exact_sizes: calls that ran with exact sizes under the option sizes="buckets".
    preparations: computations of values that depend only on weights (option freeze).
    meanwhile: calls that torch's kernels ran before XLA had compiled (option compile="auto" or "background").
    late_writes: calls of graphs whose program leaves writes to slices of inputs to torch's ops.
    trials: additional runs of competing engines (backend dynaxla_auto).
    steps: calls of compiled steps that replayed a program.
    eager_steps: calls of compiled steps that ran in eager mode.
    repeated: calls that ran again after torch had given back GPU memory.
    partitioned: graphs whose collectives XLA's partitioner chooses (option distributed="spmd").
    not_partitioned: TorchDynamo's graphs with DTensors that XLA's partitioner did not compile, under that option.
    networks: networks of processes in which XLA itself executes collectives.
    agreements: comparisons of this process's next collectives with those of the other processes of a group.
    host_copies: copies between the CPU and the device "jax".
    undonated: arrays of the device "jax" that were copied instead of donated, because something else refers to them.
    device_ops, lazy_ops: ops that the device "jax" has run one by one, and ops that it has recorded.
    device_fallbacks: ops of the device "jax" that ran on the CPU.
    """
    with _locked_counts():
        return dict(_counts)


def seconds() -> dict[str, float]:
    """Returns the seconds by phase, such as capture, trace, lower, compile or execute, in wall time unless another clock is set."""
    with _locked_counts():
        return dict(_seconds)


def reset() -> None:
    """Sets all counts and times to zero."""
    with _locked_counts():
        _counts.clear()
        _seconds.clear()
        for samples in _samples.values():
            samples.clear()


# The interface of torch_xla.debug.metrics


def counter_names() -> list[str]:
    """Returns the names of all counters that are not zero: PyTorch/XLA's and dynaxla's."""
    return sorted(_counters())


def counter_value(name: str) -> int | None:
    """Returns the value of a counter since the process began or `clear()`; None if nothing has been counted.

    UncachedCompile: programs that XLA has compiled, including those of single ops of the device "jax".
    CachedCompile: runs of compiled graphs, and of recorded ops on the device "jax", whose program had run before.
    `aten::name`: fallbacks of an op to torch's own kernel; in a compiled graph, one for each node and trace.
    The names of `snapshot` are valid, too.
    """
    return _counters().get(name)


def metric_names() -> list[str]:
    """Returns the names of all metrics that have samples."""
    with _locked_counts():
        return [name for name, phase in _METRICS.items() if _counts[phase]]


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """Returns a metric's number of samples, their sum in seconds, and the last 1024 as (Unix time, seconds). None without samples.

    CompileTime: XLA's compilations, and loads of compiled programs from the cache directory.
    ExecuteTime: calls of programs of compiled graphs, and of recorded ops on the device "jax". On a GPU and on the device "jax", a call may
    return before its program is done.
    """
    with _locked_counts():
        phase = _METRICS.get(name, "")
        return (_counts[phase], _seconds[phase], list(_samples[phase])) if _counts.get(phase) else None


def report() -> str:
    """Returns all metrics and counters as text for people."""
    lines: list[str] = []
    for name in metric_names():
        if (data := metric_data(name)) is not None:
            count, total, samples = data
            lines += [f"Metric: {name}", f"  TotalSamples: {count}", f"  Accumulator: {_time(total)}", f"  {_percentiles(samples)}"]
    for name, value in sorted(_counters().items()):
        lines += [f"Counter: {name}", f"  Value: {value}"]
    return "\n".join(lines)


def clear() -> None:
    """Sets all counters and metrics to zero, including `aten::name`."""
    reset()
    coverage.reset()


def _counters() -> dict[str, int]:
    with _locked_counts():
        found = Counter({name: count for name, count in _counts.items() if name not in _METRICS.values()})
        found["UncachedCompile"] = _counts["compile"] - _counts["loads"]
        found["CachedCompile"] = _counts["later_runs"]
    for op, counts in coverage.snapshot().items():
        space, _, name = op.partition(".")
        found[f"{space}::{name.partition('.')[0]}"] += counts["fallback"]
    return {name: count for name, count in found.items() if count}


def _percentiles(samples: Sequence[tuple[float, float]]) -> str:
    ordered = sorted(seconds for _, seconds in samples)
    percents = (1, 5, 10, 20, 50, 80, 90, 95, 99)
    return "Percentiles: " + "; ".join(f"{percent}%={_time(ordered[len(ordered) * percent // 100])}" for percent in percents)


def _time(seconds: float) -> str:
    return f"{seconds:.3f}s" if seconds >= 1 else f"{seconds * 1e3:.3f}ms"
