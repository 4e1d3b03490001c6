"""Phases' seconds: what happens inside of another phase is counted once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from dynaxla.observe import metrics


class Clock:
    """It goes only when told to: by seconds that binary fractions hold."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def goes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    metrics.reset()
    metrics.use_clock(clock)
    yield clock
    metrics.use_clock(time.perf_counter)
    metrics.reset()


def test_phases_within_phases(clock: Clock) -> None:
    with metrics.timed("outer"):
        clock.goes(1)
        with metrics.timed("inner"), metrics.timed("innermost"):
            clock.goes(2)
        with metrics.timed("inner"):
            clock.goes(4)
        with metrics.timed("outer"):
            clock.goes(8)
        clock.goes(16)
    clock.goes(32)
    assert metrics.seconds() == {"outer": 25, "inner": 4, "innermost": 2}
    assert metrics.snapshot() == {"outer": 2, "inner": 2, "innermost": 1}


def test_a_phase_that_fails_is_counted(clock: Clock) -> None:
    def fail() -> None:
        with metrics.timed("failing"):
            clock.goes(2)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert metrics.seconds() == {"failing": 2}


def test_wall_time_unless_told() -> None:
    metrics.reset()
    with metrics.timed("asleep"):
        time.sleep(0.01)
    assert metrics.seconds()["asleep"] >= 0.01
