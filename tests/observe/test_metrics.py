"""Tests of counters and of the seconds of phases. Nested phases are counted once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import dynaxla
from dynaxla.observe import coverage, metrics


class Clock:
    """A clock that only `advance` changes, by seconds without rounding errors."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    metrics.reset()
    metrics.use_clock(clock)
    yield clock
    metrics.use_clock(time.perf_counter)
    metrics.reset()


def test_nested_phases(clock: Clock) -> None:
    with metrics.timed("outer"):
        clock.advance(1)
        with metrics.timed("inner"), metrics.timed("innermost"):
            clock.advance(2)
        with metrics.timed("inner"):
            clock.advance(4)
        with metrics.timed("outer"):
            clock.advance(8)
        clock.advance(16)
    clock.advance(32)
    assert metrics.seconds() == {"outer": 25, "inner": 4, "innermost": 2}
    assert metrics.snapshot() == {"outer": 2, "inner": 2, "innermost": 1}


def test_failed_phase_is_counted(clock: Clock) -> None:
    def fail() -> None:
        with metrics.timed("failing"):
            clock.advance(2)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert metrics.seconds() == {"failing": 2}


def test_default_clock_is_wall_time() -> None:
    metrics.reset()
    with metrics.timed("asleep"):
        time.sleep(0.01)
    assert metrics.seconds()["asleep"] >= 0.01


def test_interface_of_pytorch_xla(clock: Clock) -> None:
    metrics.clear()
    assert metrics.counter_value("UncachedCompile") is metrics.metric_data("CompileTime") is None
    for seconds in (1, 3):
        with metrics.timed("compile"):
            clock.advance(seconds)
    start = metrics.now()
    clock.advance(0.5)
    metrics.count_run(start, is_first=True)
    metrics.count_run(metrics.now(), is_first=False)
    metrics.add("graphs")
    for op in ("aten.nonzero.default", "aten.max.dim", "aten.max.default"):
        coverage.count_fallback(op, "for a test", "")
    assert metrics.counter_names() == [
        "CachedCompile",
        "UncachedCompile",
        "aten::max",
        "aten::nonzero",
        "calls",
        "graphs",
        "later_runs",
    ]
    assert [metrics.counter_value(name) for name in ("UncachedCompile", "CachedCompile", "aten::max", "graphs")] == [2, 1, 2, 1]
    assert metrics.metric_names() == ["CompileTime", "ExecuteTime"]
    compile_times = metrics.metric_data("CompileTime")
    assert compile_times is not None
    assert (compile_times[:2], [seconds for _, seconds in compile_times[2]]) == ((2, 4), [1, 3])
    assert abs(compile_times[2][-1][0] - time.time()) < 60
    report = metrics.report()
    assert "Metric: CompileTime\n  TotalSamples: 2\n  Accumulator: 4.000s\n  Percentiles: 1%=1.000s;" in report
    assert "Metric: ExecuteTime\n  TotalSamples: 2\n  Accumulator: 500.000ms" in report
    assert "Counter: aten::nonzero\n  Value: 1" in report
    metrics.clear()
    assert metrics.counter_names() == metrics.metric_names() == []
    assert metrics.report() == ""


def test_compiled_graphs_are_counted() -> None:
    assert dynaxla.metrics is metrics
    compiled = torch.compile(lambda x: x * 2 + 1, backend="dynaxla", options={"cache": ""})
    metrics.clear()
    for _ in range(3):
        compiled(torch.ones(3))
    assert [metrics.counter_value(name) for name in ("UncachedCompile", "CachedCompile")] == [1, 2]
    execute_times = metrics.metric_data("ExecuteTime")
    assert execute_times is not None
    assert (execute_times[0], execute_times[1] > 0, len(execute_times[2])) == (3, True, 3)
