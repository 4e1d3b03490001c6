"""Counters of what has been done, and the seconds it took, process-wide: by names of ours, and by those that PyTorch/XLA's users know."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from .. import forks
from . import coverage, events

_lock = forks.lock()
_clock: Callable[[], float] = time.perf_counter
_counts: Counter[str] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)
# PyTorch/XLA's names of phases, and the last samples of each: when it ended (Unix time), and its seconds.
_METRICS = {"CompileTime": "compile", "ExecuteTime": "execute"}
_samples: dict[str, deque[tuple[float, float]]] = {phase: deque(maxlen=1024) for phase in _METRICS.values()}
_thread = threading.local()  # inside: seconds of the phases that have ended within the present one


def add(name: str, amount: int = 1) -> None:
    """Count something."""
    with _lock:
        _counts[name] += amount


def use_clock(clock: Callable[[], float]) -> None:
    """From now on phases are timed by another clock than `time.perf_counter`, e.g. `time.process_time`."""
    global _clock
    _clock = clock


@contextlib.contextmanager
def timed(phase: str) -> Iterator[None]:
    """Add the time of the block to `phase`, and one to its count. What other phases take inside of the block is theirs alone."""
    start, outer = _clock(), getattr(_thread, "inside", 0.0)
    _thread.inside = 0.0
    try:
        yield
    finally:
        passed = _clock() - start
        own = passed - _thread.inside
        with _lock:
            _note(phase, own)
        _thread.inside = outer + passed
        if events.is_heard():
            events.tell(events.Spent(phase, own))


def now() -> float:
    """For `ran`."""
    return _clock()


def ran(start: float, is_first: bool) -> float:
    """Count a program that has run. start: `now()` before it; is_first: whether it ran for the first time since it was compiled.

    Returns: the seconds that it took.
    """
    seconds = _clock() - start
    _thread.inside = getattr(_thread, "inside", 0.0) + seconds
    with _lock:
        _counts["calls"] += 1
        if not is_first:
            _counts["found_compiled"] += 1
        _note("execute", seconds)
    return seconds


def _note(phase: str, seconds: float) -> None:
    """Under the lock."""
    _seconds[phase] += seconds
    _counts[phase] += 1
    if (samples := _samples.get(phase)) is not None:
        samples.append((time.time(), seconds))


def snapshot() -> dict[str, int]:
    """Counts since the process began or `reset()`, by our names:

    graphs: ATen graphs received; trace, lower, compile: how often each was done; loads: compilations that were found done, in the cache
    directory; kept_graphs: graphs that an earlier process had traced, and left there; recalls: programs that one had lowered;
    lookup: executables found again by their program's
    hash (dynaxla_retrace), and by recorded ops (lazy mode); evictions: executables dropped from a full cache; calls: compiled programs run;
    imports: tensors handed to XLA in place for one call; aliases: tensors handed over and kept; input_copies: tensors that had to be
    copied to be handed over; by_torch: graphs (or parts of them) that torch ran op by op, where XLA had no part; meanwhile: calls that
    torch's kernels ran because XLA had not compiled yet (option compile="background"); late_writes: calls behind which torch wrote to
    parts of inputs; trials: runs of engines that compete (option engines) beside calls; repeated:
    calls that a GPU had too little memory for, until torch gave some back;
    found_compiled: calls, and runs of recorded ops on the device "jax", of programs that had run before; execute: runs of programs;
    partitioned: graphs whose collectives XLA's partitioner chooses (option partition="xla"); not_partitioned: TorchDynamo's graphs with
    DTensors that it was not given, under that option; networks: of processes, among which collectives are XLA's own;
    device_ops, lazy_ops: ops that the device has run one by one, and recorded; device_fallbacks: those that came from the CPU.
    """
    with _lock:
        return dict(_counts)


def seconds() -> dict[str, float]:
    """Seconds by phase (capture, trace, lower, compile, lookup), of wall time unless another clock is used."""
    with _lock:
        return dict(_seconds)


def reset() -> None:
    """Set all counts and times to zero."""
    with _lock:
        _counts.clear()
        _seconds.clear()
        for samples in _samples.values():
            samples.clear()


# As PyTorch/XLA has them (torch_xla.debug.metrics).


def counter_names() -> list[str]:
    """Those of counters that are not zero: PyTorch/XLA's, and ours."""
    return sorted(_counters())


def counter_value(name: str) -> int | None:
    """A counter since the process began or `clear()`; None if nothing has been counted.

    UncachedCompile: programs that XLA has compiled, those of single ops of the device "jax" included; CachedCompile: runs of compiled
    graphs, and of recorded ops on the device, that were found compiled; `aten::name`: how often torch's own kernel stood in for an op, by
    op, and for a compiled graph once for each time that it was traced. Names of `snapshot` do, too.
    """
    return _counters().get(name)


def metric_names() -> list[str]:
    """Those of metrics that have samples."""
    with _lock:
        return [name for name, phase in _METRICS.items() if _counts[phase]]


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """How many samples a metric has; their sum in seconds; the last 1024 as (Unix time, seconds). None if there are none.

    CompileTime: XLA's compilations; ExecuteTime: calls of programs of compiled graphs, and of recorded ops on the device "jax". A call may
    come back before its program is done: on a GPU, and on the device where nobody waits for its results.
    """
    with _lock:
        phase = _METRICS.get(name, "")
        return (_counts[phase], _seconds[phase], list(_samples[phase])) if _counts.get(phase) else None


def report() -> str:
    """All metrics and counters, to be read."""
    lines: list[str] = []
    for name in metric_names():
        if (data := metric_data(name)) is not None:
            count, total, samples = data
            lines += [f"Metric: {name}", f"  TotalSamples: {count}", f"  Accumulator: {_time(total)}", f"  {_percentiles(samples)}"]
    for name, value in sorted(_counters().items()):
        lines += [f"Counter: {name}", f"  Value: {value}"]
    return "\n".join(lines)


def clear() -> None:
    """Set all counters and metrics to zero, `aten::name` included."""
    reset()
    coverage.reset()


def _counters() -> dict[str, int]:
    with _lock:
        found = Counter({name: count for name, count in _counts.items() if name not in _METRICS.values()})
        found["UncachedCompile"] = _counts["compile"] - _counts["loads"]
        found["CachedCompile"] = _counts["found_compiled"]
    for op, ways in coverage.snapshot().items():
        space, _, name = op.partition(".")
        found[f"{space}::{name.partition('.')[0]}"] += ways["fallback"]
    return {name: count for name, count in found.items() if count}


def _percentiles(samples: Sequence[tuple[float, float]]) -> str:
    ordered = sorted(seconds for _, seconds in samples)
    places = (1, 5, 10, 20, 50, 80, 90, 95, 99)
    return "Percentiles: " + "; ".join(f"{place}%={_time(ordered[len(ordered) * place // 100])}" for place in places)


def _time(seconds: float) -> str:
    return f"{seconds:.3f}s" if seconds >= 1 else f"{seconds * 1e3:.3f}ms"
