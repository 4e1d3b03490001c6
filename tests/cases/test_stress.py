"""A short run of threads that compile, train and call at the same time. `make stress` runs them for ten minutes."""

from __future__ import annotations

import pytest

from cases.stress import runner
from support.processes.scripts import completed


@pytest.mark.thorough
def test_threads_that_run_at_the_same_time() -> None:
    """In a process of its own, because the first use of the library is part of the test."""
    done = completed(
        "__import__('runpy').run_module('cases.stress', run_name='__main__', alter_sys=True)", ["--seconds", "1", "--threads", "3"]
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def test_growth_is_reported() -> None:
    samples = [runner.Sample(float(time), 500.0, runner.Counter({"dynaxla.Thing": 10 * time}), 0) for time in range(5)]
    assert runner.Report(samples=samples).grown == ["dynaxla.Thing: 0, then 40"]
    samples = [runner.Sample(float(time), 500.0 + 50 * time, runner.Counter(), 0) for time in range(5)]
    assert len(runner.Report(samples=samples).grown) == 1
    samples = [runner.Sample(float(time), 500.0 + 50 * time, runner.Counter(), 200 * time) for time in range(5)]
    assert not runner.Report(samples=samples).grown
