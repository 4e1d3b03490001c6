"""Tests of the counts of lowered ops and of fallbacks."""

from __future__ import annotations

import logging

import pytest

from dynaxla.observe import coverage


def test_uses_are_counted_and_each_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    coverage.reset()
    with caplog.at_level(logging.WARNING, "dynaxla"):
        coverage.count_lowered("coverage_test.both")
        for _ in range(2):
            coverage.count_fallback("coverage_test.both", "for a test", "model.py:3, in forward")
        coverage.count_fallback("coverage_test.nowhere", "for a test", "")
    assert coverage.snapshot() == {
        "coverage_test.both": {"lowered": 1, "fallback": 2},
        "coverage_test.nowhere": {"lowered": 0, "fallback": 1},
    }
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("torch's own kernel computes coverage_test.both: for a test (first at model.py:3, in forward);")
    assert second.startswith("torch's own kernel computes coverage_test.nowhere: for a test;")
    coverage.reset()
    assert coverage.snapshot() == {}
