"""Phases' seconds: what happens inside of another phase is counted once."""

from __future__ import annotations

import time

from dynaxla.observe import metrics


def test_phases_within_phases() -> None:
    metrics.reset()
    start = time.perf_counter()
    with metrics.timed("outer"):
        with metrics.timed("inner"), metrics.timed("innermost"):
            time.sleep(0.02)
        with metrics.timed("inner"):
            time.sleep(0.01)
        with metrics.timed("outer"):
            time.sleep(0.01)
    passed = time.perf_counter() - start
    found = metrics.seconds()
    assert 0.04 <= sum(found.values()) <= passed
    assert found["innermost"] >= 0.02
    assert 0.01 <= found["inner"] < found["innermost"] + found["inner"]
    assert found["outer"] <= passed - 0.03
    counts = metrics.snapshot()
    assert (counts["outer"], counts["inner"], counts["innermost"]) == (2, 2, 1)
